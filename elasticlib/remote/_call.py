"""
Messages of a client and its agents: the call, the job's settings, and the outcome of a node.

Rules of this file: each is a line of JSON, behind which a pickle may follow. The line is read first: another version of
Python, torch or elasticlib is refused before anything is unpickled. Pickles come from the engine's own channel only.
"""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from json import dumps
from typing import Any

import cloudpickle
from attrs import asdict, evolve, frozen

from elasticlib._untrusted import parse
from elasticlib.engines import LARGEST, AgentEnded, OutcomeKind
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    PicklingError,
    PreemptedError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    SignalException,
)
from elasticlib.job import Place, Results, combined_error
from elasticlib.preload import needs_nothing_ahead
from elasticlib.spec import DEFAULT_PRELOAD, Entrypoint, LaunchConfig, entrypoint_name
from elasticlib.stacks import ranks_text
from elasticlib.workers import pack_call as pack_for_workers
from elasticlib.workers.child import Pickler, pack_exception, unpack_exception

# The call.


def versions() -> dict[str, str]:
    """Return the versions that a client and its agents must share, by package."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version_of("torch").partition("+")[0],
        "elasticlib": _version_of("elasticlib"),
    }


def _version_of(package: str) -> str:
    """Return the version of an installed package, without an import."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@frozen
