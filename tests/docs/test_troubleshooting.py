"""The page on troubleshooting names every class of errors."""

from __future__ import annotations

import pathlib
import re

from elasticlib import errors

PAGE = pathlib.Path(__file__).resolve().parents[2] / "elasticlib" / "docs" / "troubleshooting.md"


def test_the_page_names_each_error_class_and_its_built_in_base() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Classes of errors\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\|", section, re.MULTILINE)
    named = {name: set(re.findall(r"`(\w+)`", bases)) for name, bases in rows}

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ElasticError)]
    assert {
        kind.__name__: {base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"} for kind in kinds
    } == named
