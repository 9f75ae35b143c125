"""Whether stacks of a worker show that its function is over, while the call of it is not."""

from __future__ import annotations

import faulthandler
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib.workers.child._showing import call_function, has_returned


def works(dump: Callable[[], None]) -> None:
    dump()


def has_a_local(dump: Callable[[], None]) -> int:
    """Return; the destructor of a local variable is native code, which *dump* stands for."""
    local: Any = type("Local", (), {"__del__": staticmethod(dump)})()
    return id(local)


def has_a_local_of_python(dump: Callable[[], None]) -> int:
    local: Any = type("Local", (), {"__del__": lambda _: dump()})()
    return id(local)


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="its faulthandler crashes at frames that are cleared")
@pytest.mark.parametrize(
    ("function", "over"),
    [(has_a_local, True), (has_a_local_of_python, False), (works, False), (None, False)],
    ids=["native destructor", "destructor", "at work", "compiled"],
)
def test_a_function_is_over_while_native_destructors_of_its_locals_run(
    function: Callable[..., object] | None, over: bool, tmp_path: Path
) -> None:
    """Not so while any frame of the program is left, nor where the function is compiled and has none."""
    with open(tmp_path / "stacks", "w+") as file:
        dump = functools.partial(faulthandler.dump_traceback, file)
        call_function(dump if function is None else functools.partial(function, dump))
        file.seek(0)
        stacks = file.read()

    assert "in call_function" in stacks
    assert over == has_returned(stacks)
