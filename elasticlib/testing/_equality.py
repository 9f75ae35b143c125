"""
Equality of values that contain tensors, for `ElasticTestCase`, by ``torch.testing.assert_close``.

Rules of this file: torch is used only if the program has imported it. unittest compares values
that contain neither tensors nor floats.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__unittest = True


def is_near(*values: Any) -> bool:
    """Return whether one of *values* is or contains a tensor, float or complex number."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and any(_has_near(value, torch) for value in values)


def _has_near(value: Any, torch: Any) -> bool:
    if isinstance(value, (torch.Tensor, float, complex)):
        return True
    if isinstance(value, Mapping):
        return any(_has_near(each, torch) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_has_near(each, torch) for each in value)


def check(case: Any, first: Any, second: Any, msg: Any, options: Mapping[str, Any], at: str = "") -> None:
    """Raise ``AssertionError`` unless both are equal; *at* is their path in the compared values."""
    # Item by item, so that the error names the place of the difference.
    if _are_like_mappings(first, second) or _are_like_lists(first, second):
        for key, one, other in _pairs(first, second):
            check(case, one, other, msg, options, f"{at}[{key!r}]")
        return

    torch: Any = sys.modules["torch"]
    first, second = _alike(first, second, torch), _alike(second, first, torch)
    if _are_near_kinds(first, second, torch):
        _check_near(case, first, second, msg, options, at)
    elif at:
        case._plainly_equal(first, second, f"{msg or ''} (at {at})".strip())
    else:
        case._plainly_equal(first, second, msg)


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any, Any]]:
    keys = first if isinstance(first, Mapping) else range(len(first))
    for key in keys:
        yield key, first[key], second[key]


def _check_near(case: Any, first: Any, second: Any, msg: Any, options: Mapping[str, Any], at: str) -> None:
    torch: Any = sys.modules["torch"]
    are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)

    # A number has no dtype to compare.
    if not are_tensors:
        options = {**options, "check_dtype": False}
    try:
        torch.testing.assert_close(first, second, **options)
    except (AssertionError, TypeError) as error:
        # TypeError: a number was compared with a tensor of many elements.
        text = f"{error}\n(at {at})" if at else str(error)
        raise case.failureException(case._formatMessage(msg, text)) from None


def _are_like_mappings(first: Any, second: Any) -> bool:
    are_mappings = isinstance(first, Mapping) and isinstance(second, Mapping)
    return are_mappings and first.keys() == second.keys()


def _are_like_lists(first: Any, second: Any) -> bool:
    are_lists = isinstance(first, (list, tuple)) and isinstance(second, (list, tuple))
    return are_lists and type(first) is type(second) and len(first) == len(second)


def _are_near_kinds(first: Any, second: Any, torch: Any) -> bool:
    kinds = (torch.Tensor, numbers.Number)
    return isinstance(first, kinds) and isinstance(second, kinds)


def _alike(value: Any, other: Any, torch: Any) -> Any:
    """Return *value* converted for a comparison with *other*, which may be a tensor."""
    if isinstance(value, torch.Tensor):
        # Compare a tensor of one element with a number as a number.
        is_number = isinstance(other, numbers.Number) and value.numel() == 1
        return value.item() if is_number else value
    if not isinstance(other, torch.Tensor) or isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device)
    return value
