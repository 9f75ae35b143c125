"""
Process state that tests change: copied from pytest's process to ranks, and checked for leaks.

Settings of the kernel, of Python and of libraries are in `elasticlib.utils._process_settings`.
"""
