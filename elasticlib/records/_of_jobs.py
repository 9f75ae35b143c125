"""
Records about a job for its user: rounds, ends of workers, logs and problems.

Rules of this file: a record has facts, and its class makes the text from them.
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
    """Return the first few *numbers* as text, with the number of the others."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts[:_MOST]) + (f" and {len(texts) - _MOST} more" if len(texts) > _MOST else "")


@frozen
class LaunchStarted(Record, level=logging.INFO):
    """Start of a launch on this node."""

    entrypoint: str
    settings: dict[str, object]
    """Values of the fields of the configuration that determine the run."""

    def __str__(self) -> str:
        return f"launching {self.entrypoint}: {', '.join(f'{name}={value!r}' for name, value in self.settings.items())}"


@frozen
class RoundStarted(Record, level=logging.INFO):
    """Start of all workers of this node."""

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
    """End of a round by the coordinator."""

    round: int
    why: str
    restart: bool

    @property
    def level(self) -> int:
        """WARNING for a restart, because the job loses time; else INFO."""
        return logging.WARNING if self.restart else logging.INFO

    def __str__(self) -> str:
        return f"round {self.round} ended: {self.why}"


@frozen
class WorkersStopping(Record, level=logging.INFO):
    """Start of the workers' stop."""

    round: int
    why: str
    signum: int
    grace: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        how = f"{name_of_signal(self.signum)}, SIGKILL after {self.grace:g} s"
        return f"stopping the workers of round {self.round} ({how}): {self.why}"


@frozen
class WorkersAsked(Record, level=logging.WARNING):
    """Request to workers, which ask for it, to save and return at a common step."""

    round: int
    why: str
    grace: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        how = f"at the next step that all of them reach; those that still run are killed after {self.grace:g} s"
        return f"{self.why}: the workers of round {self.round} stop {how}"


@frozen
class StopAwaited(Record, level=logging.WARNING):
    """Wait of a user, who has asked for the end, for workers that have not ended yet."""

    pids: dict[int, int]
    """Process ids of the remaining workers, by global rank."""
    signum: int
    left: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        nouns = "processes" if len(self.pids) > 1 else "process"
        who = f"{ranks_text(self.pids)} ({nouns} {_few(self.pids.values())})"
        return (
            f"waiting for {who} to exit on {name_of_signal(self.signum)}: SIGKILL follows in "
            f"{self.left:.1f} s, or at once with another Ctrl-C"
        )


@frozen
class StopRepeated(Record, level=logging.INFO):
    """
    Repeated request for a stop.

    Schedulers repeat it routinely, and workers that save a checkpoint must not lose time by it.
    """

    why: str
    left: float
    """Seconds until SIGKILL."""

    def __str__(self) -> str:
        return f"{self.why} came while the workers were being stopped: they still have {self.left:.1f} s to end"


