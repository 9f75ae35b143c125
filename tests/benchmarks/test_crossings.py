"""Way of arguments and results: few functions, so that readers can follow (docs/architecture.md)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.benchmarks.crossings import BACK, DOWN, count, holds

PAGE = Path(__file__).resolve().parents[2] / "elasticlib/docs/architecture.md"


def test_a_text_is_seen_in_what_holds_it() -> None:
    assert holds([{"a": (b"x" + DOWN.encode(),)}], DOWN)
    assert not holds([{"a": (b"x" + DOWN.encode(),)}], BACK)


def test_arguments_and_results_pass_no_more_functions_than_page_states() -> None:
    down, back = map(int, re.findall(r"(\d+) functions of another module", PAGE.read_text(encoding="utf-8")))

    crossings = count()

    assert 0 < len(crossings["arguments down"]) <= down <= 18
    assert 0 < len(crossings["results back"]) <= back <= 12
