"""What functions take along to the workers, each part by a name that its user knows it by."""
