"""
Tests on the ranks of a real process group: warm workers that run one test after the other.

Rules of this package: nothing here needs pytest, or loads torch before a test does.
`_rank_session` runs in the tests' own process. `_outcomes`, `_isolation`, `_coverage` and `_plain`
run on the ranks.
"""
