"""
Preemption: jobs of four nodes of a real Slurm, ended in each way in which a scheduler ends them; how many ranks save.

The campaign, beside torchrun: ``python -m tests.benchmarks.preempted --rounds 5 --launcher both``.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from tests.slurm._cluster import Cluster, Job, cluster, missing

NODES = 4
TRAINING = Path(__file__).parents[1] / "slurm" / "term_agree.py"
LIMIT = 300.0
"""Seconds for a job to begin, and to end: Slurm counts its time limit in minutes."""
_SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --wait=0 --kill-on-bad-exit=0 {launcher} --nnodes 4 --nproc-per-node 1 {own} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" {training} {passed_on}
"""
_PASSED_ON = """&
step=$!
trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1
while kill -0 $step 2>/dev/null; do wait $step; done
"""
"""End of a script that asks for a warning of its own (``--signal=B:USR1``)."""
LAUNCHERS = {"elasticlib": ("elasticrun", "--shutdown-timeout 25"), "torchrun": ("torchrun", "")}


@frozen
class Way:
    """One way in which a scheduler ends a job, once it trains."""

    end: Callable[[Job, random.Random], None]
    options: tuple[str, ...] = ()
    """Of sbatch."""
    is_long: bool = False
    """True if it takes minutes."""
    is_passed_on: bool = False
    """True if the signal is for the script, which sends SIGTERM to its tasks."""
    can_save: bool = True
    """True if Slurm leaves the tasks any time."""


def _send(times: int, signal: str = "TERM", *to: str) -> Callable[[Job, random.Random], None]:
    def end(job: Job, draw: random.Random) -> None:
        for _ in range(times):
            job.cancel(*to, f"--signal={signal}")
            time.sleep(draw.uniform(0.05, 1.5))

    return end


def _send_and_cancel(job: Job, draw: random.Random) -> None:
    _send(1)(job, draw)
    job.cancel()


def _warn_and_send(job: Job, draw: random.Random) -> None:
    _send(1, "USR1")(job, draw)
    _send(1)(job, draw)


def _wait(job: Job, draw: random.Random) -> None:
    """Slurm itself ends it."""


WAYS = {
    "cancelled": Way(lambda job, draw: job.cancel()),
    "TERM": Way(_send(1)),
    "TERM twice": Way(_send(2)),
    "TERM three times": Way(_send(3)),
    # To srun as well, which answers by SIGKILL to its tasks ("forcing job termination").
    "TERM twice, to srun too": Way(_send(2, "TERM", "--full"), can_save=False),
    "TERM, then cancelled": Way(_send_and_cancel),
    "USR1": Way(_send(1, "USR1")),
    "USR1, then TERM": Way(_warn_and_send),
    "B:USR1": Way(_send(1, "USR1", "--batch"), is_passed_on=True),
    "B:USR1 twice": Way(_send(2, "USR1", "--batch"), is_passed_on=True),
    "time limit": Way(_wait, ("--time=1",), is_long=True),
    # A warning comes up to a minute early, and must find the training at work.
    "time limit, USR1 before": Way(_wait, ("--time=3", "--signal=USR1@30"), is_long=True),
    "time limit, B:USR1 before": Way(_wait, ("--time=3", "--signal=B:USR1@30"), is_long=True, is_passed_on=True),
}


@frozen
class Outcome:
    """Result of one job."""

    saved: int
    """Ranks that saved."""
    state: str
    output: str


def preempt(slurm: Cluster, folder: Path, launcher: str, way: Way, draw: random.Random) -> Outcome:
    """Start a training on all nodes, end it in that *way*, and count the ranks that saved."""
    command, own = LAUNCHERS[launcher]
    script = folder / "job.sh"
    passed_on = _PASSED_ON if way.is_passed_on else ""
    script.write_text(_SCRIPT.format(launcher=command, own=own, training=TRAINING, passed_on=passed_on))
    job = slurm.submit(script, *way.options)
    job.wait_for_output(" trains", NODES, LIMIT)
    way.end(job, draw)
    state = job.ends(LIMIT)
    saved = set(re.findall(r"rank (\d+) saved", job.output))
    return Outcome(len(saved), state, job.output)


def main() -> int:
    """The campaign as a command: 0 when all ranks of elasticlib saved in every round where Slurm leaves them time."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.preempted", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="elasticlib")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if why := missing():
        parser.error(why)
    launchers = list(LAUNCHERS) if options.launcher == "both" else [options.launcher]
    draw, code = random.Random(options.seed), 0
    print(f"ranks of {NODES} that saved, in each round\n\n| ended by | {' | '.join(launchers)} |")
    print(f"|---|{'---|' * len(launchers)}", flush=True)
    with cluster(NODES) as slurm, tempfile.TemporaryDirectory() as folder:
        for name in options.way or WAYS:
            cells = []
            for launcher in launchers:
                rounds = []
                for number in range(1 if WAYS[name].is_long else options.rounds):
                    place = Path(folder, launcher, name, str(number))
                    place.mkdir(parents=True)
                    rounds.append(preempt(slurm, place, launcher, WAYS[name], draw))
                cells.append(", ".join(f"{each.saved}" for each in rounds))
                short = [each for each in rounds if each.saved < NODES and WAYS[name].can_save]
                if short and launcher == "elasticlib":
                    code = 1
                    print(short[0].output, file=sys.stderr, flush=True)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
