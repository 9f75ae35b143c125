"""
The picture of a notebook that README shows: a cell of JupyterLab, with the progress bars and results of its job.

``python -m tests.docs.screenshot`` opens an empty notebook in JupyterLab, runs `CELL` to its end, and writes
``elasticlib/docs/notebook.png``. It needs the packages of the extra ``dev`` and Debian's Chromium.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat

from tests.lab._lab import lab, missing

PICTURE = Path(__file__).parents[2] / "elasticlib" / "docs" / "notebook.png"
CELL = """
import time
from elasticlib import LaunchConfig, elastic_launch
from tqdm import tqdm

def train(lr):
    steps = tqdm(range(60), desc="training")
    for step in steps:
        time.sleep(0.05)    # the work
        steps.set_postfix(loss=round(1 / (1 + lr * step), 3))
    return lr * step

elastic_launch(LaunchConfig(nproc_per_node=4, show="all"), train)(0.1)
"""


def main() -> None:
    """Run the cell and write the picture."""
    if missing():
        raise SystemExit(missing())

    with tempfile.TemporaryDirectory(prefix="screenshot-") as folder:
        notebook = Path(folder, "train.ipynb")
        made = nbformat.v4.new_notebook()
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        nbformat.write(made, notebook)
        with lab(notebook, Path(folder)) as opened:
            cell = opened.run(CELL)
            cell.locator.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