class Call:
    """A call, as an agent gets it."""

    config: LaunchConfig
    entrypoint: Entrypoint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def pack_call(config: LaunchConfig, entrypoint: Entrypoint, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the call as bytes. Raises `PicklingError`."""
    head = {
        "versions": versions(),
        "folder": _present_folder(),
        "search_path": _folder_of_program(),
        "argv": sys.argv,
    }
    try:
        body = _pickled((_without_needless_preload(config, entrypoint), entrypoint, tuple(args), dict(kwargs)))
    except Exception as error:
        if callable(entrypoint):
            # It names the part of the call that cannot be sent.
            pack_for_workers(entrypoint, args, kwargs, "value")
        raise PicklingError(f"{entrypoint_name(entrypoint)} cannot be sent to other machines: {error}") from error

    packed = _with_head(head, body)
    if len(packed) > LARGEST:
        raise PicklingError(
            f"{entrypoint_name(entrypoint)} and its arguments have {len(packed) >> 20} MB, and at most "
            f"{LARGEST >> 20} MB can be sent to other machines: send a path"
        )
    return packed


def _present_folder() -> str:
    """Return the working directory; empty if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _folder_of_program() -> str:
    """Return the folder of this program's script, as it stands in ``sys.path``."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    folder = os.path.dirname(os.path.realpath(file)) if file else ""
    if folder in sys.path:
        return folder
    # Packages such as Ray put folders of their own before it.
    return sys.path[0] if sys.path else ""


def _without_needless_preload(config: LaunchConfig, entrypoint: Entrypoint) -> LaunchConfig:
    """
    Return *config* without a preload where the first call would wait for torch, and not use it.

    A program that launches again is likely to need torch next; most agents serve one call, and kept ones have another
    fork server for a call with another preload.
    """
    if config.preload == DEFAULT_PRELOAD and needs_nothing_ahead(entrypoint):
        return evolve(config, preload=())
    return config


def _pickled(value: object) -> bytes:
    """Return the pickle of *value*, with the file names of functions, which tracebacks show."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack_call(packed: bytes) -> Call:
    """Return the call of a client. Raises `ConfigError` if this machine has other versions, or lacks a module."""
    head, body = _head_of(packed)
    _check_versions(head["versions"])
    _enter_folder(str(head["folder"]), str(head["search_path"]))
    # Workers see the arguments of their launcher's program, and nodes compare them.
    sys.argv = [str(argument) for argument in head["argv"]]
    try:
        return Call(*cloudpickle.loads(body))
    # Whatever an argument's own code raises: the client would see an error without a place.
    except Exception as error:
        raise ConfigError(
            f"the call cannot be unpacked: {str(error) or type(error).__name__}; install the same modules there, "
            "or move what the call needs into the program's script"
        ) from error


def _check_versions(of_client: Mapping[str, str]) -> None:
    for package, version in versions().items():
        if of_client[package] != version:
            raise ConfigError(
                f"{package} is {of_client[package]} on the client, and {version} here: install the same version on both"
            )


def _enter_folder(folder: str, search_path: str) -> None:
    """Enter the client's working directory and add the folder of its script, where this machine has them."""
    if os.path.isdir(folder):
        os.chdir(folder)
    # An agent may get several calls.
    if search_path and os.path.isdir(search_path) and sys.path[0] != search_path:
        sys.path.insert(0, search_path)


def settings_on_node(call: Call) -> dict[str, Any]:
    """Return the settings that differ on a node, whose program is not the client's."""
    # The program here is the agent, not the script that the function is from.
    return {"main": "value"} if callable(call.entrypoint) else {}


# The settings of the job.


@frozen
class JobSettings:
    """Settings that the client adds to the call when an agent begins."""

    endpoint: str
    is_host: bool
    run_id: str
    token: str
    min_nodes: int
    max_nodes: int
    cell_shows_errors: bool = False
    """True if the client's notebook shows the exceptions of workers, so that workers do not print them."""

    def packed(self) -> bytes:
        """Return the settings as JSON."""
        return dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> JobSettings:
        """Return the settings of a client."""
        return cls(**parse(data))


# The outcome of a node.


@frozen
class Outcome:
    """The outcome of a node, without its values."""

    kind: OutcomeKind
    why: str = ""
    ranks: frozenset[int] = frozenset()
    world: int = 0
    has_cause: bool = False

    def of_agent(self, place: int, agent: int = 0) -> AgentEnded:
        """Return this outcome as that of the *agent* at *place*."""
        return AgentEnded(place, self.kind, agent, self.ranks, self.world, self.has_cause, self.why)


def pack_results(values: Mapping[int, Any], places: Mapping[int, Place], world: int) -> bytes:
    """Return the outcome of a node whose workers succeeded. Raises `ConfigError` if it is too large."""
    body = cloudpickle.dumps((dict(values), dict(places)))
    if len(body) > LARGEST - 2**16:
        raise ConfigError(
            f"the results of ranks {sorted(values)} have {len(body) >> 20} MB, and a node can return at most "
            f"{LARGEST >> 20} MB: return a path"
        )
    kind = OutcomeKind.SUCCEEDED if values else OutcomeKind.UNNEEDED
    return _with_head({"kind": kind.value, "why": "", "ranks": sorted(values), "world": world}, body)


_KINDS: tuple[tuple[type[BaseException], OutcomeKind], ...] = (
    (ChildFailedError, OutcomeKind.FAILED),
    (RendezvousGracefulExitError, OutcomeKind.UNNEEDED),
    (RendezvousClosedError, OutcomeKind.UNNEEDED),
    (RendezvousConnectionError, OutcomeKind.CUT_OFF),
    (SignalException, OutcomeKind.CUT_OFF),
)
"""By class of the error of a node; another error would be the same at another try."""


def pack_error(error: BaseException, world: int, *, ends_call: bool = False) -> bytes:
    """Return the outcome of a node that raised *error*; *ends_call*: another try would end in the same way."""
    kind = next((kind for each, kind in _KINDS if isinstance(error, each)), OutcomeKind.ERROR)
    if ends_call:
        kind = OutcomeKind.ERROR
    failures: dict[int, ProcessFailure] = {}
    title, cause = "", error
    if isinstance(error, ChildFailedError):
        failures, title = error.failures, error._elastic_title or error.name
        cause = error.__cause__ or error
    # A `ChildFailedError` is made again of its failures: only the worker's exception is sent with
    # them.
    has_cause = cause is not error
    sent = pack_exception(cause, None) if has_cause or not failures else b""
    head: dict[str, Any] = {
        "kind": kind.value,
        "why": str(error)[:2000],
        "ranks": [],
        "world": world,
        "has_cause": has_cause,
        "host": platform.node(),
    }
    return _with_head(head, cloudpickle.dumps((title, failures, sent)))


def read_outcome(packed: bytes) -> Outcome:
    """Return the outcome of a node, without its values. Raises ValueError or KeyError."""
    head, _ = _head_of(packed)
    ranks = frozenset(int(rank) for rank in head["ranks"])
    return Outcome(OutcomeKind(head["kind"]), str(head["why"]), ranks, int(head["world"]), bool(head.get("has_cause")))


def results_of(packed: bytes) -> tuple[dict[int, Any], dict[int, Place]]:
    """Return the values of a node by rank, and the places of its ranks."""
    values, places = cloudpickle.loads(_head_of(packed)[1])
    return values, places


@frozen
class _NodeError:
    """The error of a node, as its agent has sent it."""

    title: str
    failures: dict[int, ProcessFailure]
    cause: BaseException | None

    @classmethod
    def unpacked(cls, packed: bytes) -> _NodeError:
        head, body = _head_of(packed)
        title, failures, sent = cloudpickle.loads(body)
        cause = unpack_exception(sent) if sent else None
        # Another machine may accept the same settings.
        if isinstance(cause, ConfigError) and not failures:
            cause = cause.on_machine(str(head["host"]))
        return cls(title, failures, cause)


def error_of(packed: bytes, others: Sequence[bytes], raise_as: str) -> BaseException:
    """Return the exception of a node; the failures or results of *other* nodes that ended with it are added."""
    own, outcome = _NodeError.unpacked(packed), read_outcome(packed)
    found = [_NodeError.unpacked(other) for other in others]
    if not own.failures:
        return _of_all_nodes(own.cause or RuntimeError(outcome.why), [other.cause for other in found])

    error = ChildFailedError(own.title, _failures_of_all([own, *found]))
    error._elastic_ranks = outcome.world
    return combined_error(error, own.cause, raise_as)


def _failures_of_all(nodes: Iterable[_NodeError]) -> dict[int, ProcessFailure]:
    """Return the failures that *nodes* know, by rank."""
    failures: dict[int, ProcessFailure] = {}
    for node in nodes:
        for rank, failure in node.failures.items():
            if _knows_more(failure, failures.get(rank)):
                failures[rank] = failure
    return dict(sorted(failures.items()))


def _knows_more(failure: ProcessFailure, other: ProcessFailure | None) -> bool:
    """Return True for the failure of a worker's own node, which has its last lines, beside that of another node."""
    return other is None or bool(failure.log_tail and not other.log_tail)


def _of_all_nodes(error: BaseException, others: Sequence[BaseException | None]) -> BaseException:
    """Return the error of a call whose nodes ended with *error* and *others*, none of them by a failed worker."""
    if not isinstance(error, PreemptedError):
        return error

    results = dict(error.results)
    for other in others:
        # The call was preempted only if the ranks of all nodes have saved.
        if other is not None and not isinstance(other, PreemptedError):
            return other
        if other is not None:
            results.update(other.results)
    return PreemptedError(str(error), error.sigval, dict(sorted(results.items())))


def error_of_place(packed: Mapping[int, bytes], place: int, raise_as: str) -> BaseException:
    """Return the exception of the node at *place*, with the failures of other nodes that failed with it."""
    kind = read_outcome(packed[place]).kind
    others = [each for other, each in packed.items() if other != place and read_outcome(each).kind == kind]
    error = error_of(packed[place], others, raise_as)
    return _with_lost_ranks(error, packed, place) if isinstance(error, PreemptedError) else error


def _with_lost_ranks(error: PreemptedError, packed: Mapping[int, bytes], place: int) -> SignalException:
    """Return *error*, or the error of a call that lost nodes while they saved: these have left no outcome."""
    returned = set(error.results).union(*(read_outcome(each).ranks for each in packed.values()))
    unsaved = set(range(read_outcome(packed[place]).world)) - returned
    if not error.results or not unsaved:
        return error
    return SignalException(f"{error}, but {ranks_text(unsaved)} left no outcome", error.sigval)


def merged_results(packed: Iterable[bytes]) -> Results:
    """Return the results of all ranks, from the outcomes of nodes."""
    merged = Results()
    for each in packed:
        if read_outcome(each).ranks:
            values, places = results_of(each)
            merged.update(values)
            merged.places.update(places)
    return Results(dict(sorted(merged.items())), merged.places)


def _with_head(head: Mapping[str, Any], body: bytes) -> bytes:
    return dumps(head).encode() + b"\n" + body


def _head_of(packed: bytes) -> tuple[Any, bytes]:
    line, _, body = packed.partition(b"\n")
    return parse(line), body
