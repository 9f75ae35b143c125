"""Tables that a command writes into a page, between two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TABLE = re.compile(r"(<!-- made [^:\n]+: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def replaced(page: str, tables: Mapping[str, str]) -> str:
    """Return *page* with these tables, by the name in their mark; each needs one mark, and each mark a table."""
    marked = [name for _, name, _ in _TABLE.findall(page)]
    assert sorted(tables) == sorted(marked), f"tables: {sorted(tables)}; marks in the page: {sorted(marked)}"
    return _TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", page)
