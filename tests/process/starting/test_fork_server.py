"""The fork server: what may be imported ahead, when one is shared or made anew, and what its workers find."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, PreloadError, elastic_launch, pool
from elasticlib.errors import StartError
from elasticlib.preload import _import_watch
from elasticlib.workers import _processes
from tests.process import duties

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = Path(__file__).parents[3]
LIMIT = 20.0
"""Seconds that anything waited for may take."""


def config(workers: int = 1, **settings: Any) -> LaunchConfig:
    """A launch without restarts whose fork server imports nothing, so that it starts in milliseconds."""
    return LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, "preload": (), **settings})


def chain(**settings: Any) -> dict[str, int]:
    """Pids from a worker of a new launch up to its reaper."""
    found: dict[str, int] = elastic_launch(config(**settings), duties.chain)()[0]
    return found


def noted_chain(folder: Path, rank: int = 0) -> dict[str, int]:
    """Return the pids that a rank of the first round has noted in *folder*, once it has."""
    file = folder / f"round0.rank{rank}"
    duties.wait_until(file.exists)
    return dict(zip(duties.CHAIN, map(int, file.read_text().split()), strict=True))


def kill(pid: int) -> None:
    """SIGKILL a process and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    duties.wait_until(lambda: not duties.lives(pid))


WORKS_UNTIL = """
import sys
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch
from tests.process import duties
here = Path(sys.argv[1])
elastic_launch(LaunchConfig(nproc_per_node=2, preload=()), duties.works_until)(here / "go", here)
"""


@contextlib.contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Run *action* in a thread during the block, and raise what it raised."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(action)
        yield
        future.result(LIMIT)


# What may be imported ahead.

NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()",
            r"starts a Python thread \(watcher\)",
        ),
        (NATIVE_THREAD, "starts native threads"),
        ("import os\nos.getenv('LOCAL_RANK', '0')", "reads LOCAL_RANK, which each worker has"),
        ("import os\n'RANK' in os.environ", "reads RANK"),
        ("import no_such_module_at_all", r"ModuleNotFoundError: .*no_such_module_at_all.*preloaded\.py, line 1"),
        ("\nraise ValueError('a bad value')", r"ValueError: a bad value \(.*preloaded\.py, line 2\)"),
        ("def broken(:", r"SyntaxError"),
        ("import sys\nsys.exit('not on this machine')", "SystemExit"),
    ],
    ids=["thread", "native-thread", "local-rank", "has-rank", "import", "error", "syntax", "exit"],
)
def test_a_module_that_cannot_be_imported_ahead_is_refused_by_name(
    module: Callable[[str], str], code: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason and the way out are in the text; the variables need not be set to be noticed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(PreloadError, match=why) as caught:
        elastic_launch(config(preload=("json", module(code))), duties.chain)()

    assert "preloaded" == caught.value.module
    assert "leave 'preloaded' out of preload" in str(caught.value)


def test_a_module_that_opens_an_accelerator_is_refused_by_name(module: Callable[[str], str], tmp_path: Path) -> None:
    """With files that stand for devices: the real ones need a driver."""
    device = tmp_path / "nvidia0"
    device.touch()
    name = module(f"kept = open({str(device)!r})")
    check = (
        "from elasticlib.workers.spawner import _fork_server\n"
        f"_fork_server._DEVICE_FILES = ({str(tmp_path / 'nvidia')!r},)\n"
        f"print(_fork_server.why_refused({name!r}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"its import opens an accelerator ({device}), which cannot be used after a fork\n" == done.stdout


def test_numpy_is_preloaded_despite_its_thread_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS ends its pool before a fork and makes it anew: a forked worker computes with it."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")

    results = elastic_launch(config(2, preload=("numpy",)), duties.product_by_numpy)()

    assert {0: 256.0**3, 1: 256.0**3} == results


def test_workers_have_what_was_imported_ahead_and_only_that() -> None:
    names = ("torch", "colorsys", "chunk")

    results = elastic_launch(config(preload=("torch", "colorsys")), duties.modules_before)(*names)

    assert {"torch": True, "colorsys": True, "chunk": False} == results[0]


def test_variable_set_by_an_import_reaches_the_workers(module: Callable[[str], str]) -> None:
    """As in a plain program, which imports it itself."""
    name = module("import os\nos.environ['ELASTICLIB_TEST'] = 'by an import'")

    results = elastic_launch(config(preload=(name,)), duties.variable)("ELASTICLIB_TEST")

    assert "by an import" == results[0][0]


# When a fork server is shared, and when it is made anew.


def test_a_second_call_forks_from_the_same_fork_server() -> None:
    first, second = chain(), chain()

    assert (first["fork server"], first["reaper"]) == (second["fork server"], second["reaper"])
    assert first["spawner"] != second["spawner"]


def test_no_more_than_two_idle_fork_servers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for longest goes, with its reaper. One at work stays, and takes no place from them."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    with pool(1, group=None, preload=()) as ranks:
        at_work = ranks.run(duties.chain)[0]
        chains = []
        for value in ("2", "3", "4"):
            monkeypatch.setenv("MALLOC_ARENA_MAX", value)
            chains.append(chain())

        oldest, *kept = chains
        assert not duties.lives(oldest["fork server"])
        assert not duties.lives(oldest["reaper"])
        assert all(duties.lives(each["fork server"]) for each in (at_work, *kept))


def test_preloaded_module_is_imported_again_after_its_file_changed(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    def value() -> Any:
        import preloaded  # type: ignore[import-not-found]

        return preloaded.VALUE

    job = elastic_launch(config(preload=(module("VALUE = 'old'"),)), value)
    first = job()
    module("VALUE = 'new value'")

    assert ({0: "old"}, {0: "new value"}) == (first, job())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, on every search path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_restart_after_an_upgrade_imports_the_package_again(installed: Path, tmp_path: Path) -> None:
    """Though no file of the module itself is newer: an installer replaces the folder that tells the version."""

    def upgrades_and_fails_once(package: str, note: str) -> tuple[int, int]:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            Path(note).write_text(str(duties.chain()["fork server"]))
            os.rename(f"{package}-1.0.dist-info", f"{package}-2.0.dist-info")
            sys.exit(1)
        return int(Path(note).read_text()), duties.chain()["fork server"]

    package = installed / "package_of_mine"
    package.with_suffix(".py").touch()
    (installed / "package_of_mine-1.0.dist-info").mkdir()
    launch = elastic_launch(config(preload=(package.name,), max_restarts=1), upgrades_and_fails_once)
    before, after = launch(str(package), str(tmp_path / "note"))[0]

    assert before != after


# What would save a restart time.

PREPARES = """
import pathlib
folder = pathlib.Path({folder!r})
(folder / "importing").touch()
while not (folder / "asked").exists():
    pass  # it is asked only while it runs
"""


def test_job_with_a_long_import_at_a_restart_advises_preload(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a module of the project, though that is what was imported first."""

    class Prompt(_import_watch.ImportWatch):
        """Asks as soon as the worker is at its import, which goes on after the first answer."""

        def due_in(self, now: float) -> float | None:
            return None if (tmp_path / "asked").exists() or super().due_in(now) is None else 0.01

        def tend(self, ask: Callable[[], object], now: float) -> None:
            if (tmp_path / "importing").exists():
                super().tend(ask, math.inf)

        def note_answer(self, stacks: str) -> None:
            if not (tmp_path / "asked").exists():
                super().note_answer(stacks)
            if not _import_watch.is_unknown(stacks):
                (tmp_path / "asked").touch()

    def imports_at_a_restart(project: str) -> None:
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        sys.path.insert(0, project)
        import project_of_mine  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setattr(_processes, "ImportWatch", Prompt)
    (tmp_path / "project_of_mine.py").write_text("import big_of_mine.inner")
    (installed / "big_of_mine").mkdir()
    (installed / "big_of_mine/__init__.py").touch()
    (installed / "big_of_mine/inner.py").write_text(PREPARES.format(folder=str(tmp_path)))

    elastic_launch(config(preload=("colorsys",), max_restarts=1), imports_at_a_restart)(str(tmp_path))

    advice = [text for text in caplog.messages if "saves that at each restart" in text]
    assert [1, True] == [len(advice), "importing big_of_mine.inner for about 2 s: --preload colorsys,big_" in advice[0]]


# Ends that nobody asked for.


@pytest.mark.parametrize("victim", ["fork server", "reaper"])
def test_a_call_after_the_idle_fork_server_was_killed_works(victim: str) -> None:
    before = chain()
    kill(before[victim])

    after = chain()

    assert before["fork server"] != after["fork server"]
    duties.wait_until(lambda: not duties.lives(before["fork server"]) and not duties.lives(before["reaper"]))


@pytest.mark.parametrize("victim", ["reaper", "spawner"])
def test_a_kill_above_the_workers_costs_one_restart(victim: str, tmp_path: Path) -> None:
    """The workers go with whoever was killed, and the same call starts new ones."""
    old: list[dict[str, int]] = []

    def kill_victim() -> None:
        old.extend(noted_chain(tmp_path, rank) for rank in (0, 1))
        kill(old[0][victim])

    with beside(kill_victim):
        results = elastic_launch(config(2, max_restarts=1), duties.works_on_in_round)(1, tmp_path)

    assert {0, 1} == set(results)
    assert not {each["worker"] for each in old} & {each["worker"] for each in results.values()}
    assert not any(duties.lives(each["worker"]) for each in old)


@pytest.mark.parametrize("victim", ["reaper", "spawner"])
def test_kill_above_the_workers_is_named_where_no_restart_is_left(victim: str, tmp_path: Path) -> None:
    def kill_victim() -> None:
        kill(noted_chain(tmp_path)[victim])

    with beside(kill_victim), pytest.raises(ChildFailedError, match=f"the {victim} process .pid") as caught:
        elastic_launch(config(), duties.works_on_in_round)(1, tmp_path)

    assert -signal.SIGKILL == caught.value.failures[0].exitcode
    assert chain()["worker"]


@pytest.mark.parametrize("end", ["success", "launcher"])
def test_workers_go_on_though_their_fork_server_was_killed(end: str, tmp_path: Path) -> None:
    """The reaper guards them, and nothing is left when they are done or the launcher is killed."""
    command = [sys.executable, "-c", WORKS_UNTIL, str(tmp_path)]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    chains = [noted_chain(tmp_path, rank) for rank in (0, 1)]
    kill(chains[0]["fork server"])

    if end == "success":
        (tmp_path / "go").touch()
        assert 0 == launcher.wait(LIMIT)
    else:
        launcher.kill()
        launcher.wait()

    duties.wait_until(lambda: not any(duties.lives(pid) for each in chains for pid in each.values()))
    assert ["round0.rank0", "round0.rank1"] == sorted(file.name for file in tmp_path.glob("round*"))


def test_fork_server_killed_beside_its_workers_is_replaced(tmp_path: Path) -> None:
    """While the workers of the first call run, and when they have ended."""
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(elastic_launch(config(), duties.works_until), tmp_path / "go", tmp_path)
        old = noted_chain(tmp_path)
        kill(old["fork server"])
        beside = chain()
        (tmp_path / "go").touch()
        first.result(LIMIT)

    assert old["fork server"] != beside["fork server"] == chain()["fork server"]
    duties.wait_until(lambda: not duties.lives(old["reaper"]))


@pytest.mark.parametrize("times", [1, 9])
def test_a_fork_server_that_is_killed_at_its_imports_is_started_again(
    times: int, module: Callable[[str], str], tmp_path: Path
) -> None:
    """Nothing had run; but not forever: out of memory may come each time."""
    name = module(
        "import os, pathlib, signal\n"
        f"marks = pathlib.Path({str(tmp_path)!r})\n"
        "number = len(list(marks.glob('imported*')))\n"
        f"if number < {times}:\n    (marks / f'imported{{number}}').touch()\n    os.kill(os.getpid(), signal.SIGKILL)"
    )

    if times == 1:
        assert chain(preload=(name,))["worker"]
        return
    with pytest.raises(StartError, match="the fork server process was killed by SIGKILL"):
        chain(preload=(name,))
    assert 4 == len(list(tmp_path.glob("imported*")))


# Another interpreter.


def wrapper(folder: Path, line: str) -> str:
    """A program that starts this very interpreter."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{line.format(python=sys.executable)} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Writes what it sees into ``seen``."""
    path = tmp_path / "script.py"
    path.write_text(
        "import json, os, pathlib, sys\n"
        "seen = {'warm': 'colorsys' in sys.modules, 'site': 'site' in sys.modules, "
        "'wrapped': os.environ.get('WRAPPED'), 'argv': sys.argv[1:], 'rank': os.environ['RANK']}\n"
        "pathlib.Path(__file__).with_name('seen').write_text(json.dumps(seen))\n"
    )
    return path


def seen_by(script: Path, *args: str, **settings: Any) -> dict[str, Any]:
    """Launch *script* and return what it saw."""
    elastic_launch(config(**settings), script)(*args)
    seen: dict[str, Any] = json.loads(script.with_name("seen").read_text())
    return seen


def test_a_module_of_the_standard_library_is_imported_ahead_of_a_script(script: Path) -> None:
    assert seen_by(script, preload=("colorsys",))["warm"]


def test_a_module_beside_the_script_hides_one_of_the_standard_library(script: Path) -> None:
    """The script's folder stands first, as for the script itself."""
    script.with_name("colorsys.py").write_text("import os\nos.environ['WRAPPED'] = 'beside the script'")

    seen = seen_by(script, preload=("colorsys",))

    assert (True, "beside the script") == (seen["warm"], seen["wrapped"])


def test_a_module_beside_the_script_is_imported_ahead(module: Callable[[str], str], script: Path) -> None:
    """As the script itself would find it."""
    name = module("import sys\nsys.modules['colorsys'] = sys")

    assert seen_by(script, preload=(name,))["warm"]


def test_a_wrapper_around_the_interpreter_starts_a_fork_server(
    module: Callable[[str], str], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, "exec {python}"))

    name = module("import sys\nsys.modules['colorsys'] = sys")

    seen = seen_by(script, "a", preload=(name,))

    assert {"warm": True, "site": True, "wrapped": None, "argv": ["a"], "rank": "0"} == seen


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    ("line", "value"),
    [("WRAPPED=yes exec {python}", "yes"), ("unset WRAPPED; exec {python}", None)],
    ids=["set", "unset"],
)
def test_environment_of_a_wrapper_reaches_the_script(
    line: str, value: str | None, method: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRAPPED", "by the caller")
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, line))

    assert value == seen_by(script, start_method=method)["wrapped"]


@pytest.mark.parametrize("preload", [(), ("colorsys",)])
def test_wrapper_builds_a_new_environment_for_each_launch(
    preload: tuple[str, ...], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what it reads for that."""
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, 'WRAPPED="$OUTSIDE, wrapped" exec {python}'))
    found = []
    for value in ("one", "two"):
        monkeypatch.setenv("OUTSIDE", value)
        found.append(seen_by(script, preload=preload)["wrapped"])

    assert ["one, wrapped", "two, wrapped"] == found


def test_interpreter_without_the_library_runs_the_script_with_a_warning(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its site-packages an interpreter finds nothing that was installed."""
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, "exec {python} -S"))

    with pytest.warns(UserWarning, match="cannot import elasticlib: each worker imports everything itself"):
        seen = seen_by(script, "a", preload=("colorsys",))

    assert {"warm": False, "site": False, "wrapped": None, "argv": ["a"], "rank": "0"} == seen
