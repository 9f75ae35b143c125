"""
The frames of an exception, with their local variables as text, for a debugger in another process.

Rules of this file: no code of the user's runs, and nothing is computed or copied from a device.
Objects that are not Python's own are shown by their class, tensors by their shape. Only the shown
part of a large value is read. A frame that cannot be described must not cause a failure.
"""

from __future__ import annotations

import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable
from itertools import islice
from json import dumps
from types import FrameType, TracebackType
from typing import Any

from elasticlib._clock import monotonic

_MOST_FRAMES = 60
_MOST_LOCALS = 60
_TIME = 0.5
"""Seconds after which no more variables are described."""
_PLAIN = (bool, float, complex, type(None))
_MOST_BITS = 4096
"""Bits of the largest integer that is shown: the text of a longer one takes long, or is refused."""


class _Text(reprlib.Repr):
    """Text of values of Python's own types."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 200, 200, 60

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x)
        describe = self._rule_of(kind)
        if describe is not None:
            return describe(x, level)
        if kind.__module__ == "torch" or kind.__module__.startswith("torch.nn.parameter"):
            return _tensor(x)
        if kind.__module__ == "numpy" and hasattr(x, "shape"):
            return f"<numpy.{kind.__name__} of shape {tuple(x.shape)}, {x.dtype}>"
        return _class_of(x)

    def _rule_of(self, kind: type) -> Callable[[Any, int], str] | None:
        """Return the function that describes Python's own *kind*; None for others."""
        if kind.__module__ != "builtins":
            return None
        if kind in _PLAIN:
            return lambda x, _: repr(x)
        return getattr(self, f"repr_{kind.__name__}", None)

    # reprlib's own methods sort all elements, by the user's comparisons, and find them by the
    # user's hashes.

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        shown = islice(x.items(), self.maxdict) if level > 0 else ()
        parts = []
        for key, value in [*shown]:
            parts.append(f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}")
        return self._in_braces(parts, len(x))

    def repr_set(self, x: Iterable[Any], level: int) -> str:
        every: Any = x
        if not len(every):
            return "set()"
        shown = islice(x, self.maxset) if level > 0 else ()
        parts = [self.repr1(each, level - 1) for each in [*shown]]
        return self._in_braces(parts, len(every))

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        content = self.repr_set(x, level) if x else ""
        return f"frozenset({content})"

    @staticmethod
    def _in_braces(parts: list[str], count: int) -> str:
        if len(parts) < count:
            parts = [*parts, "..."]
        return f"{{{', '.join(parts)}}}"

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        if bits > _MOST_BITS:
            return f"<int of {bits} bits>"
        return super().repr_int(x, level)

    def repr_range(self, x: range, level: int) -> str:
        numbers = [x.start, x.stop]
        if x.step != 1:
            numbers.append(x.step)
        parts = [self.repr_int(number, level) for number in numbers]
        return f"range({', '.join(parts)})"


def _class_of(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, type):
        # Not by isinstance, which also asks the object.
        return f"<class {value.__module__}.{value.__qualname__}>"
    return f"<{kind.__module__}.{kind.__qualname__}>"


def _tensor(value: Any) -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
    return f"<{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, {value.device}>"


def of(trace: TracebackType | None) -> str:
    """Return JSON of ``[[file, line, function, {variable: text}], ...]``, the innermost frame last."""
    text = _Text()
    until = monotonic() + _TIME
    found: list[Any] = []
    # In a deep stack the innermost frames show the failure.
    for frame, line in [*traceback.walk_tb(trace)][-_MOST_FRAMES:]:
        variables = _variables_of(frame, text, until)
        found.append([frame.f_code.co_filename, line, frame.f_code.co_name, variables])
    return dumps(found)


def _variables_of(frame: FrameType, text: _Text, until: float) -> dict[str, str]:
    """
    Return the variables of *frame* as text, as many as can be described before the time *until*.
    """
    variables: dict[str, str] = {}
    for name, value in [*islice(frame.f_locals.items(), _MOST_LOCALS)]:
        if monotonic() >= until:
            break
        is_of_module = name.startswith("__") and frame.f_locals is frame.f_globals
        if is_of_module:
            continue
        try:
            variables[name] = text.repr(value)
        except Exception as error:
            variables[name] = f"<repr() failed: {type(error).__name__}>"

    return variables
