"""
At which collective ranks are, by torch's flight recorder: which one differs, and who has not come to it. PURE.

Rules of this file: what a rank tells may be anything; of what it does not tell nothing is said. Numbers count the
collectives of one process group, from 1 on, and are the same on all of its ranks. (source: torch's flight recorder,
``TORCH_FR_BUFFER_SIZE``)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from json import loads
from typing import Any

from attrs import frozen

from elasticlib.stacks import ranks_text

_MOST_GROUPS = 20
"""Process groups that a rank tells of."""
_MOST_MEMBERS = 1000
_MOST_PENDING = 3
"""Collectives of a group that it tells of."""
_ALIKE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather"})
"""Those for which each rank gives tensors of the same size."""


@frozen
class Collective:
    """One that a rank has called."""

    number: int
    name: str
    of: str
    """Types and sizes of what it gives."""

    def text(self) -> str:
        return f"{self.name} of {self.of}" if self.of else self.name


@frozen
class At:
    """Where one rank is in one process group."""

    last: int
    """The number of the collective that it called last; 0 where it has called none."""
    pending: tuple[Collective, ...]
    """Those that have not ended, in order."""
    members: tuple[int, ...] = ()
    """The group's ranks; () where that is not known."""
    description: str = ""
    """The group's, as its maker gave it."""


# In a rank.


def summary(dumps: Collection[str | bytes], begin: int, members: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """
    What a rank tells, as JSON can hold it, of *dumps* of its flight recorders: of what was called since *begin*.

    *begin* is in nanoseconds of the wall clock, *members* are the ranks of groups, by their names.
    """
    groups: dict[str, dict[str, Any]] = {}
    for dump in dumps:
        for entry in loads(dump).get("entries", ()):
            if entry["time_created_ns"] < begin or entry["is_p2p"]:
                continue
            name, description = map(str, entry["process_group"])
            ranks = list(members.get(name, ()))[:_MOST_MEMBERS]
            new = {"group": name, "description": description, "members": ranks, "last": 0, "pending": []}
            group = groups.setdefault(name, new)
            group["last"] = max(group["last"], entry["collective_seq_id"])
            if not entry["retired"]:
                of = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
                called = entry["profiling_name"].rpartition(":")[2]
                group["pending"].append([entry["collective_seq_id"], called, ", ".join(_tensor(*each) for each in of)])
    for group in groups.values():
        group["pending"] = sorted(group["pending"])[:_MOST_PENDING]
    return list(groups.values())[:_MOST_GROUPS]


def _tensor(dtype: str, size: Sequence[int]) -> str:
    names = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
    names |= {"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}
    return f"{names.get(dtype, dtype)} {list(size)}"


# In the tests' own process.


def read(told: object) -> dict[str, At]:
    """By group what a rank has told; what cannot be that is left out."""
    found: dict[str, At] = {}
    for each in told if isinstance(told, list) else ():
        try:
            pending = tuple(Collective(int(number), str(name), str(of)) for number, name, of in each["pending"])
            members = tuple(map(int, each["members"]))
            found[str(each["group"])] = At(
                int(each["last"]), pending[:_MOST_PENDING], members, str(each["description"])
            )
        except (KeyError, TypeError, ValueError):
            continue
    return found


def told(ranks: Mapping[int, Mapping[str, At]]) -> list[str]:
    """Lines about *ranks*, each with where it is in its groups; [] where none waits in a collective."""
    names = dict.fromkeys(name for groups in ranks.values() for name, at in groups.items() if at.pending)
    lines = []
    for name in names:
        at = {rank: each[name] for rank, each in ranks.items() if name in each}
        lines += _of_group(name, at, ranks)
    return lines


def _of_group(name: str, at: Mapping[int, At], ranks: Collection[int]) -> list[str]:
    (description, *_) = [each.description for each in at.values()]
    is_described = description not in ("", "undefined", name)
    group = f"the process group {name}{f' ({description})' if is_described else ''}"
    group = "the default process group" if description == "default_pg" else group
    number = min(each.pending[0].number for each in at.values() if each.pending)
    calls: dict[Collective, list[int]] = {}
    for rank, each in sorted(at.items()):
        for call in each.pending[:1]:
            if call.number == number:
                calls.setdefault(call, []).append(rank)
    members = {member for each in at.values() for member in each.members}
    lasts = {rank: at[rank].last if rank in at else 0 for rank in sorted(members.intersection(ranks))}
    missing = {rank: last for rank, last in lasts.items() if last < number}
    first, *others = calls
    differ = {call.name for call in calls}
    if len(differ) > 1 or (others and first.name in _ALIKE):
        text = ", ".join(f"{call.text()} on {ranks_text(where)}" for call, where in calls.items())
        return [f"Collective {number} of {group} differs: {text}."]
    waiting = [rank for each in calls.values() for rank in each]
    waits = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    if not missing:
        return [f"In {group} {waits} in collective {number}, {first.text()}."]
    behind: dict[int, list[int]] = {}
    for rank, last in missing.items():
        behind.setdefault(last, []).append(rank)
    whos = ", and ".join(
        f"{ranks_text(each)} {'has' if len(each) == 1 else 'have'} called {last or 'none'} so far"
        for last, each in behind.items()
    )
    return [f"In {group} {waits} in collective {number}, {first.text()}, to which not all have come: {whos}."]
