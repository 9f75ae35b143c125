"""How many workers a word such as ``auto`` or ``gpu`` means on this machine; the caller never touches a device."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attrs import evolve

from elasticlib._clock import monotonic
from elasticlib.errors import ElasticError, SpecError, StartError
from elasticlib.numa import NumaOptions, as_numa_options
from elasticlib.preload import ForkServerKey, depends_on_path, import_path
from elasticlib.processes import Message, Process, wait_readable
from elasticlib.spec import AUTO, DEVICE_WORDS
from elasticlib.workers import _environment, _machine
from elasticlib.workers._fork_servers import fork_servers

_LIMIT = 60.0
"""Seconds that torch may take to answer about devices: opening eight GPUs without their daemon takes up to thirty."""


def workers_per_node(
    requested: int | str,
    preload: Sequence[str] = AUTO,
    flags: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    ahead: Sequence[str] = (),
) -> int:
    """
    Return the number of workers for `LaunchConfig.nproc_per_node`.

    ``cpu`` counts the CPUs of the affinity mask, ``gpu`` CUDA (or ROCm) devices, ``xpu`` those of Intel,
    ``auto`` the accelerators of whatever kind, else the CPUs; any other word is torch's name of a device, such as
    ``npu``. A fork server with *preload* and *flags* counts them, those of the job where it has torch, so that it can
    serve that too; *ahead* is what the job's automatic preload imports. *variables* of the workers beat those of this
    program. Raises `SpecError` (a ``ValueError``) where there is none of the kind that *requested* names.
    """
    if isinstance(requested, int):
        return requested
    if requested == "cpu":
        return len(os.sched_getaffinity(0))
    count, kind = _accelerators(tuple(preload), flags, variables, ahead)
    # Without an accelerator the workers compute on CPUs.
    if requested == "auto":
        return count or len(os.sched_getaffinity(0))
    wanted = "cuda" if requested == "gpu" else requested
    has_wanted = count > 0 and kind == wanted
    if has_wanted:
        return count
    found = f"{count} of kind {kind!r}" if count else "no accelerator at all"
    words = ", ".join(DEVICE_WORDS)
    raise SpecError.of_setting(
        "nproc_per_node",
        f"{requested!r}, but torch finds {found} here: give a number, or one of {words}",
    )


def default_numa_options(
    workers: int,
    preload: Sequence[str] = AUTO,
    flags: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> NumaOptions | None:
    """
    What torch binds *workers* by where nothing is asked for: its build's default, with an accelerator for each worker.

    PyPI's torch has no default. Only a torch that this program has imported is asked: an import would cost more than a
    launch. Devices are counted where there is a default, and what keeps them from being counted means no.
    """
    internal = getattr(sys.modules.get("torch"), "_utils_internal", None)
    found = as_numa_options(getattr(internal, "get_default_numa_options", lambda: None)())
    if found is None:
        return None
    try:
        return found if _accelerators(tuple(preload), flags, variables)[0] == workers else None
    except (ElasticError, RuntimeError):
        # A driver that does not answer must not end a job that asked for no binding.
        return None


def gpu_addresses(
    fork_server: ForkServerKey | None, environment: Mapping[str, str], search_path: tuple[str, ...]
) -> list[str]:
    """
    PCI addresses of the accelerators, by index, that workers of a job with *environment* see.

    It asks the job's own *fork server* where that has loaded torch. Raises `ElasticError` when torch cannot list them.
    """
    if not _machine.may_have_accelerators():
        return []
    # That fork server has no torch to ask: one with torch alone answers in its place.
    if fork_server is None or "torch" not in fork_server.preload:
        fork_server, search_path = ForkServerKey(sys.executable, ("torch",)), tuple(import_path())
    answer = _answer("gpus", fork_server, environment, search_path, "listing the GPUs", "leave numa_options out")
    return [str(address) for address in answer["addresses"]]


def _accelerators(
    preload: tuple[str, ...], flags: tuple[str, ...], variables: Mapping[str, str], ahead: Sequence[str] = ()
) -> tuple[int, str]:
    """Return the number of accelerators, and their kind."""
    if not _machine.may_have_accelerators():
        return 0, ""
    key = ForkServerKey.of(sys.executable, _with_torch(preload), (), flags)
    # The key of the job itself: the fork server that answers is then the one that starts the workers.
    if key.is_automatic and "torch" in ahead:
        key = evolve(key, preload=tuple(ahead))
    environment = _environment.without_secrets({**os.environ, **variables})
    doing, instead = "counting the accelerators", "give nproc_per_node=N, a number"
    answer = _answer("count", key, environment, tuple(import_path()), doing, instead)
    return answer["count"], answer["kind"]


def _with_torch(preload: tuple[str, ...]) -> tuple[str, ...]:
    """Return *preload* if a fork server with it has torch for jobs of any path; else torch."""
    if preload == AUTO:
        return preload
    if "torch" not in preload or depends_on_path(preload):
        return ("torch",)
    return preload


def _answer(
    op: str, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str], doing: str, instead: str
) -> Message:
    """
    Return what torch says to *op*, in a child of a fork server of that *key*; the child is killed afterwards.

    Raises `StartError`, also when a driver does not answer.
    """
    with contextlib.ExitStack() as stack:
        fork_server = fork_servers.take(key, environment, search_path)
        stack.callback(fork_servers.give_back, fork_server)
        channel, began = fork_server.request(op), None
        stack.callback(channel.close)
        while True:
            # While it imports there is no limit, but a look every 0.1 s whether it is ready.
            left = 0.1 if began is None else _LIMIT - (monotonic() - began)
            if left <= 0:
                raise StartError(
                    f"{doing} took more than {_LIMIT:g} s: torch asks the driver, which hangs (does nvidia-smi, "
                    f"or the like, answer?); {instead}, and torch is not asked"
                )
            if not wait_readable([channel], left):
                if began is None and fork_server.ready():
                    # Its imports, which may be slow, do not count for the limit.
                    began = monotonic()
                continue
            received = channel.receive()
            if received is None:
                raise fork_server.failure("device query")
            answer, descriptors = received
            if "why" in answer:
                raise StartError(answer["why"])
            if not descriptors:
                return answer
            # The first message announces the child, which waits for its environment.
            # It is known by its handle alone.
            child = Process.sent(0, descriptors)
            stack.callback(child.close)
            stack.callback(child.send, signal.SIGKILL)
            channel.send({"env": dict(environment)})
