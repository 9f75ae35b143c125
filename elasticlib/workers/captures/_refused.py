"""
What of a call cannot be pickled: the way on which a pickler comes to it, told by names.

Rules of this file: it looks only after pickling has failed, and copies nothing that is large; where it does not find
the part, it says so rather than name another.
"""

from __future__ import annotations

import pickle
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from elasticlib.workers.captures._parts import Call, Part, Reduces, attributes, is_owner, named, parts_of

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_LONGEST = 200
"""Characters of a cause."""
_LONGEST_PLACE = 60
"""Characters of the place within a part."""


class _Nowhere:
    def write(self, data: object) -> int:
        return 0


class _Way(pickle._Pickler):
    """Pickles to nowhere, by Python's own code, and knows on which way it is."""

    def __init__(self, pickler: Any) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
        self.dispatch_table = pickler.dispatch_table
        self.reducer_override: Reduces = pickler.reducer_override
        self.links: list[Any] = []
        """From what is pickled to what is pickled of it at the moment."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if type(obj) in _PLAIN:
            return
        self.links.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.links.pop()


def refusal(
    call: Call, error: Exception, pickler: Any, dumps: Callable[[Any], object], *, is_of_script: bool = False
) -> str:
    """
    Why *call* cannot be sent, which *error* says without a name.

    *pickler* is a fresh one of the kind that raised it, *dumps* tries another one of that kind. *is_of_script*: workers
    could import the program's script, if it had a guard.
    """
    name = named(call.function)
    links, cause = _way_to_failure(call, pickler)
    if cause is None or isinstance(cause, RecursionError):  # Python's own pickler goes less deep than the other one
        cause = error
        found_part = _deep(call, links, pickler.reducer_override, dumps)
    else:
        found_part = _blamed(call, links, pickler.reducer_override)
    if found_part is None:
        return f"{name} cannot be sent to the workers: {_text(error, with_kind=True)}"
    part, place = found_part.part, found_part.place
    between = [each for each in dict.fromkeys(map(named, found_part.owners)) if each != name]
    beside = f" with {name}" if between else ""
    if between[:-1]:
        beside += f" (by way of {', '.join(between[:-1])})"
    at = f"at {place}, " if place else ""
    instead = "make it inside the function instead"
    if is_of_script and part.is_global:
        instead = f"put the launch behind `if __name__ == '__main__':`, so that workers import the script, or {instead}"
    kind = type(part.value).__qualname__
    return f"{part.name}, a {kind}, cannot be sent to the workers{beside}: {at}{_text(cause)}; {instead}"


def _way_to_failure(call: Call, pickler: Any) -> tuple[list[Any], Exception | None]:
    """On which way pickling fails, and why; without its traceback, which would keep all that was pickled."""
    way = _Way(pickler)
    try:
        way.dump(call.sent)
    except Exception as error:
        return way.links, error.with_traceback(None)
    return [], None


def _text(error: Exception, *, with_kind: bool = False) -> str:
    text = f"{type(error).__name__}: {error}" if with_kind else str(error) or type(error).__name__
    return textwrap.shorten(text, _LONGEST, placeholder=" ...")


@frozen(eq=False)
class _Found:
    """A part that cannot be pickled."""

    part: Part
    place: str = ""
    """The place within it; empty where that says nothing."""
    owners: Sequence[Any] = ()
    """The functions and classes on the way to it."""


def _blamed(call: Call, links: Sequence[Any], reduces: Reduces) -> _Found | None:
    """The last of *links* that has a name."""
    way = [call, *links[1:]]
    owners = [index for index, link in enumerate(way) if is_owner(link)]
    while owners:
        first = owners[-1]
        behind = way[first + 1 :]
        parts = {id(part.value): part for part in parts_of(way[first], reduces)}
        for index, link in enumerate(behind):
            if id(link) in parts:
                return _Found(parts[id(link)], _place(behind[index:]), [way[each] for each in owners[1:]])
        owners.pop()
    return None


def _deep(call: Call, links: Sequence[Any], reduces: Reduces, dumps: Callable[[Any], object]) -> _Found | None:
    """The part on the way to *links* or among the arguments that is not pickled by itself either."""
    found = _blamed(call, links, reduces) if links else None
    candidates = [found.part] if found is not None else []
    for part in (*candidates, *call.arguments(), *call.attributes()):
        try:
            dumps(part.value)
        except Exception:
            is_on_the_way = found is not None and part.value is found.part.value
            return _Found(part, owners=found.owners if found is not None and is_on_the_way else ())
    return None


def _place(links: Sequence[Any]) -> str:
    """Where the last of *links* is in the first one, as Python would write it; empty where that says nothing."""
    text, owner, before = "", None, links[0]
    for link in links[1:]:
        if isinstance(before, dict):
            key = next((key for key, value in before.items() if value is link), None)
            if owner is not None and isinstance(key, str) and attributes(owner).get(key) is link:
                text += f".{key}"
            elif key is not None and owner is None:
                text += f"[{key!r}]"
            owner = None
        elif isinstance(before, (list, tuple)) and owner is None:
            text += f"[{next((index for index, value in enumerate(before) if value is link), '')}]"
        elif owner is None:
            owner = before
        before = link
    return text if len(text) <= _LONGEST_PLACE else f"{text[:_LONGEST_PLACE]}..."
