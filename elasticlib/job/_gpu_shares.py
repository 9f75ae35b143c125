"""
Choice of a job's GPUs on this machine. PURE.

Its input is the request, the GPUs that the program sees, and those of other jobs.

Rules of this file: a job has the GPUs that its workers see. Two jobs at the same time never have the
same GPU, whether they name it by index or by name. Only calls that do not name GPUs share them, as
separate programs do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from elasticlib.errors import ConfigError, JobRunsError
from elasticlib.workers import CUDA_DEVICES_VARIABLE, HIP_DEVICES_VARIABLE

_NONE: Mapping[str, str] = MappingProxyType({})


@frozen
class GpuShare:
    """The GPUs of the machine that one job has."""

    owner: str
    """Text that names the job."""
    gpus: tuple[str, ...]
    """Indices, or names that the driver knows."""
    may_be_shared: bool
    """True if similar calls may use the same GPUs: the call names none, and the program waits for it."""


def seen_by(environment: Mapping[str, str], present: int | None) -> tuple[str, ...] | None:
    """
    Return the GPUs that a program with *environment* sees, out of *present* GPUs; None if unknown.

    Entries after an empty or negative one are not seen. (source: CUDA's programming guide)
    """
    # The variables may list GPUs that this machine does not have.
    if present == 0:
        return ()

    # HIP reads its own variable first.
    for name in (HIP_DEVICES_VARIABLE, CUDA_DEVICES_VARIABLE):
        listed = environment.get(name)
        if listed is not None:
            entries = map(str.strip, listed.split(","))
            return tuple(itertools.takewhile(_is_device, entries))

    if present is None:
        return None

    return tuple(map(str, range(present)))


def _is_device(entry: str) -> bool:
    return entry != "" and not entry.startswith("-")


def showing(gpus: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a program with *environment* sees only *gpus*."""
    variables = {CUDA_DEVICES_VARIABLE: ",".join(gpus)}
    # If HIP's own variable is set, HIP reads it before CUDA's.
    if environment.get(HIP_DEVICES_VARIABLE):
        variables[HIP_DEVICES_VARIABLE] = variables[CUDA_DEVICES_VARIABLE]
    return variables


def choose(
    requested: Sequence[int | str] | None,
    workers: int | str,
    seen: tuple[str, ...] | None,
    others: Iterable[GpuShare],
    *,
    may_share: bool,
    names: Mapping[str, str] = _NONE,
) -> tuple[str, ...] | None:
    """
    Return the GPUs of a job of *workers*; None for no restriction.

    *requested* are indices into the GPUs that the program has *seen*, or names. *names* are the
    driver's names by index. A job without a request gets all that *others* do not have. Raises
    `ConfigError` for a GPU that does not exist, `JobRunsError` if another job has it.
    """
    owners = _owners(others, names, may_share=may_share)
    if requested is not None:
        return _choose_requested(requested, seen, owners, names)
    # Unknown GPUs cannot be shared out, and workers that are counted by CPUs need none.
    if not seen or workers == "cpu":
        return None
    return _choose_free(workers, seen, owners, names)


def _owners(others: Iterable[GpuShare], names: Mapping[str, str], *, may_share: bool) -> dict[str, str]:
    """Return {unique name of a GPU: its owner}, without GPUs that this job may share."""
    owners: dict[str, str] = {}
    for share in others:
        is_shared = may_share and share.may_be_shared
        if not is_shared:
            owners.update((_name_of(gpu, names), share.owner) for gpu in share.gpus)
    return owners


def _choose_requested(
    requested: Sequence[int | str],
    seen: tuple[str, ...] | None,
    owners: Mapping[str, str],
    names: Mapping[str, str],
) -> tuple[str, ...]:
    found = tuple(_one(each, requested, seen) for each in requested)
    # An index and a name may mean the same GPU.
    distinct = {_name_of(gpu, names) for gpu in found}
    if len(distinct) < len(found):
        raise ConfigError(f"devices={list(requested)!r} lists a GPU twice: list each once")
    taken = _taken(found, owners, names)
    if taken:
        raise JobRunsError(_refusal(f"devices={list(requested)!r}", taken))
    return found


def _choose_free(
    workers: int | str, seen: tuple[str, ...], owners: Mapping[str, str], names: Mapping[str, str]
) -> tuple[str, ...]:
    taken = _taken(seen, owners, names)

    # No other job has one of them.
    if not taken:
        return seen

    free = tuple(gpu for gpu in seen if gpu not in taken)

    # A word such as gpu starts as many workers as GPUs are free, so one is enough.
    needed = workers if isinstance(workers, int) else 1
    if len(free) < needed:
        raise JobRunsError(_refusal(f"nproc_per_node={workers!r}", taken))

    return free


def _taken(gpus: Iterable[str], owners: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return {GPU: its owner} for those of *gpus* that a job has."""
    taken = {}
    for gpu in gpus:
        name = _name_of(gpu, names)
        if name in owners:
            taken[gpu] = owners[name]
    return taken


def _name_of(gpu: str, names: Mapping[str, str]) -> str:
    """Return a unique name of a GPU, given by its index or by the beginning of the driver's name."""
    if gpu.isdecimal():
        # Leading zeros do not make another index.
        index = str(int(gpu))
        return names.get(index, index)

    if not gpu:
        return gpu

    whole = [name for name in names.values() if name.startswith(gpu)]
    if len(whole) == 1:
        return whole[0]

    # Unknown, or the beginning of several names: used unchanged.
    return gpu


def _one(requested: int | str, all_of_them: Sequence[int | str], seen: tuple[str, ...] | None) -> str:
    # The driver knows names; an index cannot be checked if the number of GPUs is unknown.
    if isinstance(requested, str) or seen is None:
        return str(requested)
    if requested >= len(seen):
        raise ConfigError(
            f"devices={list(all_of_them)!r} has an index out of range: this program sees {_range_text(len(seen))}; "
            "correct the list, or leave devices out"
        )
    return seen[requested]


def _range_text(count: int) -> str:
    few = {0: "no GPU", 1: "GPU 0 only"}
    return few.get(count, f"GPUs 0 to {count - 1}")


def _refusal(given: str, taken: Mapping[str, str]) -> str:
    owners = ", ".join(dict.fromkeys(taken.values()))
    gpus, are = ("GPUs", "are") if len(taken) > 1 else ("GPU", "is")
    return (
        f"{given}: {gpus} {', '.join(taken)} {are} taken by {owners}: wait for that job "
        "(.result()) or stop it (.stop()), or give each job its own GPUs, as in devices=[0, 1]; devices=() is for "
        "jobs without GPUs"
    )
