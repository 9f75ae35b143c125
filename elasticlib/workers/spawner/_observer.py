"""
Which names Python code looks up in the environment, noted while the fork server imports.

``os.environ`` stays the object it is, its class gets noting methods for the time of the imports. Rules of this file:
a copy of the environment is no read, although it looks up every name; a name that the imports set before anybody
looked it up is none either; in doubt a name counts as read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from contextlib import contextmanager
from types import CodeType
from typing import Any

_Environ: type[Any] = type(os.environ)
_METHODS = ("__getitem__", "__setitem__", "__delitem__", "__iter__", "setdefault")
# They look up name after name for whoever goes through all of them.
_VIEWS = frozenset({ItemsView.__iter__.__code__, ValuesView.__iter__.__code__, ValuesView.__contains__.__code__})

_LOOKUP = re.compile(
    r"""(?:\bos\.environb?(?:\.(?:get|pop|setdefault)\s*\(|\s*\[)|\bos\.getenvb?\s*\()\s*b?(["'])(?P<name>\w+)\1"""
    r"""|(["'])(?P<sought>\w+)\3\s+(?:not\s+)?in\s+os\.environb?\b(?!\.)"""
)
_ANY_USE = re.compile(r"environ|getenv|exec|eval|__import__|importlib|runpy")


def names_in(source: str) -> set[str] | None:
    """What Python code that ran unobserved looks up, by its text; None where it may look up more than is plain."""
    lookups = list(_LOOKUP.finditer(source))
    rest = _LOOKUP.sub("", source)
    return None if _ANY_USE.search(rest) else {each["name"] or each["sought"] for each in lookups}


class Absences:
    """A finder behind all others: notes the names of modules, without a package, that nobody found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Note names in the block."""
        sys.meta_path.append(self)
        try:
            yield
        finally:
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """What Python asks a finder: this one never has an answer."""
        if path is None:
            self.names.add(name)


class Observer:
    """Collects reads and writes while `observing`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Looked up, or removed, which fails where they are absent."""
        self.defaults: dict[str, str] = {}
        """Set where absent before they were looked up otherwise, to these values."""
        self.written: set[str] = set()
        """Set before anybody looked them up."""
        self._observes = False
        self.copied = False
        """Whether somebody went through all of it."""
        self._ahead: Iterator[str] = iter(())
        """The names that a copy under way looks up next."""
        self._next: str | None = None
        self._held: set[str] = set()
        """Looked up by what is a copy if it goes on to the last name."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Note what is done with ``os.environ`` and ``os.environb`` in the block."""
        plain = {name: _Environ.__dict__[name] for name in _METHODS}
        noting = self._methods(plain)
        for name, method in noting.items():
            setattr(_Environ, name, method)
        self._observes = True
        try:
            yield
        finally:
            self._observes = False
            for name, method in noting.items():
                if _Environ.__dict__[name] is method:  # else an import put its own there, which calls ours
                    setattr(_Environ, name, plain[name])
            self._end_copy()

    def _methods(self, plain: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        get, put, remove, go_through, fill = (plain[name] for name in _METHODS)

        def look_up(environ: Any, key: Any) -> Any:
            if name := self._name(environ, key):
                self._looked_up(name, sys._getframe(1).f_code)
            return get(environ, key)

        def put_in(environ: Any, key: Any, value: Any) -> None:
            put(environ, key, value)
            if name := self._name(environ, key):
                self._set(name)

        def take_out(environ: Any, key: Any) -> None:
            if name := self._name(environ, key):
                self._end_copy()
                self._read(name)
            remove(environ, key)

        def walk(environ: Any) -> Any:
            if self._observes and environ._data is os.environ._data:  # type: ignore[attr-defined]
                self._begin_copy()
            return go_through(environ)

        def set_default(environ: Any, key: Any, value: Any) -> Any:
            if (name := self._name(environ, key)) and isinstance(value, type(key)):
                self._end_copy()
                if name not in self.names | self.written:
                    self.defaults.setdefault(name, os.fsdecode(value))
            return fill(environ, key, value)

        return dict(zip(_METHODS, (look_up, put_in, take_out, walk, set_default), strict=True))

    def _name(self, environ: Any, key: Any) -> str | None:
        """The name of a variable of this process; None for what is none of our business."""
        if not self._observes or environ._data is not os.environ._data:  # type: ignore[attr-defined]
            return None
        return os.fsdecode(key) if isinstance(key, (str, bytes)) else None

    def _read(self, name: str) -> None:
        # What the imports set themselves has the same value whatever it was before.
        if name not in self.written and name not in self.defaults:
            self.names.add(name)

    def _looked_up(self, name: str, by: CodeType) -> None:
        if by in _VIEWS:
            return
        if name == self._next:
            self._held.add(name)
            self._next = next(self._ahead, None)
            if self._next is None:
                self._held.clear()
            return
        self._end_copy()
        self._read(name)

    def _set(self, name: str) -> None:
        self._end_copy()
        if self.copied:
            self._read(name)  # who has a copy may have looked there whether it is set
        elif name not in self.names and name not in self.defaults:
            self.written.add(name)

    def _begin_copy(self) -> None:
        self._end_copy()
        self.copied = True
        self._ahead = iter([os.fsdecode(name) for name in os.environ._data])  # type: ignore[attr-defined]
        self._next = next(self._ahead, None)

    def _end_copy(self) -> None:
        held, self._held, self._next = self._held, set(), None
        for name in held:
            self._read(name)
