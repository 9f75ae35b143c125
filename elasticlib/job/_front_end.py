"""What a notebook's cell is, as far as IPython, its kernel and its widgets tell. None of them is imported for it."""

from __future__ import annotations

import sys
from typing import Any

from attrs import frozen

from elasticlib import _in_notebooks


@frozen
class Cell:
    """A cell that is being executed."""

    identity: str
    """The same whenever that cell runs: its number in the notebook's file, else its text."""
    execution: int
    """The number in its brackets."""


def cell() -> Cell | None:
    """The cell whose code runs in this process; None outside IPython."""
    shell = _in_notebooks.shell()
    if shell is None:
        return None
    try:
        parent = shell.kernel.get_parent("shell") if hasattr(shell, "kernel") else {}
        identity = parent.get("metadata", {}).get("cellId") or shell.history_manager.input_hist_raw[-1]
        return Cell(str(identity), int(shell.execution_count))
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # a front end that is built otherwise


def is_cell(stream: Any, displays: Any) -> bool:
    """
    Whether *stream* and *displays*, where text and objects go, are a cell's own, so that a display can be replaced.

    They are not under ``%%capture`` or ``redirect_stdout``, which take text and keep it; an ``Output`` widget shows
    what comes, and takes no replacement.
    """
    are_kernels = all(hasattr(each, "parent_header") for each in (stream, displays))
    return are_kernels and not _is_in_widget()


def _is_in_widget() -> bool:
    widget = getattr(sys.modules.get("ipywidgets"), "Output", None)
    if widget is None:
        return False
    module = sys.modules.get("ipywidgets.widgets.widget")
    every = getattr(module, "_instances", None) or getattr(getattr(module, "Widget", None), "widgets", {})
    return any(isinstance(each, widget) and each.msg_id for each in list(every.values()))
