"""Messages of a client and its agents, and the settings that a call with an engine refuses."""

from __future__ import annotations

import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, ProcessFailure, elastic_launch
from elasticlib.engines import OutcomeKind, Ssh
from elasticlib.errors import (
    ConfigError,
    PicklingError,
    PreemptedError,
    PreloadError,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousNotFoundError,
    RendezvousTimeoutError,
    SignalException,
    StartError,
    UnknownNameError,
)
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.remote import _call
from elasticlib.spec import DEFAULT_PRELOAD


def train() -> int:
    return 1


class Untouched:
    """An engine of two machines that must not be asked for them."""

    nodes, endpoint, token = 2, "", ""

    def place(self, agents: int, command: object) -> object:
        raise AssertionError("a machine was asked")


def test_call_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])

    call = _call.unpack_call(_call.pack_call(LaunchConfig(max_restarts=7), train, (1, "a"), {"b": 2}))

    assert (7, (1, "a"), {"b": 2}) == (call.config.max_restarts, call.args, call.kwargs)
    assert 1 == call.entrypoint() if callable(call.entrypoint) else False


@pytest.mark.parametrize(
    ("given", "is_needless", "sent"),
    [(DEFAULT_PRELOAD, True, ()), (DEFAULT_PRELOAD, False, DEFAULT_PRELOAD), (("torch",), True, ("torch",))],
)
def test_torch_is_imported_ahead_only_for_calls_that_may_need_it(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], is_needless: bool, sent: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(_call, "needs_nothing_ahead", lambda entrypoint: is_needless)

    call = _call.unpack_call(_call.pack_call(LaunchConfig(preload=given), train, (), {}))

    assert sent == call.config.preload


@pytest.mark.parametrize("package", ["Python", "torch", "elasticlib"])
def test_other_version_is_refused_with_both(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    packed = _call.pack_call(LaunchConfig(), train, (), {})
    here = _call.versions()
    monkeypatch.setattr(_call, "versions", lambda: {**here, package: "0.0.9"})

    with pytest.raises(ConfigError, match=rf"{package} is {here[package]} on the client, and 0\.0\.9 here"):
        _call.unpack_call(packed)


class Bound:
    """An object that only the client can make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return only_on_the_client, ()


def only_on_the_client() -> None:
    raise AttributeError("no attribute x")


def test_call_that_cannot_be_unpacked_is_refused() -> None:
    packed = _call.pack_call(LaunchConfig(), train, (Bound(),), {})

    with pytest.raises(ConfigError, match="the call cannot be unpacked: no attribute x; install"):
        _call.unpack_call(packed)


def test_call_from_a_folder_that_was_removed_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert train is _call.unpack_call(_call.pack_call(LaunchConfig(), train, (), {})).entrypoint


def test_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(PicklingError, match="argument"):
        _call.pack_call(LaunchConfig(), train, ((each for each in ()),), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RendezvousGracefulExitError("spare"), OutcomeKind.UNNEEDED),
        (RendezvousClosedError("over"), OutcomeKind.UNNEEDED),
        (RendezvousNotFoundError("nobody"), OutcomeKind.CUT_OFF),
        (RendezvousTimeoutError("late"), OutcomeKind.ERROR),
        (SignalException("stopped", 15), OutcomeKind.CUT_OFF),  # type: ignore[arg-type]
        (StartError("no processes"), OutcomeKind.ERROR),
    ],
)
def test_kind_of_an_error(error: BaseException, kind: OutcomeKind) -> None:
    packed = _call.pack_error(error, 0)

    assert (kind, str(error)) == (_call.read_outcome(packed).kind, _call.read_outcome(packed).why)
    raised = _call.error_of(packed, [], "both")
    assert (type(error), str(error)) == (type(raised), str(raised))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError.of_setting("devices", "(9,): no GPU"), "on {}: devices=(9,): no GPU"),
        (UnknownNameError("unknown"), "on {}: unknown"),
        (PreloadError("x", "no module"), "preload='x' cannot be preloaded: on {}: no module; import it in the"),
    ],
)
def test_settings_that_a_machine_refuses_are_raised_with_its_name(error: ConfigError, text: str) -> None:
    raised = _call.error_of(_call.pack_error(error, 0), [], "both")

    assert type(error) is type(raised)
    assert str(raised).startswith(text.format(platform.node()))


def failed(rank: int) -> ChildFailedError:
    return ChildFailedError("train", {rank: ProcessFailure(rank, 100, 1, "", message=f"rank {rank}", rank=rank)})


def test_failures_of_all_nodes_and_the_own_exception_are_raised() -> None:
    first, second = failed(0), failed(3)
    second.__cause__ = KeyError("x")

    raised = _call.error_of(_call.pack_error(second, 4), [_call.pack_error(first, 4)], "both")

    assert isinstance(raised, ChildFailedError)
    assert isinstance(raised, KeyError)
    assert [0, 3] == list(raised.failures)


def preempted(**results: int) -> bytes:
    """Return the outcome of a node whose ranks have returned after a notice, by rank ``r0``, ``r1``, ..."""
    values = {int(rank[1:]): value for rank, value in results.items()}
    return _call.pack_error(PreemptedError("the node ends", signal.SIGTERM, values), 4)


def test_failure_is_that_of_the_node_where_the_rank_ran() -> None:
    """Others know it from the coordinator, without the worker's last lines."""
    own = failed(1)
    own.failures[1].log_tail, own.failures[1].host = ("its last line",), "m2"
    packed = [_call.pack_error(failed(1), 2), _call.pack_error(own, 2)]

    for order in (packed, packed[::-1]):
        raised = _call.error_of(order[0], order[1:], "both")
        assert isinstance(raised, ChildFailedError)
        assert (("its last line",), "m2") == (raised.failures[1].log_tail, raised.failures[1].host)


def test_preempted_call_has_the_results_of_all_nodes() -> None:
    nodes = {0: preempted(r2=20, r3=30), 1: preempted(r0=0, r1=10)}

    raised = _call.error_of_place(nodes, 0, "both")

    assert isinstance(raised, PreemptedError) and "the node ends" == str(raised)
    assert {0: 0, 1: 10, 2: 20, 3: 30} == raised.results


def test_call_was_not_preempted_if_one_node_has_not_saved() -> None:
    nodes = {0: preempted(r0=0), 1: _call.pack_error(SignalException("stopped", signal.SIGTERM), 4)}

    raised = _call.error_of_place(nodes, 0, "both")

    assert type(raised) is SignalException and "stopped" == str(raised)


def test_call_was_not_preempted_if_a_node_was_lost_meanwhile() -> None:
    raised = _call.error_of_place({0: preempted(r0=0, r1=10), 1: _call.pack_results({3: 30}, {}, 4)}, 0, "both")

    assert type(raised) is SignalException and "the node ends, but rank 2 left no outcome" == str(raised)


def test_results_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "LARGEST", 2**17)

    with pytest.raises(ConfigError, match="return a path"):
        _call.pack_results({0: b"x" * 2**17}, {}, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_nodes": 3}, r"max_nodes=3 differs from the 2 nodes of Ssh\(\['h1', 'h2'\]\): leave it out"),
        ({"rdzv_endpoint": "h1:1"}, "rdzv_endpoint='h1:1' cannot be combined with on="),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd' cannot be combined with on="),
        ({"local_addr": "h1"}, "local_addr='h1' cannot be combined with on="),
    ],
)
def test_setting_of_the_engine_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        elastic_launch(LaunchConfig(**settings), train, on=Ssh(["h1", "h2"]))()


