"""Worker processes: how they are started, what they find, how they end, what they leave behind."""
