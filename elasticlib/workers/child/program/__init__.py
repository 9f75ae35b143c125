"""
The calling program, as its worker has it: its script, and the objects that multiprocessing
shares.
"""
