"""
Questions to Slurm that the environment does not answer: a node's address, the job's end and who ended it.

Rules of this file: it asks by ``scontrol``, only if it must, and no answer is an answer: containers
often lack that program. Commands run in sessions of their own, so that Ctrl-C in a terminal does not end them half-way.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticlib.engines._placement import number_in

ANSWER_SECONDS = 10.0
"""Slurm's own MessageTimeout."""
_SETTINGS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Files of Slurm's settings; the second one is that of nodes which get them from slurmctld."""


def reachable(endpoint: str) -> str:
    """Return *endpoint*, a Slurm node's ``name:port``, with the node's address if its name does not resolve."""
    host, _, port = endpoint.rpartition(":")
    if _resolves(host):
        return endpoint
    address = _node_address(host)
    return f"{address}:{port}" if address and address != host else endpoint


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _node_address(host: str) -> str:
    """Return the address that Slurm uses for the node *host*; empty if Slurm does not say."""
    return shown("node", host).get("NodeAddr", "")


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which Slurm now plans to end the job of this step; None without an answer."""
    return number_in(_own_job(environ), "EndTime")


def _own_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that Slurm shows of this step's job; empty outside of Slurm, or without an answer."""
    name = job_name(environ)
    return shown("job", name) if name else {}


def job_name(environ: Mapping[str, str]) -> str:
    """Return the name of this step's own job for Slurm's commands; empty outside of Slurm."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    # One of the tasks has the number of the whole array, and by that number a command changes all tasks.
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def kill_wait(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from SIGTERM to SIGKILL at the end of a job, from Slurm's settings; None if unknown."""
    for path in filter(None, (environ.get("SLURM_CONF"), *_SETTINGS)):
        with contextlib.suppress(OSError):
            return kill_wait_of(Path(path).read_text(errors="replace"))
    return None


def kill_wait_of(settings: str) -> float | None:
    """Return the ``KillWait`` of a text of ``slurm.conf``; None if it has none."""
    found = re.search(r"^\s*KillWait\s*=\s*(\d{1,6})\s*(?:#.*)?$", settings, re.MULTILINE | re.IGNORECASE)
    return float(found[1]) if found else None


def is_cancelled(environ: Mapping[str, str]) -> bool:
    """Return True if this process is in a step of a Slurm job that its owner has cancelled, as far as Slurm says."""
    return "SLURM_STEP_ID" in environ and _was_cancelled(_own_job(environ), _restarts_in(environ))


def _was_cancelled(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if the owner has cancelled *job*, which had *restarts*."""
    state = job.get("JobState")
    # Until all processes are gone, the state is COMPLETING whatever ended the job. A time limit has its reason then, a
    # preemption its time, and a requeued job one more restart.
    has_cause = job.get("Reason") != "None" or job.get("PreemptTime", "None") != "None"
    return state == "CANCELLED" or (state == "COMPLETING" and not has_cause and not _is_requeued(job, restarts))


def _restarts_in(environ: Mapping[str, str]) -> int:
    return number_in(environ, "SLURM_RESTART_COUNT") or 0


def requeue(environ: Mapping[str, str]) -> str:
    """
    Requeue the Slurm job of this step, unless another node has done so.

    Return the reason if the job is not requeued; empty if it is.
    """
    name, restarts = job_name(environ), _restarts_in(environ)
    job = shown("job", name)
    if not job:
        return "Slurm does not say whether the job was cancelled"
    if _was_cancelled(job, restarts):
        return "it was cancelled"
    if _is_requeued(job, restarts):
        return ""

    complaint = _complaint_about("requeue", name)
    # Two nodes may ask at the same time, of which Slurm refuses the second.
    is_done = not complaint or _is_requeued(shown("job", name), restarts)
    return "" if is_done else complaint


def _is_requeued(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if *job*, which had *restarts*, has been requeued since."""
    is_newer = (number_in(job, "Restarts") or 0) > restarts
    return is_newer or job.get("JobState") in ("PENDING", "REQUEUED")


def _complaint_about(*args: str) -> str:
    """Call ``scontrol``, and return its complaint; empty if it has none."""
    done = _scontrol(*args)
    if done is None:
        return "scontrol does not answer"
    if done.returncode == 0:
        return ""
    return done.stderr.strip() or f"scontrol {' '.join(args)} ended with {done.returncode}"


def shown(kind: str, name: str) -> dict[str, str]:
    """Return what Slurm says of the node or job *name*; empty if it says nothing."""
    done = _scontrol("--oneliner", "show", kind, name)
    return {} if done is None else facts_in(done.stdout)


def facts_in(shown: str) -> dict[str, str]:
    """Return the facts in the first line of ``scontrol show --oneliner`` by name."""
    # A job of several components has a line for each; the first is that of its leader.
    first = shown.partition("\n")[0]
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", first))


def _scontrol(*args: str) -> subprocess.CompletedProcess[str] | None:
    """Return the end of a call of ``scontrol``; None if it cannot be called, or does not answer."""
    # Times as Unix times.
    return answer_of(["scontrol", *args], {**os.environ, "SLURM_TIME_FORMAT": "%s"})


def answer_of(
    command: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float = ANSWER_SECONDS
) -> subprocess.CompletedProcess[str] | None:
    """Return the end of a *command* of Slurm; None if it cannot be called, or does not answer."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=seconds,
            start_new_session=True,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
