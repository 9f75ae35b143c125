"""
What people should know of a job: its rounds, its logs, and what was odd on the way.

Rules of this file: a record holds facts; its text is made from them, here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from attrs import frozen

from elasticlib._wording import duration
from elasticlib.errors import name_of_signal
from elasticlib.processes import CUT_OFF
from elasticlib.records._sinks import Record
from elasticlib.stacks import ranks_text

_MOST = 8


def _few(numbers: Iterable[int]) -> str:
    """Numbers for people: the first few of many."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts[:_MOST]) + (f" and {len(texts) - _MOST} more" if len(texts) > _MOST else "")


@frozen
class LaunchStarted(Record, level=logging.INFO):
    """A launch begins on this node."""

    entrypoint: str
    asked: dict[str, object]
    """Value of each field of the configuration that says how it will run."""

    def __str__(self) -> str:
        return f"launching {self.entrypoint}: {', '.join(f'{name}={value!r}' for name, value in self.asked.items())}"


@frozen
class RoundStarted(Record, level=logging.INFO):
    """All workers of this node were started."""

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    restart_count: int
    max_restarts: int
    master: str
    pids: dict[int, int]
    """Process ids by local rank."""
    why: str

    def __str__(self) -> str:
        return (
            f"round {self.round} started ({self.why}): node rank {self.group_rank} of {self.group_world_size}, "
            f"{len(self.pids)} of {self.world_size} workers here, store at {self.master}, "
            f"restart {self.restart_count} of {self.max_restarts}, processes {sorted(self.pids.values())}"
        )


@frozen
class RoundEnded(Record):
    """The coordinator ended the round."""

    round: int
    why: str
    restart: bool

    @property
    def level(self) -> int:
        """A restart deserves a warning: the job loses time."""
        return logging.WARNING if self.restart else logging.INFO

    def __str__(self) -> str:
        return f"round {self.round} ended: {self.why}"


@frozen
class WorkersStopping(Record, level=logging.INFO):
    """The stop ladder begins."""

    round: int
    why: str
    signum: int
    grace: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        return f"stopping the workers of round {self.round} with signal {self.signum}, {self.grace:g} s: {self.why}"


@frozen
class StopAwaited(Record, level=logging.WARNING):
    """Somebody asked for the end, and waits for workers that are not gone at once."""

    pids: dict[int, int]
    """Process ids by global rank of those that are left."""
    signum: int
    left: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        nouns = "processes" if len(self.pids) > 1 else "process"
        who = f"{ranks_text(self.pids)} ({nouns} {_few(self.pids.values())})"
        return (
            f"waiting for {who} to end by {name_of_signal(self.signum)}: SIGKILL follows in {self.left:.1f} s, "
            "or at once with another Ctrl-C"
        )


@frozen
class StopRepeated(Record, level=logging.INFO):
    """A stop was asked for again: schedulers do so, and workers that save a checkpoint must not pay for it."""

    why: str
    left: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        return f"{self.why} came while the workers are being stopped: they keep the {self.left:.1f} s that they have"


@frozen
class WorkerStuck(Record, level=logging.WARNING):
    """A worker was killed before its time: native code kept it from the signal, and the others with it."""

    rank: int
    pid: int
    signum: int
    waited: float
    """Seconds since the signal was sent."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid}) is in native code, such as a collective, and has not handled "
            f"{name_of_signal(self.signum)} in {self.waited:.1f} s, nor has any other worker here: "
            "killed, to free those that wait for it"
        )


@frozen
class DetachedEnded(Record, level=logging.WARNING):
    """Processes that workers had detached, in sessions of their own, were killed: the job failed, or restarts."""

    commands: dict[int, str]
    """By process id."""

    def __str__(self) -> str:
        listed = ", ".join(f"process {pid} ({command})" for pid, command in self.commands.items())
        return f"killed with the workers, which had detached it: {listed}"


@frozen
class NotNeeded(Record, level=logging.WARNING):
    """The job ended well without this node: its workers never did their part in the round that succeeded."""

    node: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} was not needed, so none of its workers has a result: {self.why}"


@frozen
class OutcomeMissed(Record, level=logging.WARNING):
    """All workers of this node ended well, and then the job's store went: no outcome came, and none will."""

    node: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} ends with success, as its own workers did, without the outcome of the job: {self.why}"


@frozen
class WorkersSurvived(Record, level=logging.ERROR):
    """Processes that even SIGKILL did not end: they sit in a system call that cannot be interrupted."""

    pids: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"processes {list(self.pids)} did not end by SIGKILL: they are in uninterruptible sleep, "
            "most likely in a driver or a file system; this host may need a restart"
        )


@frozen
class WorkersCutOff(Record, level=logging.ERROR):
    """The workers were killed by the launcher, as whoever does that earlier did not."""

    def __str__(self) -> str:
        return CUT_OFF


@frozen
class ThreadsChosen(Record, level=logging.INFO):
    """OMP_NUM_THREADS was not set and was chosen."""

    threads: int
    cpus: float
    workers: int

    def __str__(self) -> str:
        return f"OMP_NUM_THREADS={self.threads} in each worker: {self.cpus:g} CPUs for {self.workers} workers"


@frozen
class PreloadSkipped(Record, level=logging.WARNING):
    """The default preload does not work here: the workers import for themselves."""

    why: str

    def __str__(self) -> str:
        return f"{self.why}; until then each worker imports it by itself, which takes longer (preload=() asks for that)"