@frozen
class WorkerStuck(Record, level=logging.WARNING):
    """Early kill of a worker whose native code kept it, and with it the others, from the signal."""

    rank: int
    pid: int
    signum: int
    waited: float
    """Seconds since the signal was sent."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid}) is in native code, such as a collective, and has not "
            f"handled {name_of_signal(self.signum)} in {self.waited:.1f} s, nor has any other worker here: "
            "it is killed, so that workers which wait for it can exit"
        )


@frozen
class DetachedEnded(Record, level=logging.WARNING):
    """Kill of processes that workers had detached, because the job failed or restarts."""

    commands: dict[int, str]
    """Command lines by process id."""

    def __str__(self) -> str:
        listed = ", ".join(f"process {pid} ({command})" for pid, command in self.commands.items())
        return f"detached processes of workers were killed, because the job failed or restarts: {listed}"


@frozen
class WorkerLingers(Record, level=logging.WARNING):
    """Worker whose program has ended, but whose process has not exited in time."""

    local_rank: int
    pid: int
    seconds: float
    ends: bool
    """True if it is stopped for that."""
    stacks: str
    """Stacks of its threads, in the format of the fault handler."""

    def __str__(self) -> str:
        what = (
            "it is stopped" if self.ends else "it is left running, since its program succeeded (exit_timeout stops it)"
        )
        return (
            f"local rank {self.local_rank} (process {self.pid}) has finished, but still runs {self.seconds:g} s later: "
            f"threads, exit handlers or finalizers do not end, and {what}; its threads:\n{self.stacks or '(not seen)'}"
        )


@frozen
class LastRuns(Record, level=logging.WARNING):
    """Last running worker of a node, whose others have all succeeded."""

    rank: int
    pid: int
    seconds: float
    """Seconds since the others have finished."""
    left: float | None
    """Seconds until it is stopped, because its function has returned; None: it is not stopped."""
    place: str
    """Place of the worker, such as ``at train.py:41``; empty if unknown."""
    are_all: bool
    """True if the job has no ranks on other nodes."""

    def __str__(self) -> str:
        others = f"all ranks but {self.rank}" if self.are_all else f"all ranks of this node but {self.rank}"
        end = "it is left running" if self.left is None else f"exit_timeout ends it in {self.left:g} s"
        where = f"is {self.place}" if self.place else "still runs"
        return f"{others} finished {duration(self.seconds)} ago; rank {self.rank} (process {self.pid}) {where}: {end}"


@frozen
class WorkerCrashedLate(Record, level=logging.WARNING):
    """Crash of a worker's process after its program had ended: the program's end counts."""

    local_rank: int
    pid: int
    exitcode: int
    """Exit status of the program."""
    late: int
    """Exit status of the process, or ``-n`` for signal ``n``."""

    def __str__(self) -> str:
        end = f"with exit status {self.late}" if self.late >= 0 else f"by {name_of_signal(-self.late)}"
        return (
            f"the process {self.pid} of local rank {self.local_rank} ended {end} while its last objects "
            f"were finalized; its program had ended before, with exit status {self.exitcode}, which counts"
        )


@frozen
class NotNeeded(Record, level=logging.WARNING):
    """Success of the job without this node, whose workers were not in the round that succeeded."""

    node: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} was not needed, so none of its workers has a result: {self.why}"


@frozen
class OutcomeMissed(Record, level=logging.WARNING):
    """Loss of the job's store after this node's own success: the job's outcome is unknown."""

    node: str
    why: str

    def __str__(self) -> str:
        return (
            f"node {self.node} exits with success, because its own workers succeeded; the outcome of the job is "
            f"unknown: {self.why}"
        )


@frozen
class WorkersSurvived(Record, level=logging.ERROR):
    """Processes that SIGKILL did not end: they are in a system call that cannot be interrupted."""

    pids: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"processes {list(self.pids)} did not end by SIGKILL: they are in uninterruptible sleep, "
            "most likely in a driver or a file system; this host may need a restart"
        )


@frozen
class WorkersCutOff(Record, level=logging.ERROR):
    """Kill of the workers by the launcher, because the helpers that do it first had not."""

    def __str__(self) -> str:
        return CUT_OFF


@frozen
class ThreadsChosen(Record, level=logging.INFO):
    """Choice of OMP_NUM_THREADS, which was not set."""

    threads: int
    cpus: float
    workers: int

    def __str__(self) -> str:
        return f"OMP_NUM_THREADS={self.threads} in each worker: {self.cpus:g} CPUs for {self.workers} workers"


@frozen
class PreloadSkipped(Record, level=logging.WARNING):
    """Failure of the default preload: each worker imports the modules itself."""

    why: str

    def __str__(self) -> str:
        return f"{self.why}; until then each worker imports it, which takes longer (preload=() has the same effect)"


@frozen
class ImportTakesLong(Record, level=logging.WARNING):
    """Long import in the fork server."""

    module: str
    seconds: float
    place: str
    """Current file and line of the import; empty if unknown."""

    def __str__(self) -> str:
        where = f", now at {self.place}" if self.place else ""
        return (
            f"preloading {self.module} takes more than {self.seconds:g} s{where}: the workers wait for it; "
            f"if it hangs, leave {self.module} out of preload (--preload '' preloads nothing)"
        )


@frozen
class PreloadAdvised(Record, level=logging.WARNING):
    """Long imports of restarted workers that the fork server could do ahead."""

    modules: tuple[str, ...]
    seconds: float
    preload: tuple[str, ...]
    """Modules that are imported ahead now."""

    def __str__(self) -> str:
        return (
            f"at the last restart the workers were importing {', '.join(self.modules)} "
            f"for about {duration(self.seconds)}: "
            f"--preload {','.join((*self.preload, *self.modules))} saves that at each restart"
        )


