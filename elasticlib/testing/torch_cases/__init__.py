"""Support for suites that use torch's own multi-process test classes: see `_warm`."""
