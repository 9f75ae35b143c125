"""What the workers of a job returned, with where that was. PURE: data, and text made of it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from elasticlib.stacks import ranks_text

_LONGEST = 200
"""Characters of a value that a table shows."""
_MOST_ROWS = 64
"""Ranks that a table shows."""
_MOST_COLUMNS = 12


@frozen
class Place:
    """Where a worker ran."""

    node: int
    """The node's rank in its job."""
    host: str
    round: int
    restarts: int
    """How often the workers of the job were restarted before."""


class Results(dict[int, Any]):
    """
    {global rank: what its worker returned}, for the workers of this node.

    It is the dictionary that torch's ``elastic_launch`` returns, and equal to one. `places` tells where and in which
    round each worker ran; in a notebook it shows as a table.
    """

    def __init__(self, values: Mapping[int, Any] | None = None, places: Mapping[int, Place] | None = None) -> None:
        super().__init__({} if values is None else values)
        self.places: dict[int, Place] = dict(places or {})

    def rank(self, rank: int) -> Any:
        """What the worker of global *rank* returned. Raises a `KeyError` that names the ranks that there are."""
        if rank in self:
            return self[rank]
        there = ranks_text(self) if self else "none"
        raise KeyError(f"no result of rank {rank!r} here: this node's workers were {there}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.places)

    def _repr_html_(self) -> str:
        """A table with a row for each rank; of metrics, dictionaries with the same keys, a column for each."""
        ranks = sorted(self)[:_MOST_ROWS]
        hosts = {place.host for place in self.places.values()}
        names = _columns([self[rank] for rank in ranks])
        head = ["rank", *(["node", "host"] if len(hosts) > 1 else []), *(names or ["result"])]
        rows = [f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in head)}</tr>"]
        for rank in ranks:
            place, value = self.places.get(rank), self[rank]
            where = (
                [str(place.node), place.host] if place is not None and len(hosts) > 1 else [""] * (len(hosts) > 1) * 2
            )
            cells = [str(rank), *where, *([_shown(value[name]) for name in names] if names else [_shown(value)])]
            rows.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
        more = f"<p>... {len(self) - _MOST_ROWS} more ranks</p>" if len(self) > _MOST_ROWS else ""
        return f"<table>{''.join(rows)}</table>{more}"


def _columns(values: list[Any]) -> list[str]:
    """The keys that all *values* have, where they are dictionaries that can stand in columns."""
    if not values or not all(type(value) is dict and value for value in values):
        return []
    names = list(values[0])
    alike = all(value.keys() == values[0].keys() for value in values)
    return names if alike and len(names) <= _MOST_COLUMNS and all(isinstance(name, str) for name in names) else []


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _text(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
