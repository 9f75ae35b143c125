"""
Imports for the processes of torch's test classes: this module is imported by a fork server, and imports the others.

Rules of this file: what cannot be imported is left out, and the test that needs it says so; what modules print is
written here, once, and not by each process that is forked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from json import loads

from elasticlib.processes import shared_imports

VARIABLE = "ELASTICLIB_WARM_IMPORTS"
"""Names of modules, in the order of their imports in the tests' own process."""

with shared_imports():
    for _name in loads(os.environ.pop(VARIABLE, "[]")):
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(_name)
for _stream in (sys.stdout, sys.stderr):
    # A stream may be None, or a pipe that nobody reads.
    with contextlib.suppress(Exception):
        _stream.flush()
