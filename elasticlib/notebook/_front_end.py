"""
Facts about the running cell from IPython, its kernel and its widgets, without importing them.

Rules of this file: with an unknown version of them a name or a display may be missing, but no error is
raised.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A cell that is being executed."""

    identity: str
    """The same in every execution of the cell: its id in the notebook's file, else its text."""
    execution: int
    """Number in the brackets of the cell."""


def ipython_shell() -> Any:
    """Return IPython's shell; None outside of it."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find() if find is not None else None


def in_kernel() -> bool:
    """Return True if this program is a notebook's kernel."""
    return hasattr(ipython_shell(), "kernel")


def current_cell() -> Cell | None:
    """Return the cell whose code runs in this process; None outside IPython."""
    shell = ipython_shell()
    if shell is None:
        return None

    try:
        # Some front ends give their cells no ids, and a terminal has none: then the text counts.
        parent = shell.kernel.get_parent("shell") if hasattr(shell, "kernel") else {}
        identity = parent.get("metadata", {}).get("cellId") or shell.history_manager.input_hist_raw[-1]
        return Cell(str(identity), int(shell.execution_count))
    except (AttributeError, IndexError, TypeError, ValueError):
        # An unknown kind of front end.
        return None


def cell_label(file: str) -> str:
    """Return IPython's name of the cell that is *file*, such as ``Cell In[3]``; empty for any other file."""
    try:
        found = ipython_shell().compile.format_code_name(file)
        return f"{found[0]} {found[1]}" if found else ""
    except (AttributeError, IndexError, TypeError):
        return ""


def is_stdout_replaced() -> bool:
    """Return True if ``sys.stdout`` differs from the file to which child processes write."""
    stream = sys.stdout

    # A kernel's stream sends messages, even if it has a descriptor.
    if stream is None or in_kernel():
        return stream is not None

    try:
        here, theirs = os.fstat(stream.fileno()), os.fstat(1)
    except (AttributeError, OSError, ValueError):
        # A stream without a descriptor.
        return True

    return (here.st_dev, here.st_ino) != (theirs.st_dev, theirs.st_ino)


def can_replace_displays(stream: Any, displays: Any) -> bool:
    """
    Return True if *stream* (for text) and *displays* (for objects) belong to a cell.

    This is False under ``%%capture`` and ``redirect_stdout``, which collect text. It is also False in an
    ``Output`` widget, which shows text but cannot replace it.
    """
    are_kernels = all(hasattr(each, "parent_header") for each in (stream, displays))
    return are_kernels and not _is_in_widget()


def _is_in_widget() -> bool:
    widget = getattr(sys.modules.get("ipywidgets"), "Output", None)
    if widget is None:
        return False
    # The table of widgets is in this module since ipywidgets 8, and in a class before.
    module = sys.modules.get("ipywidgets.widgets.widget")
    every = getattr(module, "_instances", None) or getattr(getattr(module, "Widget", None), "widgets", {})
    return any(isinstance(each, widget) and each.msg_id for each in list(every.values()))
