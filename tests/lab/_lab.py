"""
JupyterLab with a browser in front of it, as a user has them: a server, Debian's Chromium without a screen, a notebook.

Rules of this file: what is waited for is seen in the page; cells are typed and run by the keyboard, buttons clicked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticlib.processes import _reaper
from tests.benchmarks.kernel import MARK, everything
from tests.process.launches import children
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).parents[2]
LIMIT = 60_000
"""Milliseconds that anything may take in the page."""
_ENDED = re.compile(r"\[\d+\]")


def missing() -> str:
    """Return a text that names what this machine lacks; empty if nothing is missing."""
    lacking = [name for name in ("jupyterlab", "playwright") if find_spec(name) is None]
    lacking += [] if shutil.which("chromium") else ["Debian's package chromium"]
    return f"not on this machine: {', '.join(lacking)}" if lacking else ""


class Cell:
    """A cell that the test has written, as it is on the page."""

    def __init__(self, locator: Locator) -> None:
        self.locator = locator

    def wait_for(self, text: str) -> Cell:
        """Wait until its output shows *text*."""
        self.locator.locator(".jp-OutputArea").get_by_text(text).first.wait_for()
        return self

    def ended(self) -> Cell:
        """Wait until it has a number in its brackets, which it gets at its end."""
        self.locator.locator(".jp-InputPrompt").filter(has_text=_ENDED).wait_for()
        return self

    def outputs(self, kind: str = "") -> list[Locator]:
        """Return the cell's outputs in order; only those of *kind*, such as ``stdout`` or ``text/html``."""
        which = f'[data-mime-type$="{kind}"]' if kind else ""
        return self.locator.locator(f".jp-OutputArea-output{which}").all()

    def errors(self) -> list[Locator]:
        """The errors that it shows, which have the kind of stderr's text."""
        return [each for each in self.outputs("stderr") if "Traceback (most recent call last)" in each.inner_text()]

    def text(self, kind: str = "") -> str:
        """The text of `outputs` as the browser shows it; a word about silence leaves an empty one when it goes."""
        texts = [each.inner_text().strip("\n") for each in self.outputs(kind)]
        return "\n".join(filter(None, texts))


class Notebook:
    """A notebook that is open in a tab."""

    def __init__(self, page: Page, server: int) -> None:
        self.page = page
        self._server = server
        self.shown: list[dict[str, str]] = []
        """Of each cell what it showed after `run_all`, by kind: the page draws those on the screen alone."""

    def cells(self) -> list[Cell]:
        """Those with code."""
        return [Cell(each) for each in self.page.locator(".jp-Notebook .jp-CodeCell").all()]

    def run_all(self) -> None:
        """By the menu; returns when each cell has ended."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        for cell in self.cells():
            cell.ended()
        kinds = ("stdout", "stderr", "text/plain", "text/html")
        self.shown = [{kind: cell.text(kind) for kind in kinds} for cell in self.cells()]

    def begin(self, code: str) -> Cell:
        """Write *code* into a new cell at the end, and run it."""
        cells = self.page.locator(".jp-Notebook .jp-CodeCell")
        number = cells.count()
        self.page.locator(".jp-Notebook-footer").click()
        cells.nth(number).wait_for()
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(code.strip())
        self.page.keyboard.press("Control+Enter")
        return Cell(cells.nth(number))

    def run(self, code: str) -> Cell:
        """Run *code* in a new cell at the end; returns when it has ended."""
        return self.begin(code).ended()

    def stop(self) -> None:
        """Click the square in the tool bar."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]').click()

    def workers(self) -> set[int]:
        """Workers of jobs that run, which look like the kernel."""
        return {
            pid for pid, _, state in self._family() if state not in "ZX" and b"ipykernel_launcher.py" in _title(pid)
        }

    def job(self) -> set[int]:
        """These, what has started them, and all that this has started."""
        family, workers = self._family(), self.workers()
        found = workers | {parent for pid, parent, _ in family if pid in workers}
        while more := {pid for pid, parent, _ in family if parent in found} - found:
            found |= more
        return found

    def _family(self) -> list[tuple[int, int, str]]:
        return [each for kernel in children(self._server) for each in _reaper.descendants(kernel)]


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it is gone


@contextmanager
def lab(notebook: Path, folder: Path) -> Iterator[Notebook]:
    """A copy of *notebook*, open in a browser, with its kernel; *folder* is a home for all that is written."""
    from playwright.sync_api import sync_playwright

    work, home, mark = folder / "work", folder / "home", uuid.uuid4().hex
    work.mkdir()
    settings = home / "config" / "labconfig" / "page_config.json"
    settings.parent.mkdir(parents=True)
    # It asks whether one wants news of Jupyter, before all else.
    settings.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    shutil.copy(notebook, work)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "IPYTHONDIR": str(home / "ipython"), MARK: mark}
    env |= {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    env.pop("PYTEST_CURRENT_TEST", None)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w"))
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", "--port=0"),
                *("--IdentityProvider.token=", f"--ServerApp.root_dir={work}"),
            ],
            env=env,
            stdout=log,
            stderr=log,
        )
        stack.callback(_end, server, mark)
        # Here, and not after the server is there: both take their time, on two cores.
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), chromium_sandbox=False, args=["--disable-gpu"]
        )
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(LIMIT)
        page.goto(f"{_url(server, home / 'runtime')}lab/tree/{notebook.name}")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        yield Notebook(page, server.pid)


def _url(server: subprocess.Popen[Any], folder: Path) -> str:
    """Return the server's URL, which it writes to a file, once the server answers."""
    found = ""

    def answers() -> bool:
        nonlocal found
        assert server.poll() is None, "JupyterLab has ended: see server.log"
        try:
            for path in folder.glob("jpserver-*.json"):
                found = json.loads(path.read_text())["url"]
                with urllib.request.urlopen(f"{found}api", timeout=LIMIT / 1000):
                    return True
        except (OSError, ValueError):
            pass  # it listens later, or writes just now
        return False

    wait_until(answers)
    return found


def _end(server: subprocess.Popen[Any], mark: str) -> None:
    """End the server and its kernels, of which nothing may be left."""
    server.terminate()
    server.wait()
    wait_until(lambda: not everything(mark))
