"""Launchers whose the working directory, or may not be entered: workers are there all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import elasticlib
from elasticlib import LaunchConfig, elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

ROOT = Path(__file__).parents[3]
HIDE = {
    "removed": "rmdir {folder}",
    "closed": "chmod 000 {folder}",
    "below a closed one": "chmod 000 {folder}/..",
    "replaced": "rmdir {folder}; mkdir {folder}",
}
"""Commands that remove, close or replace the current folder of a shell."""
JOB = """
import os, sys

def work():
    found = os.stat("/proc/self/cwd")
    return found.st_dev, found.st_ino

if __name__ == "__main__":
    from elasticlib import LaunchConfig, elastic_launch
    config = LaunchConfig(nproc_per_node=2, start_method=sys.argv[1], preload=(), max_restarts=0)
    results = elastic_launch(config, work)()
    sys.exit(results != {rank: work() for rank in range(2)})
"""


class Hidden:
    """Runs commands in a folder that is hidden from them, with the rights of a plain user."""

    def __init__(self, place: Path, how: str) -> None:
        self.folder = place / "above" / "here"
        self._how = HIDE[how].format(folder=self.folder)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run Python with *command*, which must not need what only root may."""
        self.show()
        shell = ["sh", "-c", f'cd {self.folder} && {self._how}; exec "$@"', "sh", sys.executable, *map(str, command)]
        # Root may enter every folder by two capabilities, and can do without.
        plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{self.folder.parents[1]}"}
        return subprocess.run([*plain, *shell], env=environment, capture_output=True, text=True, timeout=120)

    def show(self) -> None:
        """Make the folder, or open it again."""
        self.folder.parent.mkdir(exist_ok=True)
        self.folder.parent.chmod(0o700)
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o700)


@pytest.fixture
def hidden(how: str, tmp_path: Path) -> Iterator[Hidden]:
    """The folder, hidden as the test's parameter *how* says."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root enters every folder, and setpriv is not there to take that right")
    hidden = Hidden(tmp_path, how)
    yield hidden
    hidden.show()


@pytest.mark.parametrize(
    ("method", "how"), [*(("forkserver", how) for how in HIDE), ("spawn", "closed"), ("fork", "removed")]
)
def test_functions_run_where_their_caller_is(method: str, hidden: Hidden, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)

    done = hidden.run(job, method)

    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("how", ["removed", "closed"])
@pytest.mark.parametrize(
    ("options", "program"),
    [
        (("--preload", ""), ("{}/shown.py",)),
        (("--preload", ""), ("-m", "shown")),
        (("--start-method", "spawn"), ("-m", "shown")),
        (("--no-python", sys.executable), ("{}/shown.py",)),
    ],
)
def test_programs_start_as_python_starts_them(
    options: tuple[str, ...], program: tuple[str, ...], hidden: Hidden, tmp_path: Path
) -> None:
    """Also the first folder of the search path is the same."""
    (tmp_path / "shown.py").write_text("import os, sys; print(os.readlink('/proc/self/cwd'), sys.path[0])")
    command = [argument.format(tmp_path) for argument in program]

    plain = hidden.run(*command)
    done = hidden.run("-m", "elasticlib.run", *options, *command)

    assert (0, plain.stdout) == (done.returncode, done.stdout), done.stderr


def here() -> tuple[int, int]:
    """Return the device and inode numbers that identify the current folder."""
    found = os.stat("/proc/self/cwd")
    return found.st_dev, found.st_ino


def enter_removed_folder(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder below *parent*, which is gone then."""
    removed = parent / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()


def test_launches_before_and_after_a_removed_folder_are_each_in_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server of another folder cannot serve a launch whose folder has no path; that one's can serve others."""
    launch = elastic_launch(LaunchConfig(nproc_per_node=1, preload=(), max_restarts=0), here)
    found = [(here(), launch()[0])]
    enter_removed_folder(tmp_path, monkeypatch)
    found.append((here(), launch()[0]))
    monkeypatch.chdir(tmp_path)
    found.append((here(), launch()[0]))
    monkeypatch.undo()

    assert [mine for mine, _ in found] == [theirs for _, theirs in found]
    assert 3 == len({mine for mine, _ in found})


def test_pool_works_in_a_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_removed_folder(tmp_path, monkeypatch)

    with elasticlib.pool(1, group=None) as pool:
        assert {0: here()} == pool.run(here)


def test_libraries_are_imported_ahead_outside_a_removed_folder(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL, which torch brings, ends a program that imports it in a folder without a path."""
    name = module("import os; FOLDER = os.getcwd()")
    enter_removed_folder(tmp_path, monkeypatch)

    assert {0: "/"} == elastic_launch(LaunchConfig(nproc_per_node=1, preload=(name,), max_restarts=0), preloaded_in)()


def preloaded_in() -> str:
    """Return the folder in which the module was imported."""
    return str(sys.modules["preloaded"].FOLDER)  # type: ignore[attr-defined]
