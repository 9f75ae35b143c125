"""Results of a job's workers, with their places. PURE: data, and text made of it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from elasticlib.stacks import ranks_text

_LONGEST = 200
"""Maximum number of characters of a value in a table."""
_MOST_ROWS = 64
"""Maximum number of ranks in a table."""
_MOST_COLUMNS = 12


@frozen
class Place:
    """Node, host and round of a worker."""

    node: int
    """Rank of the node in its job."""
    host: str
    round: int
    restarts: int
    """Number of restarts of the job's workers before."""


class Results(dict[int, Any]):
    """
    Results of the workers of this node: {global rank: return value}.

    It equals the dictionary that torch's ``elastic_launch`` returns. `places` holds the node, host and
    round of each worker. A notebook shows it as a table.
    """

    def __init__(self, values: Mapping[int, Any] | None = None, places: Mapping[int, Place] | None = None) -> None:
        super().__init__({} if values is None else values)
        self.places: dict[int, Place] = dict(places or {})

    def rank(self, rank: int) -> Any:
        """Return the result of the worker of global *rank*. Raises a `KeyError` that names the known ranks."""
        if rank in self:
            return self[rank]
        there = ranks_text(self) if self else "none"
        raise KeyError(f"rank {rank!r} has no result on this node (results here: {there})")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.places)

    def _repr_html_(self) -> str:
        """Return a table with a row for each rank; results with the same keys get a column for each key."""
        ranks = sorted(self)[:_MOST_ROWS]
        hosts = {place.host for place in self.places.values()}
        shows_places = len(hosts) > 1
        names = _columns([self[rank] for rank in ranks])
        head = ["rank"]
        if shows_places:
            head += ["node", "host"]
        rows = [_row("th", [*head, *(names or ["result"])])]
        for rank in ranks:
            cells = [str(rank)]
            if shows_places:
                cells += self._place_cells(rank)
            rows.append(_row("td", [*cells, *_result_cells(self[rank], names)]))

        more = ""
        if len(self) > _MOST_ROWS:
            more = f"<p>... {len(self) - _MOST_ROWS} more ranks</p>"
        return f"<table>{''.join(rows)}</table>{more}"

    def _place_cells(self, rank: int) -> list[str]:
        place = self.places.get(rank)
        return ["", ""] if place is None else [str(place.node), place.host]


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _result_cells(value: Any, names: list[str]) -> list[str]:
    if not names:
        return [_shown(value)]
    return [_shown(value[name]) for name in names]


def _columns(values: list[Any]) -> list[str]:
    """Return the common keys of *values* if all are dictionaries with the same few text keys, else []."""
    if not values or not all(map(_has_few_keys, values)):
        return []
    names = list(values[0])
    are_texts = all(isinstance(name, str) for name in names)
    are_alike = all(value.keys() == values[0].keys() for value in values)
    return names if are_texts and are_alike else []


def _has_few_keys(value: Any) -> bool:
    return type(value) is dict and 0 < len(value) <= _MOST_COLUMNS


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
