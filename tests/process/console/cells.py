"""Cells of a notebook, executed one after the other in a kernel of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 90
"""Seconds that a cell may take."""


def executed(
    *cells: str, folder: Path | None = None, client: type[NotebookClient] = NotebookClient, **settings: Any
) -> list[Any]:
    """Return *cells* with their outputs; *folder* is the kernel's current one, *settings* are of the *client*."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])  # type: ignore[no-untyped-call]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTEST_CURRENT_TEST", None)
    resources = {} if folder is None else {"metadata": {"path": str(folder)}}
    client(notebook, timeout=LIMIT, kernel_name="python3", resources=resources, **settings).execute(env=env)
    return list(notebook.cells)


def printed(outputs: list[Any], *names: str) -> str:
    """Return the text of the streams with these *names*, or of all."""
    streams = [output for output in outputs if output.output_type == "stream"]
    return "".join(output.text for output in streams if not names or output.name in names)