@frozen
class LogsKept(Record, level=logging.INFO):
    """Folder in which the logs of a failed job are kept."""

    folder: str

    def __str__(self) -> str:
        return f"logs and error files are kept in {self.folder}"


@frozen
class StreamsKept(Record, level=logging.WARNING):
    """Temporary folder of log files, for a caller that asked for files and named no folder."""

    folder: str

    def __str__(self) -> str:
        return f"log directory: {self.folder} (a temporary folder that is kept; choose another by --log-dir or log_dir)"


@frozen
class LogsCutOff(Record, level=logging.WARNING):
    """Full disk of a log folder at the end of a round: lines may be missing."""

    folder: str

    def __str__(self) -> str:
        return (
            f"the disk of {self.folder} is full: lines that workers could not write are lost; free some "
            "space, or give another log_dir"
        )


@frozen
class WatchdogReported(Record):
    """Event of the watchdog of countdown timers."""

    event: str
    """``watchdog started``, ``watchdog stopped``, ``timer expired`` or ``kill worker process``."""
    worker_pid: int | None = None
    """Process id of the timer's worker; None if the event is not about a timer."""
    scope_id: str = ""
    """Name of the timer."""
    expiration_time: float = 0.0
    """Unix seconds at which the timer expired."""
    signum: int = 0
    """Signal of the timer."""

    @property
    def level(self) -> int:
        """WARNING for a worker that hangs; else INFO."""
        return logging.INFO if self.worker_pid is None else logging.WARNING

    def __str__(self) -> str:
        if self.worker_pid is None:
            return self.event
        return f"{self.event}: timer {self.scope_id!r} of process {self.worker_pid}, signal {self.signum}"


@frozen
class WorkerAsleep(Record, level=logging.WARNING):
    """Worker in uninterruptible sleep (state D), which is watched from now on."""

    pid: int
    allowed: float
    """Seconds that the sleep may last."""

    def __str__(self) -> str:
        return f"process {self.pid} is in uninterruptible sleep; after {self.allowed:g} s of it the job is ended"


@frozen
class GpuMemoryFree(Record, level=logging.DEBUG):
    """End of the wait for GPU memory: as much is free as before the job's first workers."""

    waited: float
    """Duration of the wait in seconds."""

    def __str__(self) -> str:
        return f"the GPU memory of the workers that ended was free after {self.waited:.3f} s"


@frozen
class GpuMemoryHeld(Record, level=logging.WARNING):
    """GPU memory that was not freed in time, beyond the memory in use before the first workers."""

    held: Mapping[str, int]
    """Additional bytes by GPU, such as ``GPU 0``."""
    waited: float
    """Duration of the wait in seconds."""

    def __str__(self) -> str:
        each = ", ".join(f"{gpu} holds {more / 2**20:,.0f} MiB" for gpu, more in self.held.items())
        return (
            "memory of the workers that ended, or of others on their GPUs, was not freed in "
            f"{self.waited:.0f} s: {each} more than before the first workers; the next workers start "
            "anyway: nvidia-smi lists the processes that use it; change the time with "
            "ELASTICLIB_GPU_MEMORY_TIMEOUT (seconds, 0 for no wait)"
        )


@frozen
class GpuMemoryUnknown(Record, level=logging.INFO):
    """Unknown use of GPU memory, for which restarts do not wait."""

    why: str

    def __str__(self) -> str:
        return f"the memory in use on the GPUs cannot be read, so restarts do not wait until it is free: {self.why}"


@frozen
class VariableIgnored(Record, level=logging.WARNING):
    """Environment variable with an invalid value, which is ignored."""

    name: str
    value: str
    rule: str
    """Valid values."""
    effect: str
    """Consequence of ignoring it."""

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} is ignored: {self.rule}; {self.effect}"


@frozen
class HealthCheckReported(Record):
    """Port of the agent's health check, or the reason why it does not listen."""

    what: str
    listens: bool

    @property
    def level(self) -> int:
        """WARNING if the health check that the user asked for does not listen; else INFO."""
        return logging.INFO if self.listens else logging.WARNING

    def __str__(self) -> str:
        return self.what


@frozen
class WorkerServersPlaced(Record, level=logging.INFO):
    """Folder of the sockets at which workers that have loaded torch offer its debug server."""

    folder: str

    def __str__(self) -> str:
        return f"debug servers of the workers: Unix sockets {self.folder}/<local rank>"
