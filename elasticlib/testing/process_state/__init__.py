"""
State of a process that tests change: what of it ranks have from pytest's process, and what a test may leave behind.

Settings of the kernel, of Python and of libraries are in `elasticlib.utils._process_settings`.
"""
