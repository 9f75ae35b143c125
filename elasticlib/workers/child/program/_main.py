"""
The caller's script as the ``__main__`` of a worker: imported under the name ``__mp_main__``, as
multiprocessing does.

Then the changes that the program has made since its own import are applied. The caller sends
variables that are plain data, and each that differs here is set. (Python:
``multiprocessing.spawn``)
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import math
import operator
import os
import sys
import types
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

NAMES = ("__main__", "__mp_main__")
"""The names of the module of a script: run, and imported by a worker."""


class Origin(NamedTuple):
    """The place that a script is imported from."""

    name: str | None
    """Name of its module, if the program is ``python -m name``; else None."""
    file: str


class Withheld(NamedTuple):
    """Stand-in for a part of a variable that cannot be sent."""

    kind: str
    """Qualified name of its type."""


_ABOVE = "above `if __name__ == '__main__':`"


CHANGED = Withheld("")
"""Stand-in for a variable that the program has certainly set: no value of the import equals it."""


class IfAbsent(NamedTuple):
    """A variable that the program has not changed, for imports that do not define it."""

    value: Any


class Incomplete(NamedTuple):
    """
    A variable that the script defines too, and that cannot be sent.

    It only serves to check whether both are equal.
    """

    value: Any
    """The value with `Withheld` in the place of parts that cannot be sent."""
    reason: str


class _State:
    """State of this process."""

    module: types.ModuleType | None = None
    """The imported script."""
    before: types.ModuleType | None = None
    """The ``__main__`` of functions that are sent by value."""
    spec: ModuleSpec | None = None
    """The module's own specification."""
    origin: Origin | None = None
    version: tuple[int, int] = (0, 0)
    is_importing = False


_state = _State()


def is_imported(module: types.ModuleType) -> bool:
    """Return True if *module*, this process's ``__main__``, was imported and not run."""
    return module is _state.module


def imported_origin() -> Origin | None:
    """Return the place from which this process's ``__main__`` was imported; None if it was not."""
    return _state.origin


def is_importing() -> bool:
    """Return True while the script is being imported."""
    return _state.is_importing


def attribute(module: types.ModuleType, name: str) -> Any:
    """
    Return the object *name* of *module*, with dots for those in classes; None if it does not
    exist.
    """
    try:
        return operator.attrgetter(name)(module)
    except (AttributeError, TypeError):
        return None


def of_main(name: str) -> Any:
    """
    Return a function or class of ``__main__``, under any name with which either side has imported
    it.

    Pickles call this.
    """
    return operator.attrgetter(name)(sys.modules["__main__"])


def namespace() -> dict[str, Any]:
    """
    Return the variables of ``__main__``, which functions behind its guard share with the others.

    Pickles call this.
    """
    return sys.modules["__main__"].__dict__


def become(origin: Origin) -> None:
    """
    Make the script at *origin* the ``__main__``; an earlier import is kept while its file is
    unchanged.
    """
    facts = os.stat(origin.file)
    version = facts.st_mtime_ns, facts.st_size
    if sys.modules["__main__"] is not _state.module:
        _state.before = sys.modules["__main__"]
    if _state.module is not None and (_state.origin, _state.version) == (origin, version):
        sys.modules["__main__"] = sys.modules["__mp_main__"] = _state.module
        return

    main = types.ModuleType("__mp_main__")
    former = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        run_in(main.__dict__, origin)
    except BaseException:
        # Half of a script is of no use: the next call imports it again.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = former
        raise

    _state.module, _state.origin, _state.version, _state.spec = main, origin, version, main.__spec__


def leave() -> None:
    """
    Restore a ``__main__`` that is not an imported script, for a call whose functions are sent by
    value.
    """
    if _state.before is not None:
        sys.modules["__main__"] = sys.modules["__mp_main__"] = _state.before


def restore_spec() -> None:
    """Let processes that multiprocessing spawns from here import the script for themselves."""
    if _state.module is not None:
        _state.module.__spec__ = _state.spec


def forget() -> None:
    """Release the script, so that its objects end with the other references to them."""
    _state.module = _state.before = None


def run_in(variables: dict[str, Any], origin: Origin) -> None:
    """Run the script at *origin* in *variables*, as an import does."""
    _state.is_importing = True
    try:
        exec(_code_of(variables, origin), variables)
    finally:
        _state.is_importing = False


def _code_of(variables: dict[str, Any], origin: Origin) -> types.CodeType:
    """Return the script's code, and set in *variables* the names that Python sets in a module."""
    variables.update(__name__="__mp_main__", __builtins__=builtins, __file__=origin.file, __cached__=None)
    if origin.name is None:
        variables.update(__package__="", __loader__=None, __spec__=None)
        with io.open_code(origin.file) as file:
            return compile(file.read(), origin.file, "exec", dont_inherit=True)

    spec = importlib.util.find_spec(origin.name)
    loader: Any = None if spec is None else spec.loader
    if spec is None or loader is None:
        raise ImportError(f"module {origin.name} ({origin.file}) was not found", name=origin.name)

    variables.update(__package__=spec.parent, __loader__=loader, __spec__=spec, __cached__=spec.cached)
    code: types.CodeType = loader.get_code(spec.name)
    return code


