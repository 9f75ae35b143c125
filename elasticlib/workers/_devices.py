"""
The number of workers that a word such as ``auto`` or ``gpu`` means on this machine.

Rules of this file: the caller never opens a device.
"""

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
"""
Seconds for torch to answer about devices: opening eight GPUs without their daemon takes up to
thirty.
"""


def workers_per_node(
    requested: int | str,
    preload: Sequence[str] = AUTO,
    flags: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    ahead: Sequence[str] = (),
) -> int:
    """
    Return the number of workers for `LaunchConfig.nproc_per_node`.

    * ``cpu`` counts the CPUs of the affinity mask, ``gpu`` CUDA (or ROCm) devices, ``xpu`` those
      of Intel.
    * ``auto`` counts the accelerators of any kind, or the CPUs without one.
    * Any other word is torch's name of a device, such as ``npu``.

    A fork server with *preload* and *flags* counts them. If the job's own has torch, it is that
    one, which can then serve the job too. *ahead* is the automatic preload of the job.
    *variables* of the workers override those of this program. Raises `SpecError` (a
    ``ValueError``) if this machine lacks devices of the kind that *requested* names.
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
        "nproc_per_node", f"{requested!r}, but torch finds {found} here: give a number, or one of {words}"
    )


def default_numa_options(
    workers: int,
    preload: Sequence[str] = AUTO,
    flags: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> NumaOptions | None:
    """
    Return the NUMA binding of torch's build for *workers*; None without a default, or without an
    accelerator for each worker.

    PyPI's torch has no default. It is read only from a torch that this program has imported,
    because an import would take longer than a launch. Devices are counted only if there is a
    default; an error in the count means None.
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
    Return PCI addresses of the accelerators, by index, that workers of a job with *environment*
    see.

    The job's own *fork server* lists them if it has loaded torch. Raises `ElasticError` if torch
    cannot list them.
    """
    if not _machine.may_have_accelerators():
        return []
    # That fork server has no torch: one with torch alone answers in its place.
    if fork_server is None or "torch" not in fork_server.preload:
        fork_server, search_path = ForkServerKey(sys.executable, ("torch",)), tuple(import_path())
    answer = _answer("gpus", fork_server, environment, search_path, "listing the GPUs", "leave numa_options out")
    return [str(address) for address in answer["addresses"]]


def _accelerators(
    preload: tuple[str, ...], flags: tuple[str, ...], variables: Mapping[str, str], ahead: Sequence[str] = ()
) -> tuple[int, str]:
    if not _machine.may_have_accelerators():
        return 0, ""

    key = ForkServerKey.of(sys.executable, _with_torch(preload), (), flags)

    # With the job's own key, the fork server that answers also starts the workers.
    if key.is_automatic and "torch" in ahead:
        key = evolve(key, preload=tuple(ahead))
    environment = _environment.without_secrets({**os.environ, **variables})
    doing, instead = "counting the accelerators", "give nproc_per_node=N, a number"
    answer = _answer("count", key, environment, tuple(import_path()), doing, instead)
    return answer["count"], answer["kind"]


def _with_torch(preload: tuple[str, ...]) -> tuple[str, ...]:
    """
    Return *preload* if a fork server with it has torch for jobs of any path; otherwise torch
    alone.
    """
    if preload == AUTO:
        return preload
    if "torch" not in preload or depends_on_path(preload):
        return ("torch",)
    return preload


def _answer(
    op: str, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str], doing: str, instead: str
) -> Message:
    """
    Return torch's answer to *op*, from a child of a fork server with *key*; the child is killed
    afterwards.

    Raises `StartError`, also if a driver does not answer.
    """
    with contextlib.ExitStack() as stack:
        fork_server = fork_servers.take(key, environment, search_path)
        stack.callback(fork_servers.give_back, fork_server)
        channel, began = fork_server.request(op), None
        stack.callback(channel.close)
        while True:
            # Imports have no limit; every 0.1 s the fork server is checked.
            left = 0.1 if began is None else _LIMIT - (monotonic() - began)
            if left <= 0:
                raise StartError(
                    f"{doing} took more than {_LIMIT:g} s, because torch waits for the device driver: check that "
                    f"nvidia-smi (or your vendor's tool) answers, or {instead}"
                )

            if not wait_readable([channel], left):
                if began is None and fork_server.ready():
                    # Its imports, which may be slow, do not count towards the limit.
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
            # The first message announces the child, which waits for its environment. Only its
            # handle is known.
            child = Process.sent(0, descriptors)
            stack.callback(child.close)
            stack.callback(child.send, signal.SIGKILL)
            channel.send({"env": dict(environment)})
