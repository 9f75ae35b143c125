"""
Which GPUs of this machine a job gets. PURE: requests, what the program sees and what others have in; GPUs out.

Rules of this file: a job has the GPUs that its workers see. Jobs at once never have the same one, whether they call it
by its index or by its name; only calls that say nothing of GPUs share them, as programs beside each other do.
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
    """The part of the machine's GPUs that a job has."""

    owner: str
    """The job, as it shows itself."""
    gpus: tuple[str, ...]
    """Indices, or the names that the driver knows."""
    may_be_shared: bool
    """Whether calls like this one may have them too: nobody said of which GPUs, and the program waits for it."""


def seen_by(environment: Mapping[str, str], present: int | None) -> tuple[str, ...] | None:
    """
    Return the GPUs that a program with *environment* sees of the *present* ones; None where neither says it.

    Entries after an empty or negative one are not seen. (source: CUDA's programming guide)
    """
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
    """Return the variables by which a program with *environment* sees *gpus* alone."""
    variables = {CUDA_DEVICES_VARIABLE: ",".join(gpus)}
    # HIP reads its own variable before CUDA's, where it is set.
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
    Return the GPUs of a job of *workers* that has *requested* some; None for whatever there is.

    Requests are indices into the GPUs that the program has *seen*, or names, which the driver has by index in *names*.
    A job without a request gets all that *others* do not have. Raises `ConfigError` for what is not there, and
    `JobRunsError` where another job has it.
    """
    owners = _owners(others, names, may_share=may_share)
    if requested is not None:
        return _choose_requested(requested, seen, owners, names)
    if not seen or workers == "cpu":
        return None
    return _choose_free(workers, seen, owners, names)


def _owners(others: Iterable[GpuShare], names: Mapping[str, str], *, may_share: bool) -> dict[str, str]:
    """Return who has each GPU, by its one name, without those that may be shared."""
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
        raise ConfigError(f"devices={list(requested)!r} names a GPU twice: name each once")
    taken = _taken(found, owners, names)
    if taken:
        raise JobRunsError(_refusal(f"devices={list(requested)!r}", taken))
    return found


def _choose_free(
    workers: int | str, seen: tuple[str, ...], owners: Mapping[str, str], names: Mapping[str, str]
) -> tuple[str, ...]:
    taken = _taken(seen, owners, names)
    # Nothing to choose: no other job has one of them.
    if not taken:
        return seen
    free = tuple(gpu for gpu in seen if gpu not in taken)
    needed = workers if isinstance(workers, int) else 1
    if len(free) < needed:
        raise JobRunsError(_refusal(f"nproc_per_node={workers!r}", taken))
    return free


def _taken(gpus: Iterable[str], owners: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return those of *gpus* that a job has, each with that job."""
    taken = {}
    for gpu in gpus:
        name = _name_of(gpu, names)
        if name in owners:
            taken[gpu] = owners[name]
    return taken


def _name_of(gpu: str, names: Mapping[str, str]) -> str:
    """Return one name for a GPU that is given by its index, or by the first characters of the driver's name."""
    if gpu.isdecimal():
        index = str(int(gpu))
        return names.get(index, index)
    if not gpu:
        return gpu
    whole = [name for name in names.values() if name.startswith(gpu)]
    if len(whole) == 1:
        return whole[0]
    # Unknown, or the beginning of several names: it stands for itself.
    return gpu


def _one(requested: int | str, all_of_them: Sequence[int | str], seen: tuple[str, ...] | None) -> str:
    if isinstance(requested, str) or seen is None:
        return str(requested)
    if requested >= len(seen):
        raise ConfigError(
            f"devices={list(all_of_them)!r}: this program sees {_range_text(len(seen))}: name those by index, "
            "or leave devices out"
        )
    return seen[requested]


def _range_text(count: int) -> str:
    few = {0: "no GPU", 1: "GPU 0 only"}
    return few.get(count, f"GPUs 0 to {count - 1}")


def _refusal(given: str, taken: Mapping[str, str]) -> str:
    owners = ", ".join(dict.fromkeys(taken.values()))
    gpus, are = ("GPUs", "are") if len(taken) > 1 else ("GPU", "is")
    return (
        f"{given}: {gpus} {', '.join(taken)} {are} taken by {owners}: wait for it "
        "(.result()) or stop it (.stop()), or give each job its own, as in devices=[0, 1]; devices=() is for jobs "
        "without GPUs"
    )
