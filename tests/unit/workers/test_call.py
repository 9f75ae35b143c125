"""Refusals before any process is started, and the set of workers that a call becomes."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, EntrypointError, LogDirError, PicklingError, SpecError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.numa import NumaOptions
from elasticlib.workers import MultiprocessContext, SubprocessContext, _context, start_processes
from elasticlib.workers.child._start_spec import StartSpec

NOWHERE = DefaultLogsSpecs(os.devnull)


def adds(left: int, right: int) -> int:
    return left + right


def start(entrypoint: Any = adds, args: Any = None, envs: Any = None, **options: Any) -> None:
    args, envs = {0: (1, 2)} if args is None else args, {0: {}} if envs is None else envs
    start_processes(**{"name": "t", "logs_specs": NOWHERE, **options}, entrypoint=entrypoint, args=args, envs=envs)


@pytest.mark.parametrize(
    ("call", "kinds", "match"),
    [
        *(
            ({"args": args, "envs": envs}, (RuntimeError,), "local rank")
            for args, envs in (
                ({0: (), 2: ()}, {0: {}, 2: {}}),
                ({1: ()}, {1: {}}),
                ({0: (), 1: ()}, {0: {}}),
                ({0: ()}, {0: {}, 1: {}}),
                ({}, {0: {}}),
                ({0: ()}, {}),
            )
        ),
        *(({"args": args}, (), "args") for args in ("no mapping", {0: 3})),
        *(({"envs": {0: env}}, (TypeError,), r"envs\[0\]") for env in ({"RANK": 1}, {3: "x"}, [("A", "b")])),
        *(
            ({"envs": {0: env}}, (), "a name must be non-empty and without '='")
            for env in ({"": "x"}, {"A=B": "x"}, {"A": "x\0"})
        ),
        ({"entrypoint": "no_such_program", "args": {0: ()}}, (FileNotFoundError, EntrypointError), "no_such_program"),
        *(({"entrypoint": each}, (EntrypointError,), "is not callable") for each in (3, None, Path("train.py"))),
        (
            {"args": {0: (1, 2), 1: (threading.Lock(),)}, "envs": {0: {}, 1: {}}},
            (PicklingError,),
            r"local rank 1: argument 0 of .*adds, a lock",
        ),
        ({"start_method": "thread"}, (), "start_method='thread' must be one of spawn, fork, forkserver"),
        ({"logs_specs": None}, (), "logs_specs=None"),
        ({"duplicate_stdout_filters": "loss"}, (), "duplicate_stdout_filters='loss' must be a list"),
        ({"duplicate_stderr_filters": ["loss"]}, (), "duplicate_stderr_filters.* needs a file for the filtered lines"),
        ({"numa_options": "node"}, (), "numa_options"),
        ({"logs_specs": DefaultLogsSpecs("/dev/null/x")}, (NotADirectoryError, LogDirError), "/dev/null"),
    ],
)
def test_a_call_that_cannot_work_is_refused_by_name(
    call: dict[str, Any], kinds: tuple[type[Exception], ...], match: str
) -> None:
    """Each error is a `ConfigError`, and the builtin that torch's or Popen's users catch."""
    with pytest.raises(ConfigError, match=match) as caught:
        start(**call)

    assert all(isinstance(caught.value, kind) for kind in kinds)


@pytest.mark.parametrize("value", [None, 0])
def test_no_signal_to_end_by_is_sigterm(value: Any) -> None:
    assert signal.SIGTERM == _context.check_signal(value)


@pytest.mark.parametrize(
    ("given", "expected", "count"), [([1, 2], (1, 2), 0), (iter("ab"), ("a", "b"), 0), ("ab", ("a", "b"), 1)]
)
def test_arguments_may_be_any_iterable(
    given: Any, expected: tuple[Any, ...], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert {0: expected} == _context.check_arguments({0: given})
    assert count == len(caplog.records)


def test_arguments_of_the_caller_are_copied() -> None:
    args, envs = {1: ("b",), 0: ("a",)}, {1: {"A": "b"}, 0: {"A": "a"}}

    context = SubprocessContext("t", "echo", args, envs, NOWHERE)

    assert (list(context.args), list(context.envs)) == ([0, 1], [0, 1])
    assert envs == {1: {"A": "b"}, 0: {"A": "a"}}


def test_context_shows_where_its_output_will_go(tmp_path: Path) -> None:
    from elasticlib.spec import Std

    logs = DefaultLogsSpecs(str(tmp_path), redirects={0: Std.OUT})
    context = SubprocessContext("t", "echo", {0: (), 1: ()}, {0: {}, 1: {}}, logs)

    assert context.nprocs == 2
    assert context.stdouts[0].endswith("/0/stdout.log") and context.stdouts[1] == ""
    assert context.stderrs == {0: "", 1: ""}
    assert [context.envs[rank]["TORCHELASTIC_ERROR_FILE"] for rank in (0, 1)] == list(context.error_files.values())
    assert context.error_files[1].endswith("/1/error.json")


@pytest.mark.parametrize("env", [{"TORCHELASTIC_ERROR_FILE": "/mine/error.json"}, {}], ids=["given", "inherited"])
def test_an_error_file_is_the_callers_own_or_that_of_the_logs(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that this program inherited is that of a launcher above it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/parent/error.json")

    context = SubprocessContext("t", "echo", {0: ()}, {0: env}, NOWHERE)

    own = env.get("TORCHELASTIC_ERROR_FILE", "")
    assert own == context.error_files[0] == context.envs[0]["TORCHELASTIC_ERROR_FILE"]


def new() -> MultiprocessContext:
    return MultiprocessContext("t", adds, {0: (1, 2)}, {0: {}}, "forkserver", NOWHERE)


def test_a_set_that_was_not_started_cannot_be_waited_for() -> None:
    with pytest.raises(SpecError, match=r"call start\(\) first"):
        new().wait(0)


@pytest.mark.parametrize("act", [lambda each: each.close(), lambda each: each.pids()])
def test_set_that_was_not_started_can_be_queried_and_closed(act: Callable[[Any], Any]) -> None:
    assert not act(new())


def test_set_that_was_not_started_leaves_no_descriptor_open() -> None:
    gc.collect()  # what earlier tests left may hold descriptors, and go at any time
    before = os.listdir("/proc/self/fd")

    new()

    assert os.listdir("/proc/self/fd") == before


def test_a_set_that_was_closed_cannot_be_started() -> None:
    context = new()
    context.close()

    with pytest.raises(ConfigError, match="were already closed: create new ones"):
        context.start()


@pytest.mark.parametrize(("variables", "expected"), [({"OMP_NUM_THREADS": "3"}, 3), ({"A": "b"}, 8)])
def test_a_worker_computes_with_its_own_threads_or_those_of_the_set(variables: dict[str, str], expected: int) -> None:
    assert expected == _context.with_threads(StartSpec(threads=8, variables=variables)).threads


def test_a_set_computes_with_all_cpus_as_any_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("elasticlib.workers._machine.cpu_count", lambda: 6.0)

    assert new()._job.common.threads == 6


def test_impossible_binding_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elasticlib.workers._machine.may_have_accelerators", lambda: False)

    with pytest.raises(RuntimeError, match="numa_options=node"):
        start(numa_options=NumaOptions("node"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        *({"log_line_prefixes": each} for each in ({0: 5}, {0: None}, {0: b"x"}, {0: "\ud800"}, "[0]:", [(0, "x")])),
        {"name": "\ud800"},
    ],
    ids=ascii,
)
def test_prefixes_that_are_not_text_are_refused_before_folder_is_made(tmp_path: Path, call: dict[str, Any]) -> None:
    (named,) = call
    with pytest.raises(ConfigError, match=named):
        start(logs_specs=DefaultLogsSpecs(str(tmp_path)), **call)

    assert list(tmp_path.iterdir()) == []


def test_prefix_for_a_missing_rank_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    SubprocessContext("t", "true", {0: ()}, {0: {}}, NOWHERE, {1: "x", 0: "y"})

    assert [record.message for record in caplog.records] == [
        "log_line_prefixes names local rank 1, but this node has only local rank 0: that has no effect"
    ]


def test_lines_begin_with_the_prefix_of_their_rank_or_the_name() -> None:
    assert _context.line_prefixes("t", {1: "<é>"}, 2) == {0: b"[t0]:", 1: "<é>".encode()}
    assert _context.line_prefixes("t", None, 1) == {0: b"[t0]:"}