@frozen
class ImportTakesLong(Record, level=logging.WARNING):
    """The fork server is at one import for long."""

    module: str
    seconds: float
    place: str
    """File and line where it is; empty where that is not known."""

    def __str__(self) -> str:
        where = f", now at {self.place}" if self.place else ""
        return (
            f"the import of {self.module} ahead of the workers takes more than {self.seconds:g} s{where}: the workers "
            f"wait for it; if it hangs, leave {self.module} out of preload (--preload '' imports nothing ahead)"
        )


@frozen
class PreloadAdvised(Record, level=logging.WARNING):
    """The workers of a restart were long at imports that the fork server could do ahead."""

    modules: tuple[str, ...]
    seconds: float
    preload: tuple[str, ...]
    """What is imported ahead now."""

    def __str__(self) -> str:
        return (
            f"at the last restart the workers were importing {', '.join(self.modules)} "
            f"for about {duration(self.seconds)}: "
            f"--preload {','.join((*self.preload, *self.modules))} saves that at each restart"
        )


@frozen
class LogsKept(Record, level=logging.INFO):
    """A job failed, and its logs stay for a look."""

    folder: str

    def __str__(self) -> str:
        return f"logs and error files are kept in {self.folder}"


@frozen
class StreamsKept(Record, level=logging.WARNING):
    """The caller asked for files of streams and named no folder."""

    folder: str

    def __str__(self) -> str:
        return f"log directory: {self.folder} (a temporary folder that is kept; choose another by --log-dir or log_dir)"


@frozen
class LogsCutOff(Record, level=logging.WARNING):
    """The disk of a log folder was full when a round ended, so that lines may be missing there."""

    folder: str

    def __str__(self) -> str:
        return (
            f"no room is left on the disk of {self.folder}: lines that workers could not write are lost; make room, "
            "or give another log_dir"
        )


@frozen
class WatchdogReported(Record):
    """The watchdog of countdown timers has something to tell."""

    event: str
    """``watchdog started``, ``watchdog stopped``, ``timer expired`` or ``kill worker process``."""
    worker_pid: int | None = None
    """The worker whose timer it is, where it is about one."""
    scope_id: str = ""
    """Name of the timer."""
    expiration_time: float = 0.0
    """Unix seconds at which the timer expired."""
    signum: int = 0
    """The signal that was to be sent."""

    @property
    def level(self) -> int:
        """A worker that hangs deserves a warning."""
        return logging.INFO if self.worker_pid is None else logging.WARNING

    def __str__(self) -> str:
        if self.worker_pid is None:
            return self.event
        return f"{self.event}: timer {self.scope_id!r} of process {self.worker_pid}, signal {self.signum}"


@frozen
class WorkerAsleep(Record, level=logging.WARNING):
    """A worker was found in uninterruptible sleep (state D), and is watched from now on."""

    pid: int
    allowed: float
    """Seconds that this may last."""

    def __str__(self) -> str:
        return f"process {self.pid} is in uninterruptible sleep; after {self.allowed:g} s of it the job is ended"


@frozen
class GpuMemoryFree(Record, level=logging.DEBUG):
    """The GPUs have no more in use than before the job's first workers, so the next ones are started."""

    waited: float
    """Seconds."""

    def __str__(self) -> str:
        return f"the GPU memory of the workers that ended was free after {self.waited:.3f} s"


@frozen
class GpuMemoryHeld(Record, level=logging.WARNING):
    """GPUs have more in use than before the job's first workers, and did not free it in the time given."""

    held: Mapping[str, int]
    """By GPU, such as ``GPU 0``: how many bytes more."""
    waited: float
    """Seconds."""

    def __str__(self) -> str:
        each = ", ".join(f"{gpu} holds {more / 2**20:,.0f} MiB" for gpu, more in self.held.items())
        return (
            f"memory of the workers that ended, or of others on their GPUs, was not freed in {self.waited:.0f} s: "
            f"{each} more than before the first workers; the next ones are started all the same: see what uses it "
            "(nvidia-smi), or change the time with ELASTICLIB_GPU_MEMORY_TIMEOUT (seconds, 0 for no wait)"
        )


@frozen
class GpuMemoryUnknown(Record, level=logging.INFO):
    """Nobody can tell how much memory the GPUs have in use, so it is not waited for."""

    why: str

    def __str__(self) -> str:
        return f"the memory in use on the GPUs cannot be read, so no restart waits for it: {self.why}"


@frozen
class VariableIgnored(Record, level=logging.WARNING):
    """A variable of this environment has a value that is not understood, and is taken as not set."""

    name: str
    value: str
    rule: str
    """What it may be."""
    effect: str
    """What follows from its being ignored."""

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} is ignored: {self.rule}; {self.effect}"


@frozen
class HealthCheckReported(Record):
    """The health check of the agent listens, or why it does not."""

    what: str
    listens: bool

    @property
    def level(self) -> int:
        """Whoever asked for it wants to know that there is none."""
        return logging.INFO if self.listens else logging.WARNING

    def __str__(self) -> str:
        return self.what


@frozen
class WorkerServersPlaced(Record, level=logging.INFO):
    """Where each worker of this node offers torch's debug server once it has loaded torch."""

    folder: str

    def __str__(self) -> str:
        return f"debug servers of the workers: Unix sockets {self.folder}/<local rank>"
