"""
Where elasticlib runs: the tests on every supported Python, and with the oldest and newest torch that is held.

``python -m tests.matrix`` prints the table of `docs/figures.md`. Each row has a virtual environment of its own, made
once and kept in a cache folder.
"""