def first_of(values: Any) -> Any:
    yield from values


@pytest.mark.parametrize(
    ("settings", "entrypoint", "message"),
    [
        ({"event_log_handler": "nono"}, train, "event_log_handler='nono' is unknown"),
        ({"end_time": 1.0}, train, "end_time='?1 is before the present time"),
        ({"rdzv_configs": {"is_host": True}}, train, "has is_host, which the engine sets"),
        ({"rdzv_configs": {"store_type": "file"}}, train, "has store_type, which the engine sets"),
        ({"rdzv_configs": {"keep_alive_interval": "x"}}, train, "keep_alive_interval"),
        ({"start_method": "spawn", "preload": ("numpy",)}, train, "preload='numpy': modules can be preloaded only"),
        ({"module": True}, train, "module and no_python cannot be used with a callable"),
        ({"module": True}, "pkg/mod.py", "module 'pkg/mod.py' is not a dotted name"),
        ({"show": (0,), "logs_specs": DefaultLogsSpecs()}, train, "has no effect with logs_specs"),
        ({}, first_of, "only creates a coroutine or generator"),
        ({}, 3, "entrypoint=3, a int, is not a callable"),
    ],
)
def test_call_that_no_machine_can_run_is_refused_before_any_request(
    settings: dict[str, Any], entrypoint: Any, message: str
) -> None:
    launch = elastic_launch(LaunchConfig(**settings), entrypoint, on=Untouched())  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=message):
        launch()


def test_rank_that_no_machine_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    launch = elastic_launch(LaunchConfig(show=(3, 4), nproc_per_node=2), train, on=Untouched())  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match="a machine was asked"):
        launch()
    assert ["show=(3, 4) names rank 4, but this job has only ranks 0-3: that has no effect here"] == caplog.messages


def test_object_that_is_not_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="on='h1' is not an engine"):
        elastic_launch(LaunchConfig(), train, on="h1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"on=<class '.*Ssh'> is not an engine: give one, such as Ssh\("):
        elastic_launch(LaunchConfig(), train, on=Ssh)  # type: ignore[arg-type]
