"""Which cell of a notebook runs, as far as IPython and its kernel tell. Neither is imported for it."""

from __future__ import annotations

import sys
from typing import Any

from attrs import frozen


@frozen
class Cell:
    """A cell that is being executed."""

    identity: str
    """The same whenever that cell runs: its number in the notebook's file, else its text."""
    execution: int
    """The number in its brackets."""


def _shell() -> Any:
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find() if find is not None else None


def is_there() -> bool:
    """Whether this program is a notebook's kernel, or IPython."""
    return _shell() is not None


def label(file: str) -> str:
    """What IPython calls the cell that is *file*, such as ``Cell In[3]``; empty for any other."""
    try:
        found = _shell().compile.format_code_name(file)
        return f"{found[0]} {found[1]}" if found else ""
    except (AttributeError, IndexError, TypeError):
        return ""  # another version of it


def cell() -> Cell | None:
    """The cell whose code runs in this process; None outside IPython."""
    shell = _shell()
    if shell is None:
        return None
    try:
        parent = shell.kernel.get_parent("shell") if hasattr(shell, "kernel") else {}
        identity = parent.get("metadata", {}).get("cellId") or shell.history_manager.input_hist_raw[-1]
        return Cell(str(identity), int(shell.execution_count))
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # a front end that is built otherwise
