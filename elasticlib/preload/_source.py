"""
The source of a script and its syntax tree, for those who read it before it runs.
"""

from __future__ import annotations

import ast
import math
import os
import stat


def source_of(path: str, most: float = math.inf) -> bytes | None:
    """
    Return the content of the script at *path*; None where it cannot be read, or has more than *most* bytes.

    A pipe is not read: what came through it does not come again.
    """
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
            return None
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def tree_of(source: bytes) -> ast.Module | None:
    """Return the syntax tree of *source*; None for what this Python does not understand."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
