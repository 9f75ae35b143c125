"""
Imports for the processes of torch's test classes. A fork server imports this module.

Rules of this file: modules that cannot be imported are skipped; the test that needs one reports it.
Output of the imports is flushed here once, so that no forked process writes it again.
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
