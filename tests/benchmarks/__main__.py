"""``python -m tests.benchmarks``: run the rooms in turns and print the table."""

from __future__ import annotations

import argparse
import compileall
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.calls import CALLS, TRAININGS
from tests.benchmarks.commands import COMMANDS
from tests.benchmarks.figures import Benchmark, Line, Turn, compare
from tests.benchmarks.first_steps import FIRST_STEPS
from tests.benchmarks.forming import FORMING
from tests.benchmarks.handlers import HANDLERS
from tests.benchmarks.job import ROOT, BenchmarkError
from tests.benchmarks.kills import KILLS
from tests.benchmarks.launchers import LAUNCHERS, Launcher
from tests.benchmarks.life import LIFE
from tests.benchmarks.logs import LOGS
from tests.benchmarks.lost_node import LOST_NODE
from tests.benchmarks.nodes_start import NODES_START
from tests.benchmarks.peers_told import PEERS_STOPPED
from tests.benchmarks.pools import POOLS
from tests.benchmarks.raised import RAISED
from tests.benchmarks.recoveries import RECOVERIES
from tests.benchmarks.replaced_pod import REPLACED_POD
from tests.benchmarks.restart import RESTART
from tests.benchmarks.slurm_start import SLURM_START
from tests.benchmarks.sockets import SOCKETS
from tests.benchmarks.terminals import TERMINALS
from tests.docs import marked

BENCHMARKS = (
    *(RECOVERIES, RESTART, LIFE, CALLS, KILLS, LOGS, SOCKETS, COMMANDS, *FORMING, LOST_NODE, PEERS_STOPPED, RAISED),
    *(*NODES_START, SLURM_START, REPLACED_POD, *HANDLERS, *FIRST_STEPS, TRAININGS, POOLS, TERMINALS),
)


def in_turns(
    benchmark: Benchmark, pair: tuple[Launcher, Launcher], turns: list[Turn], show: Callable[[str], object]
) -> tuple[Line, ...]:
    """Run *benchmark* for both launchers, one after the other, *turns* times. Raises `BenchmarkError`."""
    results: tuple[list[object], list[object]] = ([], [])
    for turn in turns:
        for launcher, found in zip(pair, results, strict=True):
            show(f"{benchmark.name}, turn {turn.number + 1} of {len(turns)}: {launcher.name}")
            found.append(benchmark.run(launcher, turn))
    return tuple(compare(figure, *results) for figure in benchmark.figures)


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(","))


def main() -> int:
    """The promises measured: 0 when every goal that was measured is reached, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=main.__doc__)
    parser.add_argument("--pairs", type=int, help="turns of both launchers (3; 1 with --quick)")
    parser.add_argument(
        "--only", type=_numbers, help="numbers of promises, such as 2,3,8; all, and the rest, if not given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single value to FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace the table in this page")
    parser.add_argument("--quick", action="store_true", help="less of what is done many times over")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (0)")
    parser.add_argument(
        "--launchers",
        nargs=2,
        choices=list(LAUNCHERS),
        default=("elasticlib", "torchrun"),
        help="the pair; the same one twice shows how far chance goes on this machine",
    )
    parser.add_argument(
        "--peer-python", metavar="PYTHON", help="whose torchrun is measured; it needs attrs and a torch of its own"
    )
    options = parser.parse_args()
    compileall.compile_dir(ROOT / "elasticlib", quiet=1)  # as pip does where it installs, torch's included
    if options.peer_python:
        LAUNCHERS["torchrun"] = LAUNCHERS["torchrun"].under(options.peer_python)
    pairs = options.pairs or (1 if options.quick else 3)
    turns = [Turn(number, options.seed * 1000 + number, options.quick) for number in range(pairs)]
    pair = (LAUNCHERS[options.launchers[0]], LAUNCHERS[options.launchers[1]])
    lines: list[Line] = []
    failures: list[str] = []
    for benchmark in BENCHMARKS:
        if options.only is not None and not benchmark.measures(options.only):
            continue
        try:
            found = in_turns(benchmark, pair, turns, lambda text: print(text, file=sys.stderr, flush=True))
        except BenchmarkError as error:
            failures.append(f"{benchmark.name}: {error}")
            continue
        lines.extend(line for line in found if options.only is None or line.figure.promise in options.only)
    run = report.Run((pair[0].name, pair[1].name), pairs, options.seed, options.quick, tuple(lines), tuple(failures))
    table = report.text(run)
    print("\n\nno figures: ".join([table, *failures]))
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(marked.replaced(page, {"figures": table}), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(run), indent=1) + "\n")
    return 0 if report.all_reached(lines) and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
