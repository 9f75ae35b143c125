"""Fills ``sys.modules`` and the collector's lists with objects that answer no question, as programs and mocks do."""

from __future__ import annotations

import abc
import importlib.util
import io
import os
import sys
import types
from typing import Any, NoReturn


class LikeCffi:
    """Pretends to be a module, and bears no weak reference."""

    __slots__ = ()
    __class__ = types.ModuleType  # type: ignore[assignment]


class Mute:
    """Raises, whatever it is asked."""

    def _refuse(self, *_: Any) -> NoReturn:
        os.write(2, b"somebody asked an object that wants no questions\n")
        raise RuntimeError("no questions")

    __getattribute__ = __eq__ = __hash__ = __bool__ = __repr__ = _refuse  # type: ignore[assignment]


class MuteModule(types.ModuleType):
    """A module whose attributes are not for reading."""

    def __getattribute__(self, name: str) -> NoReturn:
        os.write(2, b"somebody asked a module that wants no questions\n")
        raise RuntimeError(name)


class NoHash(abc.ABCMeta):
    """Classes of it compare with a method of their own, and so have no hash."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __subclasscheck__(cls, other: type) -> bool:
        raise RuntimeError("no question about classes")


class OddFile(io.StringIO, metaclass=NoHash):  # type: ignore[misc]
    """A file whose class answers no question."""

    __hash__ = None  # type: ignore[assignment]


def lazy(name: str) -> types.ModuleType:
    """The standard library's *name*, which loads when it is asked for anything."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kept: list[object] = []


def fill(folder: str) -> None:
    """Put them all there, and leave something in a buffer."""
    table: Any = sys.modules
    table["like_cffi.lib"] = LikeCffi()
    table["mute"] = Mute()
    table["mute_module"] = MuteModule("mute_module")
    table["none"] = None
    table["text"] = "text"
    table["imaplib"] = lazy("imaplib")
    table[17] = types.ModuleType("seventeen")
    kept.extend([OddFile(), Mute()])
    file = open(f"{folder}/data", "w")
    file.write("data")
    kept.append(file)


if __name__ == "__main__":
    fill(sys.argv[1])
    print("done")
