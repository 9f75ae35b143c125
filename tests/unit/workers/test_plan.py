"""The check of a call: what kind of work it is, what is refused, what the workers will find."""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import EntrypointError, PicklingError, StartError
from elasticlib.numa import AffinityMode, BindingError, NumaOptions
from elasticlib.numa._cpus import Topology
from elasticlib.spec import WorkerSpec
from elasticlib.workers import _plan
from elasticlib.workers._fork_servers import ForkServerKey
from elasticlib.workers._plan import LaunchPlan


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The relative path of a script in the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


def plan(
    entrypoint: Any,
    *args: Any,
    method: str = "forkserver",
    environment: Mapping[str, str] | None = None,
    threads: int = 1,
    **spec: Any,
) -> LaunchPlan:
    worker_spec = WorkerSpec("trainer", 2, None, entrypoint=entrypoint, args=args, **spec)
    return _plan.plan(worker_spec, method, environment if environment is not None else {"PATH": os.defpath}, threads)


class Typed(os.PathLike[str]):
    """A path that keeps its spelling, as those of the command line do."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __fspath__(self) -> str:
        return self.text


def train(rate: float, *, epochs: int = 1) -> float:
    return rate * epochs


# What kind of work it is.


def test_a_callable_is_a_function_with_its_arguments() -> None:
    job = plan(train, 0.5, kwargs={"epochs": 4})

    pickles = pickle.Unpickler(io.BytesIO(bytes(job.memories["function"])))
    pickles.load()  # what workers have from the caller's process
    function, args, kwargs = pickles.load()
    assert job.common.kind == "function"
    assert function(*args, **kwargs) == 2.0


def test_a_function_sees_the_callers_command_line_and_search_path() -> None:
    job = plan(train, 0.5)

    assert job.argv(0) == sys.argv
    assert job.common.sys_path == sys.path


def test_a_function_in_a_forked_caller_is_not_pickled() -> None:
    lock = threading.Lock()

    job = plan(lambda given: given is lock, lock, method="fork")

    assert job.fork_server is None
    assert not job.memories
    assert job.call is not None and job.call()


@pytest.mark.parametrize(
    ("entrypoint", "options", "kind"),
    [("train.py", {}, "script"), (Path("any"), {}, "script"), ("./train.py", {"no_python": True}, "program")],
    ids=["ends in .py", "a path object", "no_python"],
)
def test_entrypoint_is_classified_as_script_or_program(
    script: str, entrypoint: Any, options: dict[str, Any], kind: str
) -> None:
    os.chmod(script, 0o755)
    Path("any").touch()

    assert kind == plan(entrypoint, **options).common.kind


@pytest.mark.parametrize("typed", ["app", "./app/", "app.pyz"])
def test_a_folder_or_archive_with_a_main_is_run_as_such_and_searched_first(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")

    job = plan(Typed(typed), "--fast")

    assert (job.common.kind, job.common.path0) == ("package", os.path.join(tmp_path, typed))
    assert job.argv(0) == [typed, "--fast"]


def test_a_main_that_was_added_since_the_refusal_is_found(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    with pytest.raises(EntrypointError, match="without a __main__"):
        plan(app)
    kept = app.stat()
    (app / "__main__.py").touch()
    os.utime(app, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # as on a file system with coarse times

    assert plan(app).common.kind == "package"


def test_a_script_gets_its_path_as_it_was_typed_and_arguments_as_text(script: str) -> None:
    typed = f"./{script}"

    assert plan(typed, "--lr", 0.1, 3, None).argv(0) == [typed, "--lr", "0.1", "3", "None"]


def test_modules_beside_a_script_can_be_imported_also_through_a_link(script: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "link.py").symlink_to(tmp_path / script)

    assert plan("elsewhere/link.py").common.path0 == str(tmp_path)


def test_a_module_is_searched_from_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    job = plan("pkg.train", "--fast", module=True)

    assert (job.common.kind, job.common.entry, job.common.path0) == ("module", "pkg.train", str(tmp_path))
    assert job.argv(0) == ["-m", "--fast"]


def test_any_other_name_is_a_program_of_the_path() -> None:
    job = plan("sh", "-c", "true")

    assert job.common.kind == "program"
    assert os.path.isabs(job.argv(0)[0]) and job.argv(0)[1:] == ["-c", "true"]


# Arguments.


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--rank=${local_rank}", "--rank=1"),
        ("$local_rank", "1"),
        ("${local_rank}${local_rank}", "11"),
        ("$$", "$$"),
        ("$local_ranks", "$local_ranks"),
        ("${other}", "${other}"),
        ("", ""),
    ],
)
def test_only_local_rank_is_replaced_in_arguments(script: str, typed: str, expected: str) -> None:
    assert plan(script, typed).argv(1) == [script, expected]


@pytest.mark.parametrize(
    ("entrypoint", "spec"),
    [("train.py", {}), ("pkg.train", {"module": True}), ("sh", {}), ("train.py", {"preload": ("helpers_of_mine",)})],
    ids=["script", "module", "program", "preload"],
)
def test_fork_is_for_functions_and_all_else_starts_as_under_forkserver(
    script: str, caplog: pytest.LogCaptureFixture, entrypoint: str, spec: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "elasticlib")

    forked = plan(entrypoint, "--fast", method="fork", **spec)

    assert plan(entrypoint, "--fast", method="forkserver", **spec) == forked
    [line] = caplog.records
    assert ("INFO", True) == (line.levelname, "start_method='fork' works only for functions" in line.getMessage())


# What a worker finds.


def test_a_worker_finds_the_place_that_the_call_was_made_in(script: str, tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        job = plan(script, environment={"A": "1"}, threads=3)
    finally:
        os.umask(former)

    assert job.common.env == {"A": "1"}
    assert job.common.cwd == str(tmp_path)
    assert job.common.surroundings["umask"] == 0o027
    assert job.common.affinity == sorted(os.sched_getaffinity(0))
    assert job.common.threads == 3


def test_only_spawn_asks_for_fresh_interpreters(script: str) -> None:
    assert plan(script, method="spawn").common.fresh
    assert not plan(script).common.fresh


@pytest.mark.parametrize(
    ("spec", "level"), [({}, "INFO"), ({"preload": ("helpers_of_mine",)}, "WARNING")], ids=["default", "chosen"]
)
def test_a_preload_that_a_debugger_makes_void_is_warned_of(
    script: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spec: dict[str, Any], level: str
) -> None:
    monkeypatch.setattr(_plan, "debugger_follows", lambda: True)
    monkeypatch.setattr(_plan, "followed_by_debugger", list)
    caplog.set_level("INFO", "elasticlib")

    job = plan(script, **spec)

    [line] = caplog.records
    assert (level, True) == (line.levelname, "is ignored" in line.getMessage())
    assert job.common.fresh


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_environment_is_not_part_of_a_fork_servers_key(method: str, script: str) -> None:
    """Which of its variables matter, the fork server tells when it has read them."""
    one = plan(script, method=method, environment={"A": "1"})
    other = plan(script, method=method, environment={"A": "2"})

    assert one.fork_server is not None
    assert one.fork_server == other.fork_server


@pytest.mark.parametrize("preload", [("torch",), ("torch", "torch._dynamo"), ()])
def test_other_search_path_keeps_the_fork_server_of_torch_or_nothing(
    preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = plan(len, preload=preload)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert before.fork_server is not None
    assert before.fork_server == plan(len, preload=preload).fork_server


def test_fork_server_of_torch_alone_serves_scripts_of_all_folders(script: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.py").write_text("")

    assert plan(script).fork_server == plan("sub/other.py").fork_server


def test_fork_servers_that_preload_the_users_modules_know_where_these_are(script: str, tmp_path: Path) -> None:
    job = plan(script, preload=("helpers_of_mine",))

    assert job.fork_server is not None
    assert job.fork_server.path == job.search_path == (str(tmp_path),)


def test_a_script_named_by_the_local_rank_is_looked_for_by_each_worker() -> None:
    job = plan("train${local_rank}.py", "a")

    assert [[sys.executable, "-u", f"train{rank}.py", "a"] for rank in (0, 1)] == [job.argv(0), job.argv(1)]


@pytest.mark.parametrize("name", ["my-mod", "1pkg", "pkg.my-mod"])
def test_a_module_is_what_python_would_look_for(name: str) -> None:
    assert name == plan(name, module=True).common.entry


# What is refused.


@pytest.mark.parametrize(
    ("entrypoint", "spec", "complaint"),
    [
        (3, {}, "entrypoint=3, a int, is not a callable"),
        ("gone.py", {}, "script 'gone.py' was not found in"),
        ("folder.py", {}, "script 'folder.py' is a folder without a __main__.py"),
        (Path("package"), {}, "script 'package' is a folder without a __main__.py"),
        (Path("app.pyz"), {}, "script 'app.pyz' is an archive without a __main__.py"),
        (Path("pipe"), {}, "script 'pipe' is not a file"),
        (Path("gone"), {}, "script 'gone' was not found in"),
        ("no-such-program", {}, "'no-such-program' was not found on PATH"),
        ("./gone", {}, "program './gone' was not found in"),
        ("./folder.py", {"no_python": True}, "program './folder.py' is not a file"),
        ("./train.py", {"no_python": True}, "program './train.py' cannot be executed"),
        ("pkg/train.py", {"module": True}, "module 'pkg/train.py' is not a dotted name"),
        ("pkg..train", {"module": True}, "module 'pkg..train' is not a dotted name"),
        ("", {"module": True}, "module '' is not a dotted name"),
        ("train.py", {"kwargs": {"lr": 1}}, r"accepts no keyword arguments \(lr\)"),
    ],
)
def test_entrypoint_that_cannot_run_is_refused_by_name(
    script: str, tmp_path: Path, entrypoint: Any, spec: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "package" / "__main__").mkdir(parents=True)
    (tmp_path / "package" / "__main__" / "__init__.py").touch()
    os.mkfifo(tmp_path / "pipe")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("helper.py", "")

    with pytest.raises(EntrypointError, match=complaint):
        plan(entrypoint, **spec)


def test_a_script_that_may_not_be_read_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read whatever the mode says

    with pytest.raises(EntrypointError, match="cannot be read"):
        plan(script)


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(PicklingError, match="argument 0 of train"):
        plan(train, threading.Lock())


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is no more."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    return folder


def test_workers_stay_in_a_folder_that_was_removed(removed: Path) -> None:
    found = os.stat("/proc/self/cwd")

    common = plan(train, 0.5).common

    assert ("", (found.st_dev, found.st_ino)) == (common.cwd, common.place)


def test_script_of_a_folder_that_was_removed_is_not_found(removed: Path) -> None:
    with pytest.raises(EntrypointError, match=f"'train.py' was not found in {removed}: check the path"):
        plan("train.py")


def test_script_with_a_path_from_a_folder_that_was_removed_is_refused(removed: Path) -> None:
    (removed.parent / "train.py").touch()

    with pytest.raises(EntrypointError, match=f"the working directory {removed} no longer exists: change to another"):
        plan("../train.py")
    assert plan(str(removed.parent / "train.py")).common.argv == [str(removed.parent / "train.py")]


def test_an_interpreter_that_cannot_be_run_is_refused(script: str) -> None:
    with pytest.raises(EntrypointError, match="PYTHON_EXEC='/no/such/python' cannot be run"):
        plan(script, environment={"PYTHON_EXEC": "/no/such/python"})


# Another interpreter.


def test_an_interpreter_that_can_be_a_fork_server_makes_one(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "importable_by", lambda python, environment: True)

    job = plan(script, environment={"PYTHON_EXEC": "/opt/other/python"})

    assert job.common.kind == "script"
    assert job.fork_server is not None and job.fork_server.python == "/opt/other/python"


@pytest.mark.parametrize(
    ("entrypoint", "options", "command"),
    [("train.py", {}, ["train.py"]), ("pkg.train", {"module": True}, ["-m", "pkg.train"])],
    ids=["script", "module"],
)
def test_interpreter_without_elasticlib_runs_command_with_a_warning(
    script: str, monkeypatch: pytest.MonkeyPatch, entrypoint: str, options: dict[str, Any], command: list[str]
) -> None:
    monkeypatch.setattr(_plan, "importable_by", lambda python, environment: False)

    with pytest.warns(UserWarning, match="cannot import elasticlib"):
        job = plan(entrypoint, "--fast", environment={"PYTHON_EXEC": "/opt/other/python"}, **options)

    assert job.common.kind == "program"
    assert job.argv(0) == ["/opt/other/python", "-u", *command, "--fast"]


def test_an_interpreter_of_the_path_is_found_before_it_is_needed(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "importable_by", lambda python, environment: True)
    name = os.path.basename(sys.executable)

    job = plan(script, environment={"PATH": os.path.dirname(sys.executable), "PYTHON_EXEC": name})

    assert job.fork_server is not None
    assert os.path.isabs(job.fork_server.python)


# What each worker has for itself.


def test_start_spec_states_which_worker_it_is_for() -> None:
    job = plan("/bin/echo", "${local_rank}")

    found = job.spec(1, {"RANK": "5"})
    assert {"local_rank": 1, "argv": ["/bin/echo", "1"], "variables": {"RANK": "5"}} == found.differences(job.common)


def test_a_virtual_local_rank_changes_the_environment_and_nothing_else() -> None:
    """The arguments tell the real one."""
    environment = {"PATH": os.defpath, "CUDA_VISIBLE_DEVICES": "6,7"}

    job = plan("/bin/echo", "${local_rank}", environment=environment, virtual_local_rank=True)
    spec = job.spec(1, {"RANK": "5", "LOCAL_RANK": "1"})

    assert {"RANK": "5", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"} == spec.variables
    assert (1, ["/bin/echo", "1"]) == (spec.local_rank, spec.argv)


def test_virtual_local_rank_without_a_device_is_refused_first() -> None:
    with pytest.raises(ValueError, match=r"virtual_local_rank=True: CUDA_VISIBLE_DEVICES='0' names 1 devices"):
        plan("gone.py", environment={"CUDA_VISIBLE_DEVICES": "0"}, virtual_local_rank=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two NUMA nodes with a GPU each, of which the first is at the second node; the calls for their addresses."""
    requests: list[Any] = []

    def addresses(fork_server: ForkServerKey | None, environment: Mapping[str, str], search_path: object) -> list[str]:
        requests.append((fork_server, environment))
        return ["0000:01:00.0", "0000:02:00.0"]

    topology = Topology({0: frozenset({0, 1}), 1: frozenset({2, 3})}, {}, {}, {}, (1, 0))
    monkeypatch.setattr(_plan._devices, "gpu_addresses", addresses)
    monkeypatch.setattr(_plan, "read_topology", lambda addresses: topology)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    return requests


