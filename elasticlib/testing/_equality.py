"""
Whether values with tensors in them are equal, for `ElasticTestCase`: as ``torch.testing.assert_close`` has it.

Rules of this file: torch is used where somebody has imported it; what holds no tensor and no float is unittest's.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__unittest = True


def is_near(*values: Any) -> bool:
    """Whether one of *values* is, or holds, something that is compared by its nearness."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and any(_has_near(value, torch) for value in values)


def _has_near(value: Any, torch: Any) -> bool:
    if isinstance(value, (torch.Tensor, float, complex)):
        return True
    if isinstance(value, Mapping):
        return any(_has_near(each, torch) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_has_near(each, torch) for each in value)


def check(case: Any, first: Any, second: Any, msg: Any, options: Mapping[str, Any], at: str = "") -> None:
    """Raise ``AssertionError`` unless both are equal; *at* is where they are in what is compared."""
    torch: Any = sys.modules["torch"]
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        first, second = _alike(first, second, torch), _alike(second, first, torch)
    elif isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        for key in first:
            check(case, first[key], second[key], msg, options, f"{at}[{key!r}]")
        return
    elif _are_lists(first, second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            check(case, one, other, msg, options, f"{at}[{index}]")
        return
    if isinstance(first, (torch.Tensor, numbers.Number)) and isinstance(second, (torch.Tensor, numbers.Number)):
        both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        try:
            torch.testing.assert_close(first, second, **(options if both else {**options, "check_dtype": False}))
        except (AssertionError, TypeError) as error:  # a TypeError: a number beside a tensor of many
            text = f"{error}\n(at {at})" if at else str(error)
            raise case.failureException(case._formatMessage(msg, text)) from None
        return
    case._plainly_equal(first, second, msg if not at else f"{msg or ''} (at {at})".strip())


def _are_lists(first: Any, second: Any) -> bool:
    both = isinstance(first, (list, tuple)) and isinstance(second, (list, tuple))
    return both and type(first) is type(second) and len(first) == len(second)


def _alike(value: Any, other: Any, torch: Any) -> Any:
    """*value*, a number or a list beside a tensor made one, or the tensor of one element beside a number that."""
    if isinstance(value, torch.Tensor):
        return value.item() if isinstance(other, numbers.Number) and value.numel() == 1 else value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device)
    return value
