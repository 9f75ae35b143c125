"""The program that has started a worker, as that worker has it: its script, and what it shares by multiprocessing."""