NODE = NumaOptions(AffinityMode.NODE)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_workers_are_bound_by_the_gpu_of_their_local_rank(method: str, machine: list[Any]) -> None:
    job = plan(train, 0.5, method=method, numa_options=NODE)

    assert [([2], True), ([0, 1], True)] == [(spec.affinity, spec.bound) for spec in (job.spec(0, {}), job.spec(1, {}))]
    assert [(job.fork_server, job.common.env)] == machine


def test_a_virtual_local_rank_is_bound_by_the_real_one(machine: list[Any]) -> None:
    job = plan(train, 0.5, numa_options=NODE, virtual_local_rank=True)

    assert [("0", [2]), ("0", [0, 1])] == [
        (spec.variables["LOCAL_RANK"], spec.affinity) for spec in (job.spec(0, {}), job.spec(1, {}))
    ]


def test_no_gpu_is_queried_and_no_worker_bound_without_the_option(machine: list[Any]) -> None:
    """Row 197."""
    job = plan(train, 0.5)

    assert [] == machine
    assert {"affinity", "bound"}.isdisjoint(job.spec(0, {}).differences(job.common))


def test_a_binding_that_cannot_be_is_refused(machine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    with pytest.raises(BindingError, match="numa_options=node: GPU 0 is on NUMA node 1 with the CPUs 2-3"):
        plan(train, 0.5, numa_options=NODE)


@pytest.mark.parametrize("error", [StartError("no driver"), OSError("no file")])
def test_workers_start_unbound_if_binding_fails_and_options_allow_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*facts: object) -> list[str]:
        raise error

    monkeypatch.setattr(_plan._devices, "gpu_addresses", fail)

    job = plan(train, 0.5, numa_options=NumaOptions(AffinityMode.NODE, True))

    assert {"affinity", "bound"}.isdisjoint(job.spec(0, {}).differences(job.common))
    assert [
        f"numa_options=node: {error}; workers start without CPU binding, because "
        "should_fall_back_if_binding_fails is set"
    ] == [record.getMessage() for record in caplog.records]


