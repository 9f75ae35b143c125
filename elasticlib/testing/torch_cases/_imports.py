"""
Imports for the processes of torch's test classes: this module is imported by a fork server, and imports the others.

Rules of this file: what cannot be imported is left out, and the test that needs it says so; what modules print is
written here, once, and not by each process that is forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from json import loads

VARIABLE = "ELASTICLIB_WARM_IMPORTS"
"""Names of modules, in the order of their imports in the tests' own process."""

gc.disable()  # imports make little garbage, and to look for it takes a quarter of their time
for _name in loads(os.environ.pop(VARIABLE, "[]")):
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(_name)
gc.freeze()  # the processes share these pages as long as none looks through them for garbage
gc.enable()
for _stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):  # there is none, or nobody reads it
        _stream.flush()
