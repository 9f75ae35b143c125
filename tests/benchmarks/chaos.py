"""
Chaos: in each act one process of a job is killed, stopped or paused at a random moment, and the job's end is judged.

    python -m tests.benchmarks.chaos --acts 500 --seed 0            every process x kill, stop, pause x every phase
    python -m tests.benchmarks.chaos --acts 200 --seed 0 --asleep   the whole job is stopped, starved, or imports long

An act is bad when a process is left over, the job does not end within `LIMIT`, it spends more than one restart, it ends
otherwise than it should, or what it says of a restart or failure does not name the process that was hit. What workers
of one node have detached must live after success, and may not after anything else, unless the launcher is killed when
they are done. With ``--asleep`` an act is bad when anything is replaced at all. One line an act, then a summary; the
exit status is 1 for a bad act.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen

from tests.benchmarks import asleep, journal, tree
from tests.benchmarks.job import JOBS, Job, new_folder, started

LIMIT = 75.0
"""Seconds after an act within which its job must have ended."""
LEFT = 8.0
"""Seconds after a job's end within which all its processes must be gone."""
_PAUSE = 1.5
_UP = 60.0
_GIVE_UP = 2.0
"""Seconds after which whoever stopped a worker or the launcher for good ends the job."""

CHAIN = ("reaper", "fork server", "spawner", "worker", "store")
PARTS = {
    "one node": ("launcher", *CHAIN),
    "endpoint": ("launcher", "sidecar", "spawner"),
    "two nodes": ("launcher", "other launcher", "sidecar", "other sidecar", *CHAIN[1:]),
    "pool": ("launcher", *CHAIN),
}
"""
Processes that can be hit in each kind of job.

With an endpoint, one node has a sidecar, too, which hosts the store and coordinates. Of two nodes,
the first node's sidecar does so.
"""
HOWS = ("kill", "stop", "pause")
PHASES = ("start", "training", "end")
_PHASE_MARKS = {"training": "up", "end": "ending"}
"""Marks that workers write at a phase, where they wait until the process to be hit is found."""
_PHASE_SECONDS = {"training": 1.0, "end": 0.3}
"""About how long a phase lasts from then on; the act comes within it."""


@frozen
class Act:
    """Action on one process of a job, with its phase and moment."""

    kind: str
    part: str
    how: str
    phase: str
    moment: float
    """Within the phase, from 0 to 1."""

    def __str__(self) -> str:
        return f"{self.kind:9} {self.part:14} {self.how:5} {self.phase:8} {self.moment:.2f}"


@frozen
class Outcome:
    """Result of an act."""

    act: Act
    complaint: str
    """Description of the fault; empty if there is none."""
    note: str
    seconds: float
    text: str = ""
    """Output of the job."""

    @property
    def missed(self) -> bool:
        """Return whether the process did not exist any more, or not yet."""
        return self.note == "missed"


def acts(count: int, seed: int, kinds: Sequence[str] = tuple(PARTS), parts: Sequence[str] = ()) -> list[Act]:
    """*count* acts in the order of *seed*: each combination once before any comes again."""
    draw = random.Random(seed)
    every = [
        (kind, part, how, phase)
        for kind in kinds
        for part, how, phase in itertools.product(PARTS[kind], HOWS, PHASES)
        if not parts or part in parts
    ]
    found: list[Act] = []
    while len(found) < count:
        draw.shuffle(every)
        found += [Act(*each, draw.random()) for each in every]
    return found[:count]


# Who is who.


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(each) for path in lists for each in path.read_text().split()]
    return []


def _named(pids: Sequence[int], text: str) -> list[int]:
    return [pid for pid in pids if text in tree.command(pid)]


def find(part: str, launchers: Sequence[int], workers: dict[int, int]) -> int | None:
    """The process that plays *part*, None when it is not there; *workers* are those that have come up, by rank."""
    first, other = launchers[0], launchers[-1]
    if part.endswith("launcher"):
        return other if part.startswith("other") else first
    if part.endswith("sidecar"):
        found = _named(_children(other if part.startswith("other") else first), "rendezvous.sidecar")
        return found[0] if found else None
    chain = _named(_children(other), "_reaper.py")
    if part != "reaper":
        chain = _named([child for pid in chain for child in _children(pid)], "_fork_server")
        chain = [pid for pid in chain if "_reaper.py" not in tree.command(pid)]
    if part in ("spawner", "worker", "store"):
        chain = [child for pid in chain for child in _children(pid)]
    if part == "worker":
        chain = [child for pid in chain for child in _children(pid) if child in workers.values()]
    if part == "store":
        spawners = chain if len(launchers) == 1 else [p for one in launchers for p in _spawners(one)]
        chain = [child for pid in spawners for child in _named(_children(pid), "_fork_server")]
        chain = [pid for pid in chain if pid not in workers.values() and os.getsid(pid) == pid]
    return chain[0] if chain else None


