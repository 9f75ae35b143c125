"""
Questions to Slurm that the environment does not answer: a node's address, and who ended the job.

Rules of this file: it asks by ``scontrol``, only if it must, and no answer is an answer: containers
often lack that program.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

_LONGEST_ANSWER = 10.0
"""Seconds: Slurm's own MessageTimeout."""


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
            timeout=_LONGEST_ANSWER,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", shown.stdout))
