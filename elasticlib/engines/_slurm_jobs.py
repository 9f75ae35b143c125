"""
Jobs of Slurm, by its own commands: submit, ask for the state, cancel.

Rules of this file: a command that does not answer says nothing: a job ends only if Slurm says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from elasticlib.engines._placement import number_in
from elasticlib.engines._slurm_queries import answer_of, facts_in
from elasticlib.errors import ConfigError, StartError

_SUBMIT_SECONDS = 60.0
_OVER = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT UNKNOWN".split()
)
"""States of jobs without processes, that do not start again (``man squeue``); UNKNOWN: Slurm has forgotten the job."""
_PENDING = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD SPECIAL_EXIT".split())
_USUAL_REASONS = frozenset("BeginTime Cleaning Dependency None Priority Prolog Reservation Resources".split()) | {""}
_FIRST_SPECIAL_STEP = 2**32 - 16
"""Steps from here on are those of batch scripts and interactive shells."""


@frozen
class SlurmJob:
    """A job as Slurm shows it."""

    number: str
    state: str = ""
    """As ``scontrol`` names it; UNKNOWN: Slurm does not know the job any more; empty: no answer."""
    reason: str = ""
    restarts: int = 0

    def __str__(self) -> str:
        facts = ", ".join(filter(None, (self.state, self.reason)))
        return f"Slurm job {self.number}{f' ({facts})' if facts else ''}"

    @property
    def is_over(self) -> bool:
        """True if no process of the job is left, and it will not start again."""
        return self.state in _OVER

    @property
    def may_never_start(self) -> bool:
        """True if the job waits for more than other jobs to end."""
        return self.is_pending and self.reason not in _USUAL_REASONS

    @property
    def is_pending(self) -> bool:
        """True if it has no nodes now."""
        return self.state in _PENDING


def submit_script(script: str, options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Submit the file *script*, and return the number of its job. Raises `StartError` if Slurm refuses it."""
    # Variables of a step around this program would be options of srun in the job, or mark it as a terminal.
    own = {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    # Options are given on the command line, too: there they win over the user's SBATCH_* variables.
    done = answer_of(["sbatch", "--parsable", *options, script], own, _SUBMIT_SECONDS)
    if done is None:
        raise StartError("sbatch does not answer: install Slurm's client programs here, or start slurmctld")
    number = re.match(r"(\d+)(;|$)", done.stdout.strip())
    if done.returncode or not number:
        raise StartError(f"the job was refused: {_last_line(done.stderr) or f'sbatch ended with {done.returncode}'}")
    return number[1]


def check_nodes(nodes: int, partition: str | None) -> None:
    """Raise `ConfigError` for more *nodes* than *partition* has, for which a job would wait forever."""
    done = answer_of(["sinfo", "--noheader", "--format=%P %D"])
    largest = nodes_of(partition, "" if done is None else done.stdout)
    if largest is not None and nodes > largest:
        where = f"partition {partition!r}" if partition else "the default partition"
        raise ConfigError.of_setting("nodes", f"{nodes} is more than {where} has: give {largest} or less")


def nodes_of(partition: str | None, shown: str) -> int | None:
    """Return the number of nodes of *partition* (None: the default one) from what ``sinfo`` shows; None if unknown."""
    rows = re.findall(r"^(\S+?)(\*?) +(\d{1,9})$", shown, re.MULTILINE)
    counts = [int(count) for name, mark, count in rows if (name == partition if partition else mark)]
    return sum(counts) or None


def _last_line(text: str) -> str:
    lines = [line.removeprefix("sbatch: ").strip() for line in text.splitlines() if line.strip()]
    return " / ".join(line.removeprefix("error: ") for line in lines[-3:])


def slurm_job(number: str) -> SlurmJob:
    """Return the job *number* as Slurm shows it now."""
    done = answer_of(["scontrol", "--oneliner", "show", "job", number])
    if done is None:
        return SlurmJob(number)
    return job_shown(number, done.stdout, done.stderr)


def job_shown(number: str, shown: str, complaint: str) -> SlurmJob:
    """Return the job *number* from the output of ``scontrol``."""
    if "Invalid job id" in complaint:
        return SlurmJob(number, "UNKNOWN")

    facts = facts_in(shown)
    reason = facts.get("Reason", "")
    return SlurmJob(
        number,
        facts.get("JobState", ""),
        reason.replace("None", ""),
        number_in(facts, "Restarts") or 0,
    )


def cancel_job(number: str, *options: str) -> None:
    """Cancel a job or a step: SIGTERM, and SIGKILL after Slurm's KillWait. One that has ended stays unchanged."""
    answer_of(["scancel", *options, number])


def allocation_of(environ: Mapping[str, str]) -> str:
    """Return the number of the job whose nodes this program may use by srun; empty if it is outside, or in a step."""
    step = number_in(environ, "SLURM_STEP_ID")
    is_in_step = step is not None and step < _FIRST_SPECIAL_STEP
    return "" if is_in_step else environ.get("SLURM_JOB_ID", "")


def steps_of(number: str, name: str) -> list[str]:
    """Return the running steps of job *number* that have this *name*."""
    done = answer_of(["squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i %j"])
    rows = [] if done is None else [line.split() for line in done.stdout.splitlines()]
    return [row[0] for row in rows if row[1:] == [name]]
