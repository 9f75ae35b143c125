"""``python -m tests.matrix``: run every row that can be run here and print the table."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.matrix.rows import ROWS, run, table


def main() -> int:
    """The tests on every supported Python and torch: 0 when all rows that can be run here are good, 1 when not."""
    names = [row.name for row in ROWS]
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "elasticlib-matrix")
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--cache", type=Path, default=cached, help=f"where environments and logs are kept ({cached})")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, end="\n" if text else "", file=sys.stderr, flush=True)

    outcomes = [run(row, options.cache.resolve(), say) for row in ROWS if row.name in options.only]
    print(table(outcomes))
    return 1 if any(each.is_bad for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
