"""Which cell runs: told by IPython and its kernel where there are any, and by no import of ours."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.notebook._front_end import Cell, current_cell


def shell(parent: Any, count: int = 7, **more: Any) -> SimpleNamespace:
    history = SimpleNamespace(input_hist_raw=["", "job = launch()"])
    kernel = SimpleNamespace(get_parent=lambda channel: parent)
    return SimpleNamespace(kernel=kernel, execution_count=count, history_manager=history, **more)


@pytest.fixture
def ipython(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", found)  # type: ignore[arg-type]
    return found


def test_a_program_has_no_cells(ipython: SimpleNamespace) -> None:
    assert current_cell() is None


def test_a_cell_has_the_number_that_the_notebook_gave_it(ipython: SimpleNamespace) -> None:
    ipython.get_ipython = lambda: shell({"metadata": {"cellId": "c1"}})

    assert current_cell() == Cell("c1", 7)


@pytest.mark.parametrize("parent", [{}, {"metadata": {}}], ids=["nothing", "no number"])
def test_a_cell_without_a_number_is_known_by_its_text(ipython: SimpleNamespace, parent: Any) -> None:
    ipython.get_ipython = lambda: shell(parent)

    assert current_cell() == Cell("job = launch()", 7)


def test_ipython_in_a_terminal_is_known_by_the_text_too(ipython: SimpleNamespace) -> None:
    found = shell({})
    del found.kernel
    ipython.get_ipython = lambda: found

    assert current_cell() == Cell("job = launch()", 7)


@pytest.mark.parametrize("broken", ["history_manager", "execution_count"])
def test_a_front_end_that_is_built_otherwise_has_no_cells(ipython: SimpleNamespace, broken: str) -> None:
    found = shell({})
    delattr(found, broken)
    ipython.get_ipython = lambda: found

    assert current_cell() is None


def test_nothing_is_imported_to_find_out() -> None:
    code = "from elasticlib.notebook import current_cell; current_cell(); import sys; print('IPython' in sys.modules)"

    assert "False\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