def _spawners(launcher: int) -> list[int]:
    chain = [child for pid in _named(_children(launcher), "_reaper.py") for child in _children(pid)]
    return [child for pid in chain for child in _children(pid)]


def _workers(folder: Path) -> dict[int, int]:
    found = {}
    for path in folder.glob("worker.*"):
        with contextlib.suppress(ValueError):
            found[int(path.name.rpartition(".")[2])] = int(path.read_text())
    return found


def _detached(folder: Path) -> set[int]:
    """Return the pids of the processes that the workers of the last round detached."""
    names = [path.name.split(".") for path in folder.glob("detached.*")]
    last = max((int(attempt) for _, attempt, _ in names), default=0)
    return {int((folder / ".".join(name)).read_text()) for name in names if int(name[1]) == last}


# One act.


def _command(act: Act, endpoint: str) -> list[list[str]]:
    """The command line of each launcher."""
    arguments = ["store"] if act.part == "store" else []
    if act.kind == "pool":
        return [[sys.executable, str(JOBS / "chaos_pool.py"), *arguments]]
    plain = [sys.executable, "-m", "elasticlib.run", "--max-restarts=1", "--shutdown-timeout=4"]
    plain += ["--preload", "torch" if arguments else ""]
    script = [str(JOBS / "chaos_worker.py"), *arguments]
    if act.kind == "one node":
        return [[*plain, "--nproc-per-node=2", *script, "detaches"]]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=chaos"]
    if act.kind == "endpoint":
        return [[*plain, *meeting, "--nproc-per-node=2", *script]]
    nodes = ["--nnodes=1:2", *meeting]
    conf = "last_call_timeout=3,reconnect_timeout=10,is_host={}"
    return [
        [*plain, *nodes, "--rdzv-conf", conf.format(host), "--nproc-per-node=1", *script] for host in ("true", "false")
    ]


@contextlib.contextmanager
def _both(
    commands: Sequence[Sequence[str]], variables: dict[str, str]
) -> Iterator[tuple[Job, list[subprocess.Popen[bytes]]]]:
    with started(commands[0], variables=variables) as job, contextlib.ExitStack() as stack:
        launchers = [job.process]
        for command in commands[1:]:
            errors = stack.enter_context(open(job.folder / "stderr2", "wb"))
            own = {**os.environ, **_own(job.folder), **variables}
            launchers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=own,
                    start_new_session=True,
                )
            )
        try:
            yield job, launchers
        finally:
            for each in launchers[1:]:
                each.kill()
                each.wait()


