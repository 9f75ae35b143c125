"""The template: what may be imported ahead, when one is shared or made anew, and what its workers find."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, PreloadError, elastic_launch
from elasticlib.errors import StartError
from elasticlib.workers import _guardian
from tests.process import duties

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
METHODS = ["forkserver", "spawn", "fork"]
LIMIT = 20.0
"""Seconds that anything waited for may take."""


def config(workers: int = 1, **settings: Any) -> LaunchConfig:
    """A launch without restarts whose template imports nothing, so that it starts in milliseconds."""
    return LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, "preload": (), **settings})


def chain(**settings: Any) -> dict[str, int]:
    """Pids from a worker of a new launch up to its guardian."""
    found: dict[str, int] = elastic_launch(config(**settings), duties.chain)()[0]
    return found


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def kill(pid: int) -> None:
    """SIGKILL a process and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lives(pid))


@contextlib.contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Run *action* in a thread during the block, and raise what it raised."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(action)
        yield
        future.result(LIMIT)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the module ``preloaded`` where the template finds it; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        (tmp_path / "preloaded.py").write_text(code)
        return "preloaded"

    return write


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
        ("import os\nmine = dict(os.environ).get('RANK', os.environ.get('RANK'))", "reads RANK, which each worker has"),
        ("import os\nos.environ.get('LOCAL_RANK')", "reads LOCAL_RANK"),
        ("import os\nos.getenv('WORLD_SIZE', '1')", "reads WORLD_SIZE"),
        ("import os\n'RANK' in os.environ", "reads RANK"),
        ("import no_such_module_at_all", r"ModuleNotFoundError: .*no_such_module_at_all.*preloaded\.py, line 1"),
        ("\nraise ValueError('a bad value')", r"ValueError: a bad value \(.*preloaded\.py, line 2\)"),
        ("def broken(:", r"SyntaxError"),
    ],
    ids=["thread", "native-thread", "rank", "local-rank", "world-size", "has-rank", "import", "error", "syntax"],
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


def test_a_module_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(PreloadError, match="no_such_module_at_all"):
        elastic_launch(config(preload=("no_such_module_at_all",)), duties.chain)()


@pytest.mark.xfail(
    reason="SystemExit passes `_preload`: the call fails with 'the template process ended', which names no module",
    raises=StartError,
)
def test_a_module_that_ends_the_program_is_refused_by_name(module: Callable[[str], str]) -> None:
    with pytest.raises(PreloadError, match="SystemExit"):
        elastic_launch(config(preload=(module("import sys\nsys.exit('not on this machine')"),)), duties.chain)()


def test_a_module_that_opens_an_accelerator_is_refused_by_name(module: Callable[[str], str], tmp_path: Path) -> None:
    """With files that stand for devices: the real ones need a driver."""
    device = tmp_path / "nvidia0"
    device.touch()
    name = module(f"kept = open({str(device)!r})")
    check = (
        "from elasticlib.workers import _template\n"
        f"_template._DEVICE_FILES = ({str(tmp_path / 'nvidia')!r},)\n"
        f"print(_template.why_refused({name!r}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"its import opens an accelerator ({device}), which cannot be used after a fork\n" == done.stdout


def test_the_thread_pool_of_numpy_is_no_reason_to_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS ends its pool before a fork and makes it anew: a forked worker computes with it."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")

    results = elastic_launch(config(2, preload=("numpy",)), duties.product_by_numpy)()

    assert {0: 256.0**3, 1: 256.0**3} == results


def test_workers_have_what_was_imported_ahead_and_only_that() -> None:
    names = ("torch", "colorsys", "chunk")

    results = elastic_launch(config(preload=("torch", "colorsys")), duties.modules_before)(*names)

    assert {"torch": True, "colorsys": True, "chunk": False} == results[0]


# When a template is shared, and when it is made anew.


def test_a_second_call_forks_from_the_same_template() -> None:
    first, second = chain(), chain()

    assert (first["template"], first["guardian"]) == (second["template"], second["guardian"])
    assert first["foreman"] != second["foreman"]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "TORCHELASTIC_ERROR_FILE", "PWD"])
