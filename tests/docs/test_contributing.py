"""The page for contributors: its example of the simulator runs as it stands, and it names every fault that there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import elasticlib
from elasticlib.testing import _faults

PAGE = (Path(elasticlib.__file__).parent / "docs" / "contributing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_its_example_of_the_simulator_runs_as_it_stands() -> None:
    (example,) = BLOCKS
    names: dict[str, Any] = {}
    exec(example, names)

    tests = [value for name, value in names.items() if name.startswith("test_")]

    assert 2 == len(tests)
    for test in tests:
        test()


def test_it_names_every_fault() -> None:
    assert [] == [kind.__name__ for kind in _faults.KINDS if f"`{kind.__name__}`" not in PAGE]
