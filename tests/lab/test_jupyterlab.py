"""
A notebook as it is seen in JupyterLab: the quickstart, an error, a bar, a figure, too many lines, and the stop button.

Screenshots of it lie in pytest's temporary folder, or in that which `ELASTICLIB_SCREENSHOTS` names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import screenshot
from tests.lab._lab import ROOT, Notebook, lab, missing
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("ELASTICLIB_SCREENSHOTS"):
        Path(named).mkdir(parents=True, exist_ok=True)
        return Path(named)
    return tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The quickstart, after all of its cells have run."""
    if why := missing():
        pytest.skip(why)
    with lab(ROOT / "notebooks" / "quickstart.ipynb", tmp_path_factory.mktemp("lab")) as notebook:
        notebook.run_all()
        yield notebook


@pytest.fixture
def notebook(opened: Notebook, screenshots: Path, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """It, of which a picture is taken at the end of each test, passed or failed."""
    yield opened
    opened.page.locator(".jp-OutputArea").last.evaluate("shown => shown.scrollIntoView({block: 'end'})")
    opened.page.screenshot(path=screenshots / f"{request.node.name}.png")


def test_the_quickstart_runs_as_its_reader_sees_it(notebook: Notebook) -> None:
    _, _, launch, net, loss, failure = notebook.shown[:6]

    assert [line.rpartition(" ")[0] for line in launch["stdout"].splitlines()[-8:]] == [
        f"epoch {number}/8 loss" for number in range(1, 9)
    ]
    assert re.fullmatch(r"\{0: (0\.9\d+), 1: \1\}", launch["text/plain"])
    assert net["stdout"].startswith("the network is a Digits: True\n")
    assert "rank 1 on node" in loss["stderr"] and "restart 1 of 1" in loss["stderr"]
    assert [row.split()[0] for row in loss["text/html"].splitlines()] == ["rank", "0", "1"]
    assert failure["stdout"].startswith("rank 1 failed first: ZeroDivisionError: division by zero\n")
    assert not any("Traceback (most recent call last)" in cell["stderr"] for cell in notebook.shown)


def test_an_error_of_one_line_takes_few_lines_and_shows_the_users(notebook: Notebook) -> None:
    cell = notebook.run("""
def loss(batch):
    scale = 3
    return batch / (scale - 3)

def fails(batch):
    dist.init_process_group("gloo")
    loss(batch)

elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), fails)(1)
""")

    (error,) = cell.errors()
    assert "---->" in error.inner_text() and "return batch / (scale - 3)" in error.inner_text()
    assert error.inner_text().splitlines()[0].startswith("ZeroDivisionError")
    assert "elasticlib" not in error.inner_text()
    assert 1 == cell.text().count("Traceback")
    # As the browser draws it, with what a long line takes.
    height, line = error.locator("pre").evaluate(
        "drawn => [drawn.getBoundingClientRect().height, parseFloat(getComputedStyle(drawn).lineHeight)]"
    )
    assert height <= 15.5 * line


def test_a_progress_bar_is_one_line_that_moves_and_colours_are_colours(notebook: Notebook) -> None:
    cell = notebook.run("""
import sys

def bar():
    for step in range(101):
        print(f"\\r{step:3}%|{'#' * (step // 5):20}| {step}/100", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("\\x1b[32mdone\\x1b[0m")

elastic_launch(config, bar)()
elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0, show="all"), bar)()
None
""")

    whole = f"100%|{'#' * 20}| 100/100"
    lines = cell.text().splitlines()
    assert [whole, "done"] == lines[:2]
    assert sorted([f"[0] {whole}", "[0] done", f"[1] {whole}", "[1] done"]) == sorted(lines[2:])
    assert ["done"] * 3 == cell.locator.locator(".ansi-green-fg").all_inner_texts()


def test_a_figure_of_rank_0_is_an_image_and_a_widget_is_text(notebook: Notebook) -> None:
    pytest.importorskip("matplotlib")
    cell = notebook.run("""
class Slider:
    def _repr_mimebundle_(self, **_):
        view = {"version_major": 2, "version_minor": 0, "model_id": "of a worker"}
        return {"text/plain": "Slider(of rank 0)", "application/vnd.jupyter.widget-view+json": view}

def plots():
    import matplotlib.pyplot as plt
    plt.plot([1, 3, 2])
    plt.title("rank " + os.environ["RANK"])
    plt.show()
    display(Slider())

elastic_launch(config, plots)()
None
""")

    (image,) = cell.locator.locator("img").all()
    assert image.evaluate("image => image.complete && image.naturalWidth > 100 && image.naturalHeight > 100")
    assert "Slider(of rank 0)" == cell.text("text/plain")


def test_a_hundred_thousand_lines_leave_the_page_at_work(notebook: Notebook) -> None:
    cell = notebook.run("""
def floods():
    for number in range(100_000):
        print("this is line", number)

elastic_launch(config, floods)()
None
""").wait_for("this is line 99999")

    after = notebook.run("print('it', 'answers')").wait_for("it answers")

    assert "it answers" == after.text()
    assert len(cell.text("stdout")) <= 200_000
    (log,) = re.findall(r"the full output is in (.*)\]", cell.text("text/plain"))
    assert 100_000 == Path(log).read_text().count("this is line ")


ENDLESS = """
def endless():
    dist.init_process_group("gloo")
    while True:
        total = torch.ones(1)
        dist.all_reduce(total)
        print("sum", int(total))

"""


def test_the_stop_button_ends_a_cell_and_all_of_its_job(notebook: Notebook) -> None:
    cell = notebook.begin(f"{ENDLESS}elastic_launch(config, endless)()").wait_for("sum 2")
    job = notebook.job()

    notebook.stop()
    cell.ended()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job))
    later = [notebook.run(f"print('later', {number})").wait_for(f"later {number}") for number in range(3)]
    again = notebook.run("elastic_launch(config, print)('it', 'works');").wait_for("it works")

    assert len(job) >= 3
    assert not notebook.workers()
    (error,) = cell.errors()
    assert error.inner_text().splitlines()[0].startswith("LaunchInterrupted")
    assert 1 == cell.text().count("Traceback")
    assert [f"later {number}" for number in range(3)] == [each.text() for each in later]
    assert "it works" == again.text()


def test_the_picture_of_the_readme_shows_this_cell(notebook: Notebook) -> None:
    cell = notebook.run(screenshot.CELL)

    shown = cell.text()
    for rank in range(4):
        assert re.search(rf"^\[{rank}\] training: 100%.* 60/60 .*loss=0\.145\]$", shown, re.MULTILINE)
        assert re.search(rf"^{rank}\s+5\.9", shown, re.MULTILINE)
