"""What runs in the ranks: the test's function with what pytest would give it, and looks at what it leaves behind."""
