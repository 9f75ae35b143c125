"""Which variables ask for a new fork server, which go to the workers alone; and that none holds up another."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch
from elasticlib.errors import StartError
from elasticlib.processes import _programs
from elasticlib.workers import _devices, _fork_servers
from tests.process import duties
from tests.process.starting.test_fork_server import LIMIT, config

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

NAME = "ELASTICLIB_TEST"


def fork_server_and(name: str, **settings: Any) -> tuple[int, str | None]:
    """Which fork server serves a launch now, and what its worker has as variable *name*."""
    value, fork_server = elastic_launch(config(**settings), duties.variable)(name)[0]
    return fork_server, value


def value_at_import() -> Any:
    """Return the value that the preloaded module found, and the pid of its fork server."""
    import preloaded  # type: ignore[import-not-found]

    return preloaded.VALUE, duties.chain()["fork server"]


# Variables that nobody reads at import.


@pytest.mark.parametrize(
    ("name", "preload"),
    [
        (NAME, ()),
        (NAME, ("torch",)),
        (NAME, ("json", "torch")),
        ("OMP_NUM_THREADS", ()),
        ("PYTEST_CURRENT_TEST", ()),
        ("TORCHELASTIC_ERROR_FILE", ()),
        ("PWD", ()),
    ],
)
def test_variable_that_no_import_reads_reaches_only_the_workers(
    name: str, preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set, changed and removed: each launch has its own, all have one fork server."""
    monkeypatch.setenv(name, "1")
    found = [fork_server_and(name, preload=preload)]
    monkeypatch.setenv(name, "2")
    found.append(fork_server_and(name, preload=preload))
    if name == NAME:
        monkeypatch.delenv(name)
        found.append(fork_server_and(name, preload=preload))

    assert len({fork_server for fork_server, _ in found}) == 1
    if name != "TORCHELASTIC_ERROR_FILE":  # a worker has an error file of its own
        assert ["1", "2", None][: len(found)] == [value for _, value in found]


def test_openmp_variables_of_the_caller_go_to_the_workers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As scikit-learn does, while the fork server has another OpenMP."""
    before, _ = fork_server_and("KMP_INIT_AT_FORK", preload=("torch",))
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")

    assert (before, "FALSE") == fork_server_and("KMP_INIT_AT_FORK", preload=("torch",))


@pytest.mark.parametrize("preload", [("torch",), ("torch", "torch.optim")])
def test_a_fork_server_that_counted_the_devices_serves_the_launch(
    preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sets a few variables by itself, and preloads more."""
    monkeypatch.setattr(_devices._machine, "may_have_accelerators", lambda: True)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    counted: list[int] = []
    query = _devices._answer

    def noted(*arguments: Any) -> dict[str, Any]:
        answer = query(*arguments)
        counted.append(_fork_servers.fork_servers._kept[-1]._reaper.pid)
        return {**answer, "count": 0, "kind": ""}  # so that the CPUs are taken, whatever is in this machine

    monkeypatch.setattr(_devices, "_answer", noted)
    settings = LaunchConfig(nproc_per_node="auto", max_restarts=0, preload=preload)

    chain = elastic_launch(settings, duties.chain)()[0]

    assert [chain["reaper"]] == counted


# The search path.