def lay_over(variables: dict[str, Any], sent: Mapping[str, Any]) -> list[str]:
    """
    Set in *variables*, a script's own, those that its program has changed: all of *sent* that
    differ.

    So a call finds the values of its caller, not those that the call before has left.

    Return a warning for each that differs, and could not be sent.
    """
    warnings = []
    for name, value in sent.items():
        own = variables.get(name, _ABSENT)
        if isinstance(value, Incomplete):
            _check_is_there(name, own, value)
            if not same(own, value.value):
                warnings.append(
                    f"the global variable {name!r} was changed after the script's import, and differs in the workers: "
                    f"{value.reason}; change it {_ABOVE}, or pass it as an argument"
                )
        elif isinstance(value, IfAbsent):
            variables.setdefault(name, value.value)
        else:
            variables[name] = _updated(own, value)

    return warnings


def _check_is_there(name: str, own: Any, value: Incomplete) -> None:
    if own is _ABSENT:
        raise NameError(
            f"the global variable {name!r} does not exist in the workers: the import of the script does not define it, "
            f"and {value.reason}; define it {_ABOVE}, or in the function",
            name=name,
        )


def _updated(own: Any, other: Any) -> Any:
    """
    Return *own* with the content of *other* if it can hold that: all references to it see the
    change, too.
    """
    if same(own, other):
        return own
    if type(own) is not type(other):
        return other

    if type(own) is dict:
        parts = {key: _updated(own.get(key, _ABSENT), each) for key, each in other.items()}
        own.clear()
        own.update(parts)
        return own

    if type(own) is list:
        own[:] = [*map(_updated, own, other), *other[len(own) :]]
        return own

    if type(own) is set:
        own.clear()
        own.update(other)
        return own

    # A frozen one can be hashed, and is replaced as a whole.
    if is_namespace(own) and type(own).__hash__ is None:
        _updated(vars(own), vars(other))
        return own

    return other


_ABSENT = object()


def same(own: Any, other: Any) -> bool:
    """
    Return True if both are equal in value and type, throughout; False for values that cannot be
    compared.

    A tensor that the caller shares equals no other one: its memory counts, too.
    """
    try:
        return _same(own, other)
    except Exception:
        # Raised by an ``__eq__`` of the user's, or for a structure that holds itself.
        return False


def _same(own: Any, other: Any) -> bool:
    if own is other:
        return True

    kind = type(own)
    if isinstance(other, Withheld):
        return kind.__qualname__ == other.kind
    if kind is not type(other):
        return False
    if isinstance(own, float):
        return _same_floats(own, other)

    equals: Any = kind.__eq__
    if equals is object.__eq__:
        # Two objects of a kind without equality, such as models and sentinels, cannot be
        # distinguished.
        return True
    if isinstance(own, dict):
        return _same_dicts(own, other)
    if isinstance(own, (list, tuple)):
        return _same_sequences(own, other)
    if is_namespace(own):
        return _same_attributes(own, other)

    return _same_by_own_rule(own, other)


def _same_floats(own: float, other: float) -> bool:
    # NaN does not equal even itself, so it would count as changed.
    return own == other or (math.isnan(own) and math.isnan(other))


def _same_dicts(own: dict[Any, Any], other: dict[Any, Any]) -> bool:
    # Programs see the order, too.
    if list(own) != list(other):
        return False
    is_equal = all(_same(own[key], other[key]) for key in own)
    return is_equal and _same_attributes(own, other)


def _same_sequences(own: Any, other: Any) -> bool:
    if len(own) != len(other):
        return False
    return all(map(_same, own, other)) and _same_attributes(own, other)


def _same_by_own_rule(own: Any, other: Any) -> bool:
    equal = own == other
    if not hasattr(equal, "all"):
        return bool(equal)
    # Of arrays or tensors.
    if hasattr(other, "is_shared") and other.is_shared():
        return False
    if own.shape != other.shape or own.dtype != other.dtype:
        return False
    return bool(equal.all())


def _same_attributes(own: Any, other: Any) -> bool:
    return _same(getattr(own, "__dict__", None), getattr(other, "__dict__", None))


def is_namespace(value: Any) -> bool:
    """
    Return True if *value* equals another one of its kind exactly when their attributes are equal.
    """
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    if (kind.__module__, kind.__qualname__) == ("argparse", "Namespace"):
        return True
    return _is_dataclass_of_attributes(value)


def _is_dataclass_of_attributes(value: Any) -> bool:
    """
    Return True for most dataclasses: not for one with slots, or with the ``__eq__`` of another
    class.
    """
    kind = type(value)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.eq:
        return False
    return hasattr(value, "__dict__") and "__eq__" in vars(kind)
