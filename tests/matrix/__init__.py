"""
Matrix of environments: the tests on every supported Python, with the oldest and newest torch.

``python -m tests.matrix`` prints the table of `docs/figures.md`. Each row has a virtual environment
of its own, made once and kept in a cache folder.
"""
