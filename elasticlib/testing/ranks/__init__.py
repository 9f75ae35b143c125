"""
Tests on the ranks of a real process group: warm workers, and one call of all ranks after the other.

Rules of this package: nothing here needs pytest, or loads torch before a test does. `_rank_session`
runs in the process of the tests; `_outcomes`, `_isolation`, `_coverage` and `_plain` run on the ranks.
"""
