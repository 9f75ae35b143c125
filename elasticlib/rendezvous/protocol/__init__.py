"""What nodes and their coordinator say to each other: messages, how they look in a store, what is asked of it. Pure."""
