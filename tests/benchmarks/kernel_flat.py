"""
One kernel for a long day: hundreds of launches, thousands of calls of a pool, and what it and its helpers hold then.

Rules of this file: all is read from ``/proc`` while no cell runs; processes are the kernel and those that it keeps for
the next launch or call, together by what their command lines name.
"""

from __future__ import annotations

import collections
import os
import time

from attrs import astuple, frozen

from tests.benchmarks import tree
from tests.benchmarks.kernel import Kernel, kernel

LAUNCHES = (50, 150, 300)
CALLS = (1000, 5000, 10_000)
GROWTH = 1.0
"""MiB that the processes of a kind may have more at the last look than at the first."""
SETTLED = 12.0
"""Seconds before a look: IPython's kernel lets go of the sockets of ended threads each 10 s."""
IMPORTS = """
import elasticlib
from tests.benchmarks.jobs.cells import nothing
"""


@frozen
class Resources:
    """Resources of the processes of one kind."""

    processes: int
    rss: float
    """MiB."""
    pss: float
    """MiB; a page that n processes share counts 1/n for each."""
    files: int
    threads: int


def _kind(command: str) -> str:
    return next((part.replace("_", " ") for part in ("reaper", "fork_server") if f"_{part}" in command), "workers")


def _megabytes(pid: int, name: str) -> float:
    lines = (tree.PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def resources_of(made: Kernel) -> dict[str, Resources]:
    """By kind of process."""
    kinds = collections.defaultdict(list)
    kinds["kernel"].append(made.pid)
    for pid, command in made.started().items():
        kinds[_kind(command)].append(pid)
    return {
        kind: Resources(
            len(pids),
            sum(_megabytes(pid, "Rss") for pid in pids),
            sum(_megabytes(pid, "Pss") for pid in pids),
            sum(len(os.listdir(tree.PROC / str(pid) / "fd")) for pid in pids),
            sum(len(os.listdir(tree.PROC / str(pid) / "task")) for pid in pids),
        )
        for kind, pids in kinds.items()
    }


def _looks(made: Kernel, what: str, code: str, counts: tuple[int, ...]) -> bool:
    """Run *code* until it has run each of *counts* times, and tell what is held then; whether that stays as it is."""
    found: list[dict[str, Resources]] = []
    done = 0
    for count in counts:
        made.run(f"for _ in range({count - done}):\n    {code}", limit=600).ok()
        done = count
        time.sleep(SETTLED)  # nobody tells when a clock of the kernel's own has rung
        found.append(resources_of(made))
    for kind in sorted(set().union(*found)):
        looks = [each.get(kind, Resources(0, 0, 0, 0, 0)) for each in found]
        print(
            f"{what} {', '.join(map(str, counts))}, {kind}: processes {_row(looks, 0)}, RSS {_row(looks, 1)} MiB, "
            f"PSS {_row(looks, 2)} MiB, descriptors {_row(looks, 3)}, threads {_row(looks, 4)}",
            flush=True,
        )
    return all(_is_flat(found[0][kind], found[-1].get(kind)) for kind in found[0])


def _row(looks: list[Resources], index: int) -> str:
    return ", ".join(f"{astuple(each)[index]:.4g}" for each in looks)


def _is_flat(first: Resources, last: Resources | None) -> bool:
    if last is None:
        return False
    counts = (last.processes, last.files, last.threads) == (first.processes, first.files, first.threads)
    return counts and last.rss - first.rss <= GROWTH


def flat() -> bool:
    """Return whether a kernel holds as much after many launches and pool calls as after the first."""
    with kernel(2) as made:
        made.run(IMPORTS).ok()
        launches = _looks(made, "launches of 2 workers", "elastic_launch(config, nothing)()", LAUNCHES)
        made.run("pool = elasticlib.pool(2)").ok()
        calls = _looks(made, "calls of a pool of 2", "pool.run(nothing)", CALLS)
        made.run("pool.close()").ok()
        return launches and calls
