"""Suites on the multi-process test classes of torch itself: see `_warm`."""
