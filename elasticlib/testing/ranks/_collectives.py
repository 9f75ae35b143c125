"""
The collectives in which ranks wait, from torch's flight recorder. PURE.

The report names a collective that differs between ranks, or ranks that have not called it.

Rules of this file: a rank may send anything, also malformed data. The report says nothing about
data that is missing. Numbers count the collectives of one process group from 1, and are the same on
all of its ranks. (source: torch's flight recorder, ``TORCH_FR_BUFFER_SIZE``)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from json import loads
from typing import Any

from attrs import frozen

from elasticlib.stacks import ranks_text

_MOST_GROUPS = 20
"""Maximum number of process groups that a rank reports."""
_MOST_MEMBERS = 1000
_MOST_PENDING = 3
"""Maximum number of pending collectives that a rank reports for each group."""
_ALIKE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather"})
"""Collectives that need tensors of the same size on each rank."""


@frozen
class Collective:
    """Collective that a rank has called."""

    number: int
    name: str
    of: str
    """Types and sizes of the input tensors."""

    def text(self) -> str:
        return f"{self.name} of {self.of}" if self.of else self.name


@frozen
class At:
    """Position of one rank in one process group."""

    last: int
    """Number of the collective that the rank called last; 0 if none."""
    pending: tuple[Collective, ...]
    """Collectives that have not ended, in order."""
    members: tuple[int, ...] = ()
    """Ranks of the group; () if unknown."""
    description: str = ""
    """Description of the group, as given when it was made."""


# In a rank.


def summary(dumps: Collection[str | bytes], begin: int, members: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """
    Summarize the collectives since *begin* in *dumps* of a rank's flight recorders, for JSON.

    *begin* is in nanoseconds of the wall clock; *members* has the ranks of each group, by its name.
    """
    groups: dict[str, dict[str, Any]] = {}
    for dump in dumps:
        for entry in loads(dump).get("entries", ()):
            # Point-to-point operations are not numbered with the collectives of the group.
            if entry["time_created_ns"] >= begin and not entry["is_p2p"]:
                _add(groups, entry, members)
    for group in groups.values():
        group["pending"] = sorted(group["pending"])[:_MOST_PENDING]
    return list(groups.values())[:_MOST_GROUPS]


def _add(groups: dict[str, dict[str, Any]], entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> None:
    name, description = map(str, entry["process_group"])
    if name not in groups:
        groups[name] = {
            "group": name,
            "description": description,
            "members": list(members.get(name, ()))[:_MOST_MEMBERS],
            "last": 0,
            "pending": [],
        }

    group = groups[name]
    group["last"] = max(group["last"], entry["collective_seq_id"])
    if not entry["retired"]:
        # The name begins with the name of the backend.
        called = entry["profiling_name"].rpartition(":")[2]
        tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
        of = ", ".join(_tensor(dtype, size) for dtype, size in tensors)
        group["pending"].append([entry["collective_seq_id"], called, of])


def _tensor(dtype: str, size: Sequence[int]) -> str:
    return f"{_TYPES.get(dtype, dtype)} {list(size)}"


_TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""Names of types in the flight recorder, and in Python."""


# In the tests' own process.


def read(sent: object) -> dict[str, At]:
    """Return the positions that a rank has sent, by group; skip malformed ones."""
    found: dict[str, At] = {}
    if not isinstance(sent, list):
        return found
    for each in sent:
        try:
            found[str(each["group"])] = _position(each)
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _position(each: Any) -> At:
    pending = tuple(Collective(int(number), str(name), str(of)) for number, name, of in each["pending"])
    members = tuple(map(int, each["members"]))
    return At(int(each["last"]), pending[:_MOST_PENDING], members, str(each["description"]))


def describe(ranks: Mapping[int, Mapping[str, At]]) -> list[str]:
    """Return lines about the groups in which one of *ranks* waits, from their positions."""
    lines = []
    for name in _groups_with_waiting_ranks(ranks):
        at = {rank: groups[name] for rank, groups in ranks.items() if name in groups}
        lines.append(_about_group(name, at, ranks))
    return lines


def _groups_with_waiting_ranks(ranks: Mapping[int, Mapping[str, At]]) -> list[str]:
    # A dictionary keeps the order in which ranks have named the groups.
    names: dict[str, None] = {}
    for groups in ranks.values():
        names.update((name, None) for name, at in groups.items() if at.pending)
    return list(names)


def _about_group(name: str, at: Mapping[int, At], ranks: Collection[int]) -> str:
    """Describe the first pending collective: it differs, or ranks are missing, or all wait."""
    group = _group_text(name, next(iter(at.values())).description)
    pending = {rank: each.pending[0] for rank, each in sorted(at.items()) if each.pending}
    number = min(call.number for call in pending.values())
    calls = _ranks_by_call(number, pending)
    if _differ(calls):
        text = ", ".join(f"{call.text()} on {ranks_text(where)}" for call, where in calls.items())
        return f"Collective {number} of {group} differs: {text}."

    waiting = [*itertools.chain(*calls.values())]
    waits = f"{ranks_text(waiting)} {_verb(waiting, 'waits', 'wait')}"
    collective = f"collective {number}, {next(iter(calls)).text()}"
    missing = _missing(number, at, ranks)
    if not missing:
        return f"In {group} {waits} in {collective}."

    return f"In {group} {waits} in {collective}, which not all ranks have joined: {_missing_text(missing)}."


def _group_text(name: str, description: str) -> str:
    if description == "default_pg":
        return "the default process group"
    # torch fills in one of these for a group that has no description.
    if description in ("", "undefined", name):
        return f"the process group {name}"
    return f"the process group {name} ({description})"


def _ranks_by_call(number: int, pending: Mapping[int, Collective]) -> dict[Collective, list[int]]:
    calls: dict[Collective, list[int]] = {}
    for rank, call in pending.items():
        if call.number == number:
            calls.setdefault(call, []).append(rank)
    return calls


def _differ(calls: Collection[Collective]) -> bool:
    """Return whether *calls* cannot belong to the same collective."""
    names = {call.name for call in calls}
    if len(names) > 1:
        return True
    # Others, such as all_to_all, may take tensors of another size from each rank.
    return len(calls) > 1 and not names.isdisjoint(_ALIKE)


def _missing(number: int, at: Mapping[int, At], ranks: Collection[int]) -> dict[int, list[int]]:
    """Return the ranks that have not called collective *number*, by the number of their last one."""
    missing: dict[int, list[int]] = {}
    # A rank that has not answered may have called it.
    members = set[int]().union(*(each.members for each in at.values()))
    for rank in sorted(members.intersection(ranks)):
        last = at[rank].last if rank in at else 0
        if last < number:
            missing.setdefault(last, []).append(rank)
    return missing


def _missing_text(missing: Mapping[int, Sequence[int]]) -> str:
    parts = []
    for last, ranks in missing.items():
        have = _verb(ranks, "has", "have")
        parts.append(f"{ranks_text(ranks)} {have} called {last or 'none'} so far")
    return ", and ".join(parts)


def _verb(ranks: Collection[int], singular: str, plural: str) -> str:
    return singular if len(ranks) == 1 else plural
