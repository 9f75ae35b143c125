"""
The part of a call that cannot be pickled, found by names along the pickler's path to it.

Rules of this file: it searches only after pickling has failed, and copies nothing large. If it
does not find the part, it says so rather than name another.
"""

from __future__ import annotations

import itertools
import pickle
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from elasticlib.workers.captures._parts import CapturedCall, Part, Reduces, attributes, is_owner, named, parts_of

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_LONGEST = 200
"""Characters of a cause."""
_LONGEST_PLACE = 60
"""Characters of the place within a part."""


class _Nowhere:
    def write(self, data: object) -> int:
        return 0


class _Way(pickle._Pickler):
    """Pickles to nowhere, by Python's own code, and records its path."""

    def __init__(self, pickler: Any) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
        self.dispatch_table = pickler.dispatch_table
        self.reducer_override: Reduces = pickler.reducer_override
        self.links: list[Any] = []
        """Path from the pickled object to the part that is being pickled."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        # These have no parts, and can always be sent.
        if type(obj) in _PLAIN:
            return
        self.links.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.links.pop()


def refusal(
    call: CapturedCall, error: Exception, pickler: Any, dumps: Callable[[Any], object], *, is_of_script: bool = False
) -> str:
    """
    Return why *call* cannot be sent; *error* does not name the part.

    *pickler* is a fresh one of the kind that raised it, and *dumps* tries another such pickler.
    *is_of_script*: workers could import the program's script, if it had a guard.
    """
    name = named(call.function)
    links, cause = _way_to_failure(call, pickler)

    # Python's own pickler recurses less deep than the other one.
    if cause is None or isinstance(cause, RecursionError):
        cause = error
        found = _deep(call, links, pickler.reducer_override, dumps)
    else:
        found = _blamed(call, links, pickler.reducer_override)

    if found is None:
        return f"{name} cannot be sent to the workers: {_text(error, with_kind=True)}"

    part = found.part
    kind = type(part.value).__qualname__
    beside = _beside(name, found.owners)
    at = f"at {found.place}, " if found.place else ""
    instead = _way_out(part, is_of_script=is_of_script)
    return f"{part.name}, a {kind}, cannot be sent to the workers{beside}: {at}{_text(cause)}; {instead}"


def _beside(name: str, owners: Sequence[Any]) -> str:
    """
    Return the call with which a part is sent, if the part's name does not show it, and the
    *owners* between.
    """
    names = dict.fromkeys(map(named, owners))
    between = [each for each in names if each != name]
    if not between:
        return ""
    # The name of the part already has the last one.
    on_the_way = between[:-1]
    if not on_the_way:
        return f" with {name}"
    return f" with {name} (by way of {', '.join(on_the_way)})"


def _way_out(part: Part, *, is_of_script: bool) -> str:
    inside = "make it inside the function instead"
    if is_of_script and part.is_global:
        return f"put the launch behind `if __name__ == '__main__':`, so that workers import the script, or {inside}"
    return inside


def _way_to_failure(call: CapturedCall, pickler: Any) -> tuple[list[Any], Exception | None]:
    """
    Return the path on which pickling fails, and the reason; an empty path and None without a
    failure.
    """
    way = _Way(pickler)
    try:
        way.dump(call.sent)
    except Exception as error:
        # Its traceback would keep all pickled objects.
        return way.links, error.with_traceback(None)
    return [], None


def _text(error: Exception, *, with_kind: bool = False) -> str:
    kind = type(error).__name__
    text = f"{kind}: {error}" if with_kind else str(error) or kind
    return textwrap.shorten(text, _LONGEST, placeholder=" ...")


@frozen(eq=False)
class _Found:
    """A part that cannot be pickled."""

    part: Part
    place: str = ""
    """The place within it; empty if it adds nothing."""
    owners: Sequence[Any] = ()
    """The functions and classes on the path to it."""


def _blamed(call: CapturedCall, links: Sequence[Any], reduces: Reduces) -> _Found | None:
    """Return the part that fails: the last of *links* that has a name."""
    way = [call, *links[1:]]
    owners = [index for index, link in enumerate(way) if is_owner(link)]
    while owners:
        owner = owners[-1]
        behind = way[owner + 1 :]
        index, part = _first_part(behind, way[owner], reduces)
        if part is not None:
            passed = [way[each] for each in owners[1:]]
            return _Found(part, _place(behind[index:]), passed)
        owners.pop()

    return None


def _first_part(links: Sequence[Any], owner: Any, reduces: Reduces) -> tuple[int, Part | None]:
    """Return the first of *links* that is a part of *owner*, with its index."""
    parts = {id(part.value): part for part in parts_of(owner, reduces)}
    for index, link in enumerate(links):
        if id(link) in parts:
            return index, parts[id(link)]
    return -1, None


def _deep(call: CapturedCall, links: Sequence[Any], reduces: Reduces, dumps: Callable[[Any], object]) -> _Found | None:
    """Return the part that *dumps* cannot send alone: the one on the path, or an argument."""
    on_the_way = _blamed(call, links, reduces) if links else None
    if on_the_way is not None and not _can_be_sent(on_the_way.part, dumps):
        return _Found(on_the_way.part, owners=on_the_way.owners)
    for part in (*call.arguments(), *call.attributes()):
        if not _can_be_sent(part, dumps):
            return _Found(part)
    return None


def _can_be_sent(part: Part, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(part.value)
    except Exception:
        return False
    return True


def _place(links: Sequence[Any]) -> str:
    """
    Return the place of the last of *links* in the first one, in Python's notation.

    Empty if it adds nothing.
    """
    text = ""

    # An object whose attributes follow: the objects between them are its state, not a place of
    # their own.
    owner = None
    for before, link in itertools.pairwise(links):
        if isinstance(before, dict):
            text += _place_in_dict(before, link, owner)
            owner = None
        elif owner is not None:
            continue
        elif isinstance(before, (list, tuple)):
            text += f"[{_index_of(link, before)}]"
        else:
            owner = before

    return text if len(text) <= _LONGEST_PLACE else f"{text[:_LONGEST_PLACE]}..."


def _place_in_dict(items: dict[Any, Any], link: Any, owner: object) -> str:
    """Return the place of *link* in *items*, which may be the attributes of *owner*."""
    key = next((key for key, value in items.items() if value is link), None)
    # It is a key of the dictionary, not a value.
    if key is None:
        return ""
    if owner is None:
        return f"[{key!r}]"
    is_attribute = isinstance(key, str) and attributes(owner).get(key) is link
    return f".{key}" if is_attribute else ""


def _index_of(link: Any, items: Sequence[Any]) -> int | str:
    return next((index for index, value in enumerate(items) if value is link), "")
