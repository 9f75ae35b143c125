"""
Questions to Slurm that the environment does not answer: a node's address, the job's end and who ended it.

Rules of this file: it asks by ``scontrol``, only if it must, and no answer is an answer: containers
often lack that program.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

_LONGEST_ANSWER = 10.0
"""Seconds: Slurm's own MessageTimeout."""
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
    return _shown("node", host).get("NodeAddr", "")


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which Slurm now plans to end the job of this step; None without an answer."""
    if "SLURM_JOB_ID" not in environ:
        return None
    at = _shown("job", environ["SLURM_JOB_ID"]).get("EndTime", "")
    return float(at) if at.isdecimal() and at.isascii() else None


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
    if "SLURM_STEP_ID" not in environ or "SLURM_JOB_ID" not in environ:
        return False
    job = _shown("job", environ["SLURM_JOB_ID"])

    # Until all processes are gone, the state is COMPLETING whatever ended the job. A time limit has its reason then, a
    # preemption its time.
    has_cause = job.get("Reason") != "None" or job.get("PreemptTime", "None") != "None"
    return job.get("JobState") == "CANCELLED" or (job.get("JobState") == "COMPLETING" and not has_cause)


def _shown(kind: str, name: str) -> dict[str, str]:
    """Return what Slurm says of the node or job *name*; empty if it says nothing."""
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", kind, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            # Times as Unix times.
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            timeout=_LONGEST_ANSWER,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", shown.stdout))