def test_a_variable_that_no_import_reads_needs_no_new_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    first = chain()["template"]
    monkeypatch.setenv(name, "2")

    value, template = elastic_launch(config(), duties.variable)(name)[0]

    assert first == template
    assert "2" == value or name == "TORCHELASTIC_ERROR_FILE"  # a worker has an error file of its own


def test_another_environment_makes_a_new_template_and_both_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    job = elastic_launch(config(), duties.variable)
    before = job("ELASTICLIB_TEST")[0]
    monkeypatch.setenv("ELASTICLIB_TEST", "changed")
    changed = job("ELASTICLIB_TEST")[0]
    monkeypatch.delenv("ELASTICLIB_TEST")

    after = job("ELASTICLIB_TEST")[0]

    assert (None, "changed") == (before[0], changed[0])
    assert before[1] != changed[1]
    assert before == after


def test_no_more_than_two_templates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for longest goes, with its guardian."""
    chains = []
    for value in ("1", "2", "3"):
        monkeypatch.setenv("ELASTICLIB_TEST", value)
        chains.append(chain())

    oldest, *kept = chains
    assert not lives(oldest["template"])
    assert not lives(oldest["guardian"])
    assert all(lives(each["template"]) for each in kept)


def test_a_preloaded_module_whose_file_changed_is_imported_anew(module: Callable[[str], str], tmp_path: Path) -> None:
    def value() -> Any:
        import preloaded  # type: ignore[import-not-found]

        return preloaded.VALUE

    job = elastic_launch(config(preload=(module("VALUE = 'old'"),)), value)
    first = job()
    module("VALUE = 'new value'")

    assert ({0: "old"}, {0: "new value"}) == (first, job())


# Ends that nobody asked for.

DYING_TEMPLATE = pytest.mark.xfail(
    strict=False,  # a race
    raises=StartError,
    reason="a template whose guardian was killed is still alive for milliseconds: it is taken, and not another "
    "one when it turns out to end (`_start_workers` tries again only where it had a foreman before)",
)
KILLED = ["template", pytest.param("guardian", marks=DYING_TEMPLATE)]


@pytest.mark.parametrize("victim", KILLED)
def test_a_call_after_the_idle_template_was_killed_works(victim: str) -> None:
    before = chain()
    kill(before[victim])

    after = chain()

    assert before["template"] != after["template"]
    wait_until(lambda: not lives(before["template"]) and not lives(before["guardian"]))


@pytest.mark.parametrize("victim", [*KILLED, "foreman"])
def test_a_kill_above_the_workers_costs_one_restart(victim: str, tmp_path: Path) -> None:
    """The workers go with whoever was killed, and the same call starts new ones."""
    old: list[dict[str, int]] = []

    def kill_victim() -> None:
        files = [tmp_path / f"round0.rank{rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files))
        old.extend(dict(zip(duties.CHAIN, map(int, file.read_text().split()), strict=True)) for file in files)
        kill(old[0][victim])

    with beside(kill_victim):
        results = elastic_launch(config(2, max_restarts=1), duties.works_on_in_round)(1, tmp_path)

    assert {0, 1} == set(results)
    assert not {each["worker"] for each in old} & {each["worker"] for each in results.values()}
    assert not any(lives(each["worker"]) for each in old)


@pytest.mark.parametrize("victim", [*KILLED, "foreman"])
def test_a_kill_above_the_workers_is_told_where_no_restart_is_left(victim: str, tmp_path: Path) -> None:
    def kill_victim() -> None:
        wait_until((tmp_path / "round0.rank0").exists)
        pids = map(int, (tmp_path / "round0.rank0").read_text().split())
        kill(dict(zip(duties.CHAIN, pids, strict=True))[victim])

    with beside(kill_victim), pytest.raises(ChildFailedError, match="ended") as caught:
        elastic_launch(config(), duties.works_on_in_round)(1, tmp_path)

    assert -signal.SIGKILL == caught.value.failures[0].exitcode
    assert chain()["worker"]


def test_a_template_that_is_killed_at_its_imports_is_an_error_and_the_next_call_works(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    name = module(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(tmp_path / 'imported')!r})\n"
        "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), signal.SIGKILL)"
    )

    with pytest.raises(StartError, match="killed from outside"):
        elastic_launch(config(preload=(name,)), duties.chain)()

    assert chain(preload=(name,))["worker"]


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


@pytest.mark.xfail(
    reason="a preload other than torch alone gets the script's folder as its whole search path", raises=PreloadError
)
def test_a_module_of_the_standard_library_is_imported_ahead_of_a_script(script: Path) -> None:
    assert seen_by(script, preload=("colorsys",))["warm"]


def test_a_module_beside_the_script_is_imported_ahead(module: Callable[[str], str], script: Path) -> None:
    """As the script itself would find it."""
    name = module("import sys\nsys.modules['colorsys'] = sys")

    assert seen_by(script, preload=(name,))["warm"]


def test_a_wrapper_around_the_interpreter_starts_a_template(
    module: Callable[[str], str], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, "exec {python}"))

    name = module("import sys\nsys.modules['colorsys'] = sys")

    seen = seen_by(script, "a", preload=(name,))

    assert {"warm": True, "site": True, "wrapped": None, "argv": ["a"], "rank": "0"} == seen


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            "forkserver", marks=pytest.mark.xfail(reason="a forked worker gets the launcher's variables only")
        ),
        "spawn",
    ],
)
def test_variables_that_a_wrapper_sets_reach_the_script(
    method: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper is there to set up an environment."""
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, "WRAPPED=yes exec {python}"))

    assert "yes" == seen_by(script, start_method=method)["wrapped"]