def test_machine_without_a_device_file_is_not_searched_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan._devices._machine, "may_have_accelerators", lambda: False)

    with pytest.raises(
        RuntimeError, match=r"numa_options=node: .*torch finds none here; without this option, workers start unbound"
    ):
        plan(train, 0.5, numa_options=NODE)


@pytest.mark.parametrize(
    ("variables", "preloaded"),
    [
        ({}, ("torch",)),
        ({"OMP_PROC_BIND": "close"}, ()),
        ({"OMP_PLACES": "cores"}, ()),
        ({"OMP_PLACES": "cores", "OMP_PROC_BIND": " FALSE "}, ("torch",)),
        ({"GOMP_CPU_AFFINITY": "0-3"}, ()),
    ],
)
@pytest.mark.usefixtures("machine")
def test_bound_workers_load_an_openmp_that_binds_threads_themselves(
    variables: dict[str, str], preloaded: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """It chooses its places when it is loaded: in the fork server it would choose among all CPUs."""
    job = plan(train, 0.5, environment=variables, numa_options=NODE)

    assert job.fork_server is not None and job.fork_server.preload == preloaded
    assert ("each worker imports torch itself" in caplog.text) == (not preloaded)


def test_without_a_binding_openmp_is_left_alone() -> None:
    job = plan(train, 0.5, environment={"OMP_PROC_BIND": "close"})

    assert job.fork_server is not None and job.fork_server.preload == ("torch",)
