"""
Tests on the ranks of a real process group, whoever runs them: warm workers, one call of all ranks after the other.

Rules of this package: nothing here needs pytest, or loads torch before a test does. `_ranks` and what it tells are of
the process that runs the tests; `_outcomes`, `_isolation`, `_coverage` and `_plain` are of the ranks.
"""