def test_an_interpreter_that_lacks_the_library_runs_the_script_and_the_loss_is_told(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its site-packages an interpreter finds nothing that was installed."""
    monkeypatch.setenv("PYTHON_EXEC", wrapper(tmp_path, "exec {python} -S"))

    with pytest.warns(UserWarning, match="cannot import elasticlib: each worker imports everything anew"):
        seen = seen_by(script, "a", preload=("colorsys",))

    assert {"warm": False, "site": False, "wrapped": None, "argv": ["a"], "rank": "0"} == seen


# Callers of all kinds.

FORKING_CALLER = """
import json, os, sys
from elasticlib import LaunchConfig, elastic_launch
from tests.process import duties

def chain():
    return elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), duties.chain)()[0]

def say(who):
    os.write(1, (json.dumps([who, chain()]) + "\\n").encode())

say("parent")
child = os.fork()
say("child" if child == 0 else "parent beside")
if child:
    os.waitpid(child, 0)
    say("parent after")
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def test_a_forked_child_of_the_caller_launches_by_itself() -> None:
    """Neither end touches the other's template, and both are gone when their owners are."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING_CALLER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    assert told["child"]["template"] != told["parent"]["template"]
    assert {told["parent"]["template"]} == {told[f"parent {when}"]["template"] for when in ("beside", "after")}
    wait_until(lambda: not any(lives(each[who]) for each in told.values() for who in ("template", "guardian")))


def test_launches_of_several_threads_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for all others to run before it ends."""
    count = 6
    job = elastic_launch(config(), duties.meet)

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(lambda mine: job(tmp_path, mine, count), range(count)))

    assert [{0: mine} for mine in range(count)] == results


@pytest.mark.parametrize("preload", [(), ("torch",)], ids=["bare", "torch"])
def test_a_worker_may_launch_workers_of_its_own(preload: tuple[str, ...]) -> None:
    """The inner workers have their own ranks, not those of the outer one, and do not keep torch from its import."""
    results = elastic_launch(config(2, run_id="outer"), duties.launches)(preload)

    inner = {0: ("0", "2", "inner"), 1: ("1", "2", "inner")}
    assert {0: inner, 1: inner} == results


def test_a_launch_from_another_thread_leaves_signal_handlers_alone(tmp_path: Path) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(signum) for signum in signal.valid_signals()]

    before = handlers()
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(elastic_launch(config(), duties.waits_for), tmp_path / "begun", tmp_path / "go")
        wait_until((tmp_path / "begun").exists)
        during = handlers()
        (tmp_path / "go").touch()
        job.result(LIMIT)

    assert before == during == handlers()