def test_another_search_folder_needs_a_new_server_for_named_modules(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an import of setuptools in the caller adds one: it may hold a module that was missing. Torch is in no such."""
    name = module("try:\n    import extra_of_mine as VALUE\nexcept ImportError:\n    VALUE = None")
    found = [elastic_launch(config(preload=(name,)), finds_extra)()[0]]
    without_named = [elastic_launch(config(), duties.chain)()[0]["fork server"]]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "extra_of_mine.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "mine")])
    found.append(elastic_launch(config(preload=(name,)), finds_extra)()[0])
    without_named.append(elastic_launch(config(), duties.chain)()[0]["fork server"])

    assert [False, True] == [has_extra for has_extra, _ in found]
    assert without_named[0] == without_named[1]


def finds_extra() -> tuple[bool, int]:
    """Return whether the preloaded module found the extra module, and the pid of its fork server."""
    import preloaded

    return preloaded.VALUE is not None, duties.chain()["fork server"]


# Variables that were read.


def test_variable_a_preloaded_module_may_read_makes_a_new_fork_server(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it reads it. Another launch with the first value has the first one again."""
    lookup = f"os.path.expandvars('${NAME}')"
    job = elastic_launch(config(preload=(module(f"import os\nVALUE = {lookup}"),)), value_at_import)
    found = []
    for value in ("one", "two", "one"):
        monkeypatch.setenv(NAME, value)
        found.append(job()[0])

    assert ["one", "two", "one"] == [value for value, _ in found]
    assert found[0] == found[2]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize(
    ("name", "preload"), [("MALLOC_ARENA_MAX", ()), ("PYTHONHASHSEED", ()), ("TORCH_LOGS", ("torch",))]
)
def test_variable_of_interpreter_or_torch_makes_a_new_fork_server(
    name: str, preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"TORCH_LOGS": "recompiles"}.get(name, "1")
    monkeypatch.delenv(name, raising=False)
    before, _ = fork_server_and(name, preload=preload)
    monkeypatch.setenv(name, value)

    fork_server, seen = fork_server_and(name, preload=preload)

    assert value == seen
    assert before != fork_server


@pytest.mark.parametrize("lookup", ["os.environ.get('{}')", "dict(os.environ).get('{}')"])
def test_variable_that_sitecustomize_may_read_makes_a_new_fork_server(
    lookup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs before anything could observe what it looks up."""
    (tmp_path / "sitecustomize.py").write_text(f"import os\nos.environ['COPIED'] = {lookup.format(NAME)} or ''")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    for value in ("one", "two"):
        monkeypatch.setenv(NAME, value)
        found.append(fork_server_and("COPIED")[1])

    assert ["one", "two"] == found


# What the imports set.


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (f"os.environ['{NAME}'] = 'default'", ["default", "default", "default"]),
        (f"if '{NAME}' not in dict(os.environ): os.environ['{NAME}'] = 'default'", ["default", "mine", "default"]),
        (f"os.environ.pop('{NAME}', None)", [None, None, None]),
    ],
    ids=["sets", "sets a default", "removes"],
)
@pytest.mark.parametrize("mine_first", [False, True])
def test_imports_set_or_keep_a_variable_as_in_a_plain_program(
    code: str, values: list[str | None], mine_first: bool, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the result does not depend on the launch for which the fork server was started."""
    preload = (module(f"import os\n{code}"),)
    given = [None, "mine", "default"]
    pairs = list(zip(given, values, strict=True))
    for own, expected in reversed(pairs) if mine_first else pairs:
        if own is None:
            monkeypatch.delenv(NAME, raising=False)
        else:
            monkeypatch.setenv(NAME, own)
        assert expected == fork_server_and(NAME, preload=preload)[1]


# No fork server holds up another.


def test_other_variables_do_not_wait_for_a_server_at_its_imports(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a launch beside a fork server whose imports, and so its reads, are not complete."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    code = (
        "import pathlib, time\n"
        f"begun, go = pathlib.Path({str(begun)!r}), pathlib.Path({str(go)!r})\n"
        "first = not begun.exists()\nbegun.touch()\n"
        "while first and not go.exists(): time.sleep(0.01)"
    )
    preload = (module(code),)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(fork_server_and, NAME, preload=preload)
        try:
            duties.wait_until(begun.exists)
            monkeypatch.setenv(NAME, "mine")
            quick = fork_server_and(NAME, preload=preload)
            waited = not slow.done()
        finally:
            go.touch()
        assert (True, "mine") == (waited, quick[1])
        assert slow.result(LIMIT)[0] != quick[0]


def test_launch_does_not_wait_for_the_end_of_a_stopped_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is idle, and has to go for another: it is woken, and ends."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    chain = elastic_launch(config(), duties.chain)()[0]
    os.kill(chain["fork server"], signal.SIGSTOP)

    for value in ("2", "3"):
        monkeypatch.setenv("MALLOC_ARENA_MAX", value)
        fork_server_and(NAME)

    duties.wait_until(lambda: not any(duties.lives(chain[name]) for name in ("fork server", "reaper")))


# Devices.


COUNTS = """
import os
def get_num_threads(): return 1
def set_num_threads(count): pass
class accelerator:
    type = "npu"
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: len(os.environ["MY_VISIBLE_DEVICES"].split(",")))
accelerator.current_accelerator = staticmethod(lambda: accelerator)
"""


@pytest.fixture
def own_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a torch for fork servers of this test, on a machine that has devices."""
    monkeypatch.setattr(_devices._machine, "may_have_accelerators", lambda: True)
    monkeypatch.setenv("TORCH_OF_THIS_TEST", str(tmp_path))  # its fork server must serve no other test
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # as if it were installed
    return lambda code: (tmp_path / "torch.py").write_text(code) and None


def test_devices_are_counted_by_the_launchs_own_variables(
    own_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not those of the launch that the fork server was made for."""
    own_torch(COUNTS)
    found = []
    for visible in ("0", "0,1,2"):
        monkeypatch.setenv("MY_VISIBLE_DEVICES", visible)
        found.append(_devices.workers_per_node("npu"))
        found.append(_fork_servers.fork_servers._kept[-1]._reaper.pid)

    one, first, three, second = found
    assert (1, 3) == (one, three)
    assert first == second


HANGS = """
import ctypes, os, pathlib
def get_num_threads(): return 1
def set_num_threads(count): pass
class accelerator:
    is_available = staticmethod(lambda: True)
def current_accelerator():
    pathlib.Path({mark!r}).write_text(str(os.getpid()))
    ctypes.PyDLL(None).pause()  # as a driver in its native code, with the interpreter's lock
accelerator.current_accelerator = staticmethod(current_accelerator)
"""


@pytest.fixture
def hanging(own_torch: Callable[[str], None], tmp_path: Path) -> Path:
    """A torch whose driver hangs; the file that will hold the pid of the process that asked it."""
    own_torch(HANGS.format(mark=str(tmp_path / "asked")))
    return tmp_path / "asked"


def test_process_that_hangs_in_a_driver_is_reported_and_killed(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "_LIMIT", 0.3)

    with pytest.raises(StartError, match=r"counting the accelerators took more than 0\.3 s.*give nproc_per_node=N"):
        elastic_launch(LaunchConfig(nproc_per_node="gpu"), duties.chain)()

    duties.wait_until(lambda: not duties.lives(int(hanging.read_text())))


def test_a_driver_that_hangs_holds_up_no_other_launch(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of its own fork server nor one of another."""
    monkeypatch.setattr(_devices, "_LIMIT", 2 * LIMIT)
    with ThreadPoolExecutor(1) as thread:
        counting = thread.submit(_devices.workers_per_node, "gpu", ("torch",), _programs.flags_here())
        duties.wait_until(lambda: hanging.exists() and hanging.read_text())
        querying = int(hanging.read_text())
        fork_server = duties.parent_of(querying)
        of_the_same = elastic_launch(config(preload=("torch",)), duties.chain)()[0]["fork server"]
        of_another, _ = fork_server_and(NAME)
        waits = not counting.done()
        os.kill(querying, signal.SIGKILL)
        with pytest.raises(StartError, match="device query process ended unexpectedly"):
            counting.result(LIMIT)

    assert waits
    assert fork_server == of_the_same != of_another
