"""What runs in a worker's process: from its birth in the fork server to the end of its program."""
