"""The table of a run, as text and as JSON, with the machine it was run on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence

from attrs import frozen

from tests.benchmarks.figures import Line

_HEAD = ("promise", "measure", "unit", "first", "second", "ratio", "goal", "reached")
_VERDICTS = {True: "yes", False: "NO", None: ""}


@frozen
class Run:
    """All that was measured in one run of the command."""

    names: tuple[str, str]
    """The launchers, in the order of the turns."""
    pairs: int
    seed: int
    quick: bool
    lines: tuple[Line, ...]
    failures: tuple[str, ...]
    """Benchmarks that yielded no figures, and why."""


def machine() -> dict[str, str | int]:
    """Return the facts about the machine and the versions on which the figures depend."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": pages // 2**20,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value):
        return f"{int(value)}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _row(line: Line) -> tuple[str, ...]:
    figure = line.figure
    return (
        "" if figure.promise is None else str(figure.promise),
        figure.label,
        figure.unit,
        _number(line.our_value),
        _number(line.their_value),
        "" if line.ratio is None else f"{line.ratio:.3f}x",
        " and ".join(str(goal) for goal in figure.goals),
        _VERDICTS[line.reached],
    )


def text(run: Run) -> str:
    """A table in Markdown that also reads well as it is."""
    facts = machine()
    head = [*_HEAD[:3], *run.names, *_HEAD[5:]]
    rows = [tuple(head), *(_row(line) for line in run.lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    title = (
        f"{facts['date']}: {facts['system']}, {facts['cpus']} CPUs, {facts['memory_mib']} MiB, "
        f"Python {facts['python']}, torch {facts['torch']}; {run.pairs} pairs, seed {run.seed}"
        f"{', quick' if run.quick else ''}"
    )
    return "\n".join([title, "", *texts])


def document(run: Run) -> dict[str, object]:
    """Everything, every single value too, ready for `json.dump`."""
    figures = [
        {
            "promise": line.figure.promise,
            "label": line.figure.label,
            "unit": line.figure.unit,
            "goal": [str(goal) for goal in line.figure.goals],
            "values": [list(line.ours), list(line.theirs)],
            "folded": [line.our_value, line.their_value],
            "ratio": line.ratio,
            "reached": line.reached,
        }
        for line in run.lines
    ]
    return {
        "v": 1,
        "machine": machine(),
        "launchers": list(run.names),
        "pairs": run.pairs,
        "seed": run.seed,
        "quick": run.quick,
        "figures": figures,
        "failures": list(run.failures),
    }


def all_reached(lines: Sequence[Line]) -> bool:
    """Return whether no goal was missed."""
    return all(line.reached is not False for line in lines)
