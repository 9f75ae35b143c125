"""The quickstart notebook, executed as a reader would: what its cells show."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
LIMIT = 120
"""Seconds that any single cell may take."""

Cells: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def cells() -> Cells:
    """The cells by id, after all of them were executed; a cell that fails, fails here."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # With this variable a kernel does not show what child processes print.
    env.pop("PYTEST_CURRENT_TEST", None)
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env=env)
    return {cell.id: cell for cell in notebook.cells}


def value(cell: Any) -> Any:
    """What the last line of a cell evaluated to."""
    (output,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return ast.literal_eval(output.data["text/plain"])


def printed(*cells: Any) -> str:
    return "".join(o.text for cell in cells for o in cell.get("outputs", ()) if o.output_type == "stream")


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]

    assert [] == [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_a_function_of_a_cell_trains_on_two_workers(cells: Cells) -> None:
    accuracies = value(cells["launch"])

    assert {0, 1} == accuracies.keys()
    assert min(accuracies.values()) >= 0.95


def test_what_a_worker_prints_appears_in_the_notebook(cells: Cells) -> None:
    """Both trainings; a kernel may attach the last lines to the cell after."""
    lines = re.findall(r"^epoch (\d)/8 loss", printed(*cells.values()), re.M)

    assert 2 * [str(epoch) for epoch in range(1, 9)] == lines


def test_a_returned_object_is_of_the_class_of_the_cell(cells: Cells) -> None:
    assert "the network is a Digits: True" in printed(cells["net"])


def test_a_function_of_a_cell_survives_the_loss_of_a_worker(cells: Cells) -> None:
    results = value(cells["loss"])

    assert [1, 1] == [attempt for attempt, _ in results.values()]
    assert min(accuracy for _, accuracy in results.values()) >= 0.95


def test_a_failure_comes_with_the_workers_own_exception_and_line(cells: Cells) -> None:
    shown = printed(cells["failure"])

    assert "rank 1 failed first: ZeroDivisionError: division by zero" in shown
    assert "cause: ZeroDivisionError('division by zero')" in shown
    assert "return 1 / (divisor - rank)" in shown
