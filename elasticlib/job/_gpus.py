"""
Which GPUs of this machine a job gets. PURE: what was asked, what the program sees and what others have in; GPUs out.

Rules of this file: a job has the GPUs that its workers see. Jobs at once never have the same one, whether they call it
by its index or by its name; only calls that say nothing of GPUs share them, as programs beside each other do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from elasticlib.errors import ConfigError, JobRunsError
from elasticlib.workers import CUDA_DEVICES_VARIABLE, HIP_DEVICES_VARIABLE

_NONE: Mapping[str, str] = MappingProxyType({})


@frozen
class Share:
    """What a job has of the machine's GPUs."""

    owner: str
    """The job, as it shows itself."""
    gpus: tuple[str, ...]
    """Indices, or the names that the driver knows."""
    may_be_shared: bool
    """Whether calls like this one may have them too: nobody said of which GPUs, and the program waits for it."""


def seen_by(environment: Mapping[str, str], present: int | None) -> tuple[str, ...] | None:
    """
    What a program with *environment* sees of the *present* GPUs; None where neither says it.

    What stands behind an entry that is empty or negative is not seen. (source: CUDA's programming guide)
    """
    listed = next(
        (
            environment[name]
            for name in (HIP_DEVICES_VARIABLE, CUDA_DEVICES_VARIABLE)
            if environment.get(name) is not None
        ),
        None,
    )
    if present == 0:
        return ()
    if listed is None:
        return None if present is None else tuple(map(str, range(present)))
    found: list[str] = []
    for entry in listed.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        found.append(entry.strip())
    return tuple(found)


def showing(gpus: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a program with *environment* sees *gpus* alone."""
    text = ",".join(gpus)
    return {
        name: text
        for name in (CUDA_DEVICES_VARIABLE, HIP_DEVICES_VARIABLE)
        if name == CUDA_DEVICES_VARIABLE or environment.get(name)
    }


def choose(
    asked: Sequence[int | str] | None,
    workers: int | str,
    seen: tuple[str, ...] | None,
    others: Iterable[Share],
    *,
    may_share: bool,
    names: Mapping[str, str] = _NONE,
) -> tuple[str, ...] | None:
    """
    The GPUs of a job of *workers* that was *asked* to have some; None for whatever there is.

    What is asked for are indices of what the program has *seen*, or names, which the driver has by index in *names*. A
    job that was not asked gets all that *others* do not have. Raises `ConfigError` for what is not there, and
    `JobRunsError` where another job has it.
    """
    held = [each for each in others if not (may_share and each.may_be_shared)]
    owners = {_name_of(gpu, names): each.owner for each in held for gpu in each.gpus}
    if asked is not None:
        found = tuple(_one(each, asked, seen) for each in asked)
        if len({_name_of(gpu, names) for gpu in found}) < len(found):
            raise ConfigError(f"devices={list(asked)!r} names a GPU twice: name each once")
        if wanted := {gpu: owners[name] for gpu in found if (name := _name_of(gpu, names)) in owners}:
            raise JobRunsError(_refusal(f"devices={list(asked)!r}", wanted))
        return found
    if not seen or workers == "cpu":
        return None
    taken = {gpu: owners[name] for gpu in seen if (name := _name_of(gpu, names)) in owners}
    free = tuple(gpu for gpu in seen if gpu not in taken)
    if free == seen:
        return seen
    if len(free) < (workers if isinstance(workers, int) else 1):
        raise JobRunsError(_refusal(f"nproc_per_node={workers!r}", taken))
    return free


def _name_of(gpu: str, names: Mapping[str, str]) -> str:
    """One name for a GPU, however it is called: by index, or by the first characters of what the driver calls it."""
    if gpu.isdecimal():
        index = str(int(gpu))
        return names.get(index, index)
    whole = [name for name in names.values() if gpu and name.startswith(gpu)]
    return whole[0] if len(whole) == 1 else gpu


def _one(asked: int | str, all_of_them: Sequence[int | str], seen: tuple[str, ...] | None) -> str:
    if isinstance(asked, str) or seen is None:
        return str(asked)
    if asked >= len(seen):
        there = f"GPUs 0 to {len(seen) - 1}" if len(seen) > 1 else "GPU 0 only" if seen else "no GPU"
        raise ConfigError(
            f"devices={list(all_of_them)!r}: this program sees {there}: name those by index, or leave devices out"
        )
    return seen[asked]


def _refusal(given: str, taken: Mapping[str, str]) -> str:
    owners = ", ".join(dict.fromkeys(taken.values()))
    several = len(taken) > 1
    return (
        f"{given}: GPU{'s' * several} {', '.join(taken)} {'are' if several else 'is'} taken by {owners}: wait for it "
        "(.result()) or stop it (.stop()), or give each job its own, as in devices=[0, 1]; devices=() is for jobs "
        "without GPUs"
    )
