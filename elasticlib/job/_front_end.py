"""Which cell of a notebook runs, as far as IPython and its kernel tell. Neither is imported for it."""

from __future__ import annotations

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