def process_wide_state() -> dict[str, Any]:
    """What a library has no business to change in its caller."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "environment": dict(os.environ),
        "handlers": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "folder": os.getcwd(),
        "umask": umask,
        "path": list(sys.path),
        "argv": list(sys.argv),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "affinity": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": multiprocessing.active_children(),
        "wakeup": signal.set_wakeup_fd(-1),
        "threads": {thread.name for thread in threading.enumerate()},
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fails", [False, True], ids=["good", "bad"])
def test_a_launch_leaves_the_program_as_it_was(method: str, fails: bool) -> None:
    """Also when its workers fail; the start method of the caller stays unset."""
    before = process_wide_state()

    with pytest.raises(ChildFailedError) if fails else contextlib.nullcontext():
        elastic_launch(config(2, start_method=method), duties.fails if fails else duties.chain)()

    assert None is before["start method"]
    assert before == process_wide_state()


@pytest.fixture
def present_surroundings() -> Iterator[None]:
    """Puts back what `duties.surroundings` tells of."""
    umask, folder, affinity = os.umask(0o022), os.getcwd(), os.sched_getaffinity(0)
    numbers = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
    limits, stdin = [resource.getrlimit(number) for number in numbers], os.dup(0)
    yield
    os.umask(umask)
    os.chdir(folder)
    os.sched_setaffinity(0, affinity)
    for number, limit in zip(numbers, limits, strict=True):
        resource.setrlimit(number, limit)
    os.dup2(stdin, 0)
    os.close(stdin)


def change_surroundings(folder: Path, text: str, umask: int, files: int, cpus: set[int]) -> dict[str, Any]:
    """Change what a process takes over; return what a worker should see of it."""
    folder.mkdir()
    (folder / "stdin").write_text(text)
    with open(folder / "stdin") as file:
        os.dup2(file.fileno(), 0)
    os.chdir(folder)
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.sched_setaffinity(0, cpus)
    return {"umask": umask, "folder": str(folder), "files": files, "core": 0, "affinity": sorted(cpus), "stdin": text}


@pytest.mark.usefixtures("present_surroundings")
@pytest.mark.parametrize("method", METHODS)
def test_workers_take_over_what_the_caller_has_at_the_call(method: str, tmp_path: Path) -> None:
    """The template was there before, and stays the same: mask, folder, limits, CPUs and stdin are sent to it."""
    job = elastic_launch(config(start_method=method), duties.surroundings)
    all_cpus = os.sched_getaffinity(0)
    expected, seen = [], []
    for name, umask, files, cpus in [("one", 0o077, 300, {min(all_cpus)}), ("two", 0o002, 500, all_cpus)]:
        expected.append(change_surroundings(tmp_path / name, f"typed for {name}", umask, files, cpus))

        seen.append(job()[0])

    templates = [each.pop("template") for each in seen]
    assert expected == seen
    assert templates[0] == templates[1] or method == "fork"


@pytest.mark.parametrize("method", METHODS)
def test_twenty_launches_leak_no_descriptor_and_no_process(method: str) -> None:
    """Neither here nor in the template; a failed launch now and then leaks none either."""

    good, bad = (elastic_launch(config(start_method=method), duty) for duty in (duties.chain, duties.fails))
    template = good()[0]["template"]
    pids = [os.getpid(), *([] if method == "fork" else [template])]

    def held() -> list[int]:
        """Descriptors of this process and the template, and processes below this one."""
        return [*(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), len(_guardian.family(os.getpid()))]

    with pytest.raises(ChildFailedError):
        bad()
    wait_until(lambda: not _guardian.family(template))
    before = held()

    for index in range(20):
        with pytest.raises(ChildFailedError) if index % 5 == 4 else contextlib.nullcontext():
            (bad if index % 5 == 4 else good)()

    wait_until(lambda: not _guardian.family(template))  # it reaps a foreman when the launch is already over
    assert before == held()
