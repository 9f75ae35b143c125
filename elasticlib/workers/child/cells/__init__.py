"""What a function that runs for a notebook finds otherwise than a program does: no keyboard, and no widgets."""