def _own(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {journal.FOLDER: str(folder), "TMPDIR": str(folder), "PYTHONPATH": root}


def _await(condition: object, limit: float, launchers: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Return whether *condition* becomes true before *limit* seconds pass or a launcher ends."""
    deadline = time.monotonic() + limit
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline or any(each.poll() is not None for each in launchers):
            return bool(condition())
        time.sleep(0.005)
    return True


def _hit(act: Act, pid: int) -> None:
    os.kill(pid, signal.SIGKILL if act.how == "kill" else signal.SIGSTOP)
    if act.how == "pause":
        time.sleep(_PAUSE)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def perform(act: Act, up: float) -> Outcome:
    """Perform *act* on a job of its own, whose workers come up after *up* seconds if nothing happens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    variables = {"ELASTICLIB_CACHE": "", "OMP_NUM_THREADS": "1", journal.HOLD: act.phase}
    with _both(_command(act, endpoint), variables) as (job, launchers):
        pids = [each.pid for each in launchers]
        if act.phase in _PHASE_MARKS:
            name = _PHASE_MARKS[act.phase]
            _await(lambda: any(each.what == name for each in job.marks()), _UP, launchers)
        else:
            time.sleep(up * act.moment)
        target: list[int] = []

        def found() -> bool:
            workers = _workers(job.folder)
            # Before the workers have come up one of them looks like the store.
            pid = find(act.part, pids, workers) if act.part != "store" or len(workers) == 2 else None
            target[:] = [] if pid is None else [pid]
            return bool(target)

        if not _await(found, _UP, launchers):
            return Outcome(act, "", "missed", time.monotonic() - began)
        rank = next((rank for rank, pid in _workers(job.folder).items() if pid == target[0]), -1)
        known = frozenset().union(*(tree.of_job(each.pid, job.folder) for each in launchers if each.poll() is None))
        (job.folder / journal.AIMED).touch()
        time.sleep(_PHASE_SECONDS.get(act.phase, 0.0) * act.moment)
        try:
            _hit(act, target[0])
        except ProcessLookupError:
            return Outcome(act, "", "missed", time.monotonic() - began)
        given_up = act.how == "stop" and (act.part == "worker" or act.part.endswith("launcher"))
        if given_up:
            time.sleep(_GIVE_UP)
            for each in launchers:
                if each.pid == target[0]:
                    each.kill()
                elif act.part == "worker":
                    each.terminate()
        deadline = time.monotonic() + LIMIT
        codes: list[int | None] = []
        for each in launchers:
            try:
                codes.append(each.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        detached = _detached(job.folder)
        kept = detached if not any(codes) and None not in codes else set()
        # A launcher that is killed when its workers are done may have let go of these already.
        spared = detached if act.part == "launcher" and _are_done(job.marks()) else kept
        left = tree.left_after(LEFT, known, job.folder, spared) if None not in codes else frozenset()
        staying = [each for each in tree.table().values() if each.pid in spared]
        tree.kill(staying)
        names = [tree.command(each.pid) or f"pid {each.pid}" for each in left]
        text = "".join(path.read_text(errors="replace") for path in sorted(job.folder.glob("stderr*")))
        restarts = _restarts(act, job.marks())
        complaint = _judge(act, codes, restarts, rank, text, names, given_up)
        if ended := kept.difference(each.pid for each in staying):
            complaint = complaint or f"{len(ended)} ended of what workers that succeeded had detached"
        note = f"codes {codes}, {restarts} restart{'s' * (restarts != 1)}"
        return Outcome(act, complaint, note, time.monotonic() - began, text)


def _are_done(marks: Sequence[journal.Mark]) -> bool:
    """Return whether all workers of the last round have reached their end."""
    last = max((each.attempt for each in marks), default=0)
    up, done = ({each.rank for each in marks if (each.what, each.attempt) == (what, last)} for what in ("up", "done"))
    return bool(done) and up == done


def _restarts(act: Act, marks: Sequence[journal.Mark]) -> int:
    """Return the job's count of restarts; if no node can join, include uncounted restarts."""
    starts = Counter(each.rank for each in marks if each.what == "up") if act.kind == "endpoint" else Counter()
    return max([0, *(each.attempt for each in marks), *(times - 1 for times in starts.values())])


_CAUSE = re.compile(r"round \d+ ended: |^call failed: |^elasticrun: ")
_NAMES = {
    "reaper": "reaper process",
    "fork server": "fork server process",
    "spawner": "spawner process",
    "store": "store",
    "sidecar": "sidecar",
    "other sidecar": "sidecar",
}


def _judge(
    act: Act, codes: Sequence[int | None], restarts: int, rank: int, text: str, left: Sequence[str], given_up: bool
) -> str:
    """Return a description of the fault; empty if there is none."""
    if None in codes and _waits_for_host(act, codes, text):
        return ""
    if None in codes:
        return f"hung for {LIMIT:g} s"
    if left:
        return f"{len(left)} left: {'; '.join(left)[:200]}"
    if (
        "Traceback" in text
        and "elasticlib/" in text.rpartition("Traceback")[2].partition("\n\n")[0]
        and act.kind != "pool"
    ):
        return "a traceback of the launcher's own"
    if restarts > 1:
        return f"{restarts} restarts"
    if given_up or (act.part.endswith("launcher") and act.how == "kill"):
        return ""
    failed = any(codes)
    if failed:
        return f"the job failed: {codes}"
    if act.how == "pause" and restarts and act.kind != "two nodes":
        return "a restart for a pause"
    if restarts or failed:
        name = rf"rank {rank}\b" if act.part == "worker" and rank >= 0 else _NAMES.get(act.part, "")
        if act.part.endswith("launcher") or act.how == "pause":
            return ""
        if re.search(name, reported_causes(text)) is None:
            return f"{name!r} is not named"
    return ""


def reported_causes(text: str) -> str:
    """Those lines of what a job said that give the cause of a round's, a call's or the job's end."""
    return "\n".join(line for line in text.splitlines() if _CAUSE.search(line))


def _waits_for_host(act: Act, codes: Sequence[int | None], text: str) -> bool:
    """Return whether the other node reports that it waits for the store's host, which has ended."""
    return act.kind == "two nodes" and act.phase == "start" and codes[0] is not None and "has waited" in text


# The campaign.


def measure_up(kind: str) -> float:
    """Seconds until the workers of an undisturbed job of that *kind* are up."""
    act = Act(kind, "", "", "", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with _both(_command(act, endpoint), {"ELASTICLIB_CACHE": ""}) as (job, launchers):
        _await(lambda: journal.select(job.marks(), "up", 0), _UP, launchers)
        return time.monotonic() - job.started


def campaign(chosen: Sequence[Act], jobs: int = 1, verbose: bool = True) -> list[Outcome]:
    """Perform the *chosen* acts, *jobs* at a time; one line for each goes to stdout where *verbose*."""
    ups = {kind: measure_up(kind) for kind in sorted({act.kind for act in chosen})}
    outcomes = []
    with new_folder(), ThreadPoolExecutor(jobs) as pool:
        for number, outcome in enumerate(pool.map(lambda act: perform(act, ups[act.kind]), chosen), 1):
            outcomes.append(outcome)
            if verbose:
                verdict = f"BAD {outcome.complaint}" if outcome.complaint else "ok"
                print(f"{number:4} {outcome.act}  {outcome.seconds:5.1f} s  {verdict}  ({outcome.note})", flush=True)
                if outcome.complaint:
                    print("     | " + "\n     | ".join(outcome.text.strip().splitlines()[-12:]), flush=True)
    return outcomes


def campaign_asleep(count: int, seed: int, first: int = 0, jobs: int = 1, verbose: bool = True) -> int:
    """Perform acts of `asleep`; how many were bad."""
    chosen, up, bad = asleep.sleeps(count, seed)[first:], measure_up("one node"), 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, (sleep, (complaint, text)) in enumerate(
            zip(chosen, pool.map(lambda sleep: asleep.perform(sleep, up), chosen), strict=True), 1
        ):
            bad += bool(complaint)
            if verbose:
                print(f"{number:4} {sleep}  {f'BAD {complaint}' if complaint else 'ok'}", flush=True)
                if complaint:
                    print("     | " + "\n     | ".join(text.strip().splitlines()[-12:]), flush=True)
    return bad


def table(outcomes: Sequence[Outcome]) -> str:
    """Acts by process and phase: bad ones of all."""
    lines = [f"{'process':16}" + "".join(f"{phase:>12}" for phase in PHASES)]
    for part in dict.fromkeys(part for parts in PARTS.values() for part in parts):
        cells = []
        for phase in PHASES:
            here = [each for each in outcomes if (each.act.part, each.act.phase) == (part, phase) and not each.missed]
            cells.append(f"{sum(bool(each.complaint) for each in here)} of {len(here)}")
        lines.append(f"{part:16}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    """The campaign as a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.chaos", description=__doc__.splitlines()[1])
    parser.add_argument("--acts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="leave out the acts before this one")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time")
    parser.add_argument("--kind", choices=[*PARTS], action="append")
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--asleep", action="store_true", help="nothing stands still alone: nothing may be replaced")
    options = parser.parse_args()
    if options.asleep:
        bad_sleeps = campaign_asleep(options.acts, options.seed, options.first, options.jobs)
        print(f"{bad_sleeps} of {options.acts - options.first} acts were bad (seed {options.seed})")
        return 1 if bad_sleeps else 0
    chosen = acts(options.acts, options.seed, options.kind or tuple(PARTS), options.part)[options.first :]
    outcomes = campaign(chosen, options.jobs)
    bad = [each for each in outcomes if each.complaint]
    missed = sum(each.missed for each in outcomes)
    print(f"\nbad acts of all, by process and phase:\n{table(outcomes)}\n")
    for what, count in sorted(Counter(f"{each.act.kind}, {each.act.part}, {each.act.how}" for each in bad).items()):
        print(f"bad: {what}: {count}")
    orphans = sum(" left: " in each.complaint for each in bad)
    hangs = sum(each.complaint.startswith("hung") for each in bad)
    reports = sum(each.complaint.endswith("is not named") for each in bad)
    print(f"{orphans} orphans, {hangs} hangs, {reports} wrong reports")
    print(f"{len(bad)} of {len(outcomes)} acts were bad, {missed} came too late (seed {options.seed})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
