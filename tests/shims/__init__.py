"""
Libraries that stand before the C library of a program, to show it a poorer machine.

Rules of this file: each is one C file beside this one, compiled when it is asked for; a variable says what it does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def built(name: str, folder: Path) -> dict[str, str]:
    """The variable that has programs load the shim *name*, compiled into *folder*."""
    library = folder / f"{name}.so"
    compiler = shutil.which("cc") or shutil.which("g++") or "cc"
    command = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / f"{name}.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
