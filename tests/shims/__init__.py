"""
Libraries that stand before the C library of a program: they show it a poorer machine or another time, or watch it.

Rules of this file: each is one C file beside this one, compiled when it is asked for; a variable says what it does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("g++")), reason="no C compiler here")
HERE = Path(__file__).parent


def built(name: str, folder: Path) -> dict[str, str]:
    """The variable that has programs load the shim *name*, compiled into *folder*."""
    library = folder / f"{name}.so"
    compiler = shutil.which("cc") or shutil.which("g++") or "cc"
    command = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / f"{name}.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
