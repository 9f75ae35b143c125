"""
A Slurm batch job whose script was on a lost machine: its allocation is given back.

With ``--no-kill`` Slurm keeps such a job until its time limit, although no script is left to end it.

Rules of this file: nothing is asked of Slurm while the step's srun lives. A machine that cannot be
reached may be alive, and only this one be cut off: another node of the step must find the same, or in a step of two
nodes Slurm itself.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping, Sequence

from elasticlib._clock import monotonic, sleep
from elasticlib.engines._placement import EngineContext
from elasticlib.engines._slurm_queries import answer_of, job_name, shown

_log = logging.getLogger("elasticlib")

_RESPONDERS = (1, 2)
"""Places of the nodes that may ask, so that a thousand survivors are not a load for slurmctld."""
_ATTEMPT = 1.0
_MOST_WITNESSES = 2
_PATIENCE = 300.0
"""Seconds in which Slurm finds a machine lost, by default (SlurmdTimeout)."""
_ASK_SECONDS = 5.0
_FOR_SRUN = ("PATH", "HOME", "USER", "SLURM_CONF")
"""Variables that srun needs. Those of this step would be options of the new one."""
_PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))
except OSError:
    print("unreachable")
"""


def release_command(name: str, job: Mapping[str, str], head: str) -> tuple[str, ...]:
    """
    Return the command that gives back the job *name*, which is *job* for Slurm; empty if its script was not on *head*.
    """
    has_script = job.get("BatchFlag") == "1" and job.get("BatchHost") == head
    if not has_script or job.get("JobState") != "RUNNING":
        return ()
    return ("scancel", name)


def release_after_loss(environ: Mapping[str, str], context: EngineContext | None) -> str:
    """
    Give the allocation back if the machine with the job's script is lost, and return the command; else return "".

    *context* is that of this process, which has lost the contact with the first node. In a step of two nodes this waits
    for Slurm to find the machine lost.
    """
    if context is None or not _is_responder(context):
        return ""

    name = job_name(environ)
    command = release_command(name, shown("job", name), context.hosts[0])
    if not command or not _is_launcher_gone(environ, context, name):
        return ""
    return " ".join(command) if _answer(command, environ) is not None else ""


def _is_responder(context: EngineContext) -> bool:
    """Return True if this node is one of those that give an allocation back."""
    return context.engine == "slurm" and context.node_rank in _RESPONDERS


def _witnesses(context: EngineContext) -> list[str]:
    """Return the nodes that may say whether the first one can be reached."""
    head, this = context.hosts[0], context.hosts[context.node_rank or 0]
    return [host for host in context.hosts if host not in (head, this)]


def _is_launcher_gone(environ: Mapping[str, str], context: EngineContext, name: str) -> bool:
    """Return whether the srun that started this step of job *name* has ended, or its machine is lost."""
    host, port = environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), environ.get("SLURM_STEP_LAUNCHER_PORT", "")
    if not host or not port.isdecimal():
        return False
    try:
        socket.create_connection((host, int(port)), _ATTEMPT).close()
    except ConnectionRefusedError:
        # Its machine answers, and has no such process any more.
        return True
    except (OSError, OverflowError):
        # This node itself may be cut off, so others are asked.
        others = _witnesses(context)[:_MOST_WITNESSES]
        if not others:
            return _slurm_finds_lost(context.hosts[0], name)
        return any(_is_unreachable_from(other, host, port, environ) for other in others)
    return False


def _slurm_finds_lost(head: str, name: str) -> bool:
    """Return whether Slurm loses the machine *head*, too, while job *name* needs to be given back."""
    _log.warning("%s, which has the job's script, cannot be reached: waits until Slurm finds the same", head)
    until = monotonic() + _PATIENCE
    while release_command(name, shown("job", name), head):
        if is_lost_state(shown("node", head).get("State", "")):
            return True
        if monotonic() >= until:
            return False
        sleep(_ASK_SECONDS)
    return False


def is_lost_state(state: str) -> bool:
    """Return whether a node with this *state*, such as ``ALLOCATED*`` or ``DOWN``, does not answer Slurm."""
    return state.startswith("DOWN") or "*" in state or "+NOT_RESPONDING" in state


def _is_unreachable_from(other: str, host: str, port: str, environ: Mapping[str, str]) -> bool:
    """Return whether the node *other* cannot reach *host* either; False if it does not answer."""
    step = ["srun", f"--jobid={environ['SLURM_JOB_ID']}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={other}"]
    probe = [sys.executable, "-I", "-S", "-c", _PROBE, host, port, str(_ATTEMPT)]
    return _answer([*step, *probe], environ) == "unreachable"


def _answer(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the output of *command*; None if it fails."""
    done = answer_of(command, {name: environ[name] for name in _FOR_SRUN if name in environ})
    return done.stdout.strip() if done is not None and done.returncode == 0 else None
