"""
Attributes that make an attrs class work with the functions of `dataclasses`.

torch's specifications and results are dataclasses, and programs copy and print them with these
functions.

Rules of this file: the attributes are made from the attrs fields at their first use. They do not
change the class itself. No private name of `dataclasses` is used.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import attrs


@functools.lru_cache(maxsize=64)
def _model(kind: type[attrs.AttrsInstance]) -> Any:
    """Return a dataclass with the fields of *kind*."""
    return dataclasses.make_dataclass(
        kind.__name__,
        [(each.name, each.type or Any, _field(each)) for each in attrs.fields(kind)],
        init=False,
        repr=False,
        eq=False,
    )


def _field(each: attrs.Attribute[Any]) -> Any:
    default: dict[str, Any] = {}
    given: Any = each.default
    if isinstance(given, attrs.Factory):  # type: ignore[arg-type]
        default["default_factory"] = given.factory
    elif given is not attrs.NOTHING:
        default["default"] = given
    return dataclasses.field(
        init=each.init, repr=bool(each.repr), hash=each.hash, compare=bool(each.eq), kw_only=each.kw_only, **default
    )


class _OfModel:
    """Class attribute with the model's value; missing if the class has no attrs fields."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        # `dataclasses.is_dataclass` must return False for the base class itself.
        if not attrs.has(owner):
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")
        return getattr(_model(owner), self._name)


class DataclassView:
    """
    Base of attrs classes for which the functions of `dataclasses` work.

    They are ``fields``, ``asdict``, ``astuple``, ``replace`` and ``is_dataclass``. A copy made by
    ``replace`` is checked like any new object. A subclass may be a plain dataclass with more
    fields. It sets one field after the other, and each is checked before the later ones are set.
    Defaults of fields must not need the object.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:
        __dataclass_fields__ = _OfModel()
        __dataclass_params__ = _OfModel()

    def __post_init__(self) -> None:
        """Call the hook of attrs; a dataclass that is a subclass calls this method instead."""
        if (hook := getattr(self, "__attrs_post_init__", None)) is not None:
            hook()
