"""
What ``pytest --pdb`` does with a failure on ranks: the root cause's rank is entered, where it has raised.

Rules of this file: pytest says which failures are looked at, and all others go to its own debugger.
"""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks._failed import RanksFailed

_NAME = "pdbinvoke"


def take_over(config: pytest.Config) -> None:
    """Have failures on ranks entered in their ranks."""
    former = config.pluginmanager.get_plugin(_NAME)
    if former is not None:
        config.pluginmanager.unregister(former)
        config.pluginmanager.register(_Interact(former), _NAME)


class _Interact:
    """Instead of pytest's plugin of that name."""

    def __init__(self, former: Any) -> None:
        self._former = former

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        error = call.excinfo.value
        if not isinstance(error, RanksFailed):
            self._former.pytest_exception_interact(node, call, report)
            return
        capture: Any = node.config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal = node.config.pluginmanager.get_plugin("terminalreporter")._tw
        terminal.line()
        terminal.sep(">", "traceback")
        report.toterminal(terminal)
        terminal.sep(">", f"entering PDB on {ranks_text([error.root])}")
        terminal.flush()
        quits = error.look(error.root)
        if quits is None:
            terminal.line(f"{ranks_text([error.root])} has ended: there is nothing to enter")
        elif quits:
            pytest.exit("Quitting debugger")

    def pytest_internalerror(self, excinfo: Any) -> None:
        self._former.pytest_internalerror(excinfo)
