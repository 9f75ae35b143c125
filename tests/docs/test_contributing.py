"""The page for contributors: its example of the simulator runs as it stands, and it names every fault that there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import elasticlib
from elasticlib.testing import _faults

HOUSE = Path(elasticlib.__file__).parent
PAGE = (HOUSE / "docs" / "contributing.md").read_text(encoding="utf-8")
MAP = (HOUSE / "docs" / "architecture.md").read_text(encoding="utf-8") + PAGE
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_its_example_of_the_simulator_runs_as_it_stands() -> None:
    (example,) = BLOCKS
    names: dict[str, Any] = {}
    exec(example, names)

    tests = [value for name, value in names.items() if name.startswith("test_")]

    assert 2 == len(tests)
    for test in tests:
        test()


def test_page_names_every_fault() -> None:
    assert [] == [kind.__name__ for kind in _faults.KINDS if f"`{kind.__name__}`" not in PAGE]


def test_each_package_stands_on_the_map() -> None:
    packages = {path.parent.name for path in HOUSE.glob("*/__init__.py")} - {"elastic", "launcher"}

    assert set() == {name for name in packages if not re.search(rf"\b{name}\b", MAP)}


def test_the_map_names_files_that_are_there() -> None:
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+_[a-z_0-9]+\.py)`", MAP))
    files = {path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py")}

    assert named
    assert set() == {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
