"""
The place of a process in an engine's job, read from its environment: nodes, endpoint, id. Pure.

Rules of this file: the environment and the time are arguments. A reader returns only what its engine
says and guesses nothing. Numbers that contradict each other are a `ConfigError` that names both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from elasticlib.engines._host_list import hosts_of
from elasticlib.errors import ConfigError
from elasticlib.spec import DEFAULT_PORT

_Environ: TypeAlias = Mapping[str, str]


@frozen
class EngineContext:
    """
    The place of this process in a job that an engine started, as the engine describes it.

    (sources: ``man srun``, *Output environment variables*; Kubeflow Trainer, *TrainJob*; Kubernetes, *Indexed Job*;
    SkyPilot and dstack, *Environment variables*)
    """

    engine: str
    """``slurm``, ``trainjob``, ``kubernetes``, ``skypilot`` or ``dstack``."""
    num_nodes: int | None = None
    """Number of nodes on which the engine starts an agent; None if it does not say."""
    node_rank: int | None = None
    """Place of this node among them, from 0."""
    rdzv_endpoint: str = ""
    """``host:port`` where the nodes can meet: a port of node 0. Empty if the engine does not name a host."""
    run_id: str = ""
    """Name of the job, the same on all nodes and another one after a restart by the engine; empty if unknown."""
    rdzv_backend: str = "c10d"
    """``static`` if a replaced node must come back at its place."""
    restart_count: int = 0
    """Number of times that the engine has restarted the job."""
    deadline: float | None = None
    """Unix time at which the engine ends the job; inf if the engine must be asked."""
    preempt_signal: str = ""
    """Signals by which the engine announces the end of this process, separated by commas."""
    grace: float | None = None
    """Seconds from SIGTERM to SIGKILL, by the engine's own default; None if the engine has none."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of their ranks."""
    is_fixed: bool = False
    """True if no other node can join the job later: the engine replaces no lost node."""
    ends_together: bool = False
    """True if the engine may end all agents of the job soon after the first one has ended."""
    num_agents: int | None = None
    """Number of processes that the engine has started on these nodes."""
    title: str = ""
    """Name of the engine's job for people, such as ``Slurm step 12.0``."""
    source: str = ""
    """The variable that names the nodes, for errors."""


def engine_context(environ: _Environ, engine: str = "auto", *, now: float) -> EngineContext | None:
    """
    Return the context that *engine* has left in *environ*; None if this process is not one of its agents.

    ``auto`` takes the first engine that there is. It finds none in a worker of elasticlib or torchrun, whose
    launcher the context belongs to, and none in a terminal of ``srun --pty``, where a person types commands for one
    node. Steps that such a person starts inherit its variables and look the same: for them *engine* must be named.
    *now* is the Unix time.

    Raises `ConfigError` for an unknown *engine*, for a named engine that did not start this process, and for
    variables that contradict each other.
    """
    if engine == "none":
        return None
    if engine == "auto":
        if "TORCHELASTIC_RUN_ID" in environ or "SLURM_PTY_PORT" in environ:
            return None
        found = (read(environ, now) for read in _READERS.values())
        return next(filter(None, found), None)

    if engine not in _READERS:
        raise ConfigError.of_setting("engine", f"{engine!r} is unknown: give one of {', '.join(ENGINES)}")
    context = _READERS[engine](environ, now)
    if context is None:
        raise ConfigError.of_setting(
            "engine", f"{engine!r}: {_SIGNS[engine]} in the environment of this process; leave it out, or give none"
        )
    return context


_GRACE = 30.0
"""Seconds: Slurm's KillWait, and the ``terminationGracePeriodSeconds`` of a pod, unless somebody has changed them."""

# Slurm.

_FIRST_SPECIAL_STEP = 2**32 - 16
"""Ids from here on are those of batch scripts and interactive shells, which Slurm starts on one node only."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux gives to outgoing connections, from 32768 on."""
_STEPS = 61
"""Steps of a job before the ports of the next job begin; without a common divisor with the number of ports."""


def _slurm(environ: _Environ, now: float) -> EngineContext | None:
    if "SLURM_STEP_ID" not in environ or "SLURM_JOB_ID" not in environ:
        return None
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return None

    nodes, rank = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_NODEID")
    hosts = _hosts(environ, "SLURM_STEP_NODELIST")
    _check_nodes(nodes, "SLURM_STEP_NUM_NODES", hosts, "SLURM_STEP_NODELIST", rank, "SLURM_NODEID")

    restarts = _number(environ, "SLURM_RESTART_COUNT", default=0)
    return EngineContext(
        "slurm",
        num_nodes=nodes,
        node_rank=rank,
        rdzv_endpoint=f"{hosts[0]}:{_FIRST_PORT + (job * _STEPS + step) % _PORTS}",
        run_id=f"{job}.{step}.{restarts}",
        restart_count=restarts,
        deadline=_deadline(environ, "SLURM_JOB_END_TIME", now),
        preempt_signal="SIGTERM,SIGUSR1,SIGUSR2",
        grace=_GRACE,
        hosts=hosts,
        is_fixed=True,
        ends_together=nodes > 1,
        num_agents=_number(environ, "SLURM_STEP_NUM_TASKS"),
        title=f"Slurm step {job}.{step}",
        source="SLURM_STEP_NODELIST",
    )


def is_shared_step(environ: _Environ) -> bool:
    """Return True in the first process of an ``srun`` that starts one process on each of several nodes."""
    nodes = number_in(environ, "SLURM_STEP_NUM_NODES") or 0
    is_one_each = nodes == number_in(environ, "SLURM_STEP_NUM_TASKS")
    return nodes > 1 and is_one_each and environ.get("SLURM_PROCID") == "0"


# Kubernetes.


def _trainjob(environ: _Environ, now: float) -> EngineContext | None:
    """Kubeflow's TrainJob sets torchrun's own variables, so that only the id is left to read."""
    if "PET_NODE_RANK" not in environ or "PET_MASTER_ADDR" not in environ:
        return None
    master = environ["PET_MASTER_ADDR"]
    # <job>-node-0-0.<job>: the service that gives the pods their names is called as the job.
    job = master.partition(".")[2].partition(".")[0]
    port = environ.get("PET_MASTER_PORT", "29500")
    return EngineContext(
        "trainjob",
        num_nodes=_whole(environ.get("PET_NNODES", "").rpartition(":")[2]),
        node_rank=_number(environ, "PET_NODE_RANK"),
        rdzv_endpoint=f"{master}:{port}",
        run_id=environ.get("PET_RDZV_ID", job),
        rdzv_backend="static",
        preempt_signal="SIGTERM",
        grace=_GRACE,
        title=f"TrainJob {job}" if job else "TrainJob",
        source="PET_MASTER_ADDR",
    )


def _kubernetes(environ: _Environ, now: float) -> EngineContext | None:
    """An Indexed Job numbers its pods; the rest is declared in its manifest, as options."""
    rank = _index_of_pod(environ)
    if rank is None:
        return None
    return EngineContext(
        "kubernetes",
        node_rank=rank,
        preempt_signal="SIGTERM",
        grace=_GRACE,
        title="Indexed Job",
        source="JOB_COMPLETION_INDEX",
    )


# Clouds: as documented by them.


def _skypilot(environ: _Environ, now: float) -> EngineContext | None:
    if "SKYPILOT_NODE_RANK" not in environ or "SKYPILOT_NODE_IPS" not in environ:
        return None
    hosts = tuple(environ["SKYPILOT_NODE_IPS"].split())
    rank, nodes = _number(environ, "SKYPILOT_NODE_RANK"), _number(environ, "SKYPILOT_NUM_NODES", default=len(hosts))
    _check_nodes(nodes, "SKYPILOT_NUM_NODES", hosts, "SKYPILOT_NODE_IPS", rank, "SKYPILOT_NODE_RANK")
    run_id = environ.get("SKYPILOT_TASK_ID", "")
    return EngineContext(
        "skypilot",
        num_nodes=nodes,
        node_rank=rank,
        rdzv_endpoint=f"{hosts[0]}:{DEFAULT_PORT}",
        run_id=run_id,
        hosts=hosts,
        title=f"SkyPilot task {run_id}".rstrip(),
        source="SKYPILOT_NODE_IPS",
    )


def _dstack(environ: _Environ, now: float) -> EngineContext | None:
    if "DSTACK_NODE_RANK" not in environ or "DSTACK_MASTER_NODE_IP" not in environ:
        return None
    rank, nodes = _number(environ, "DSTACK_NODE_RANK"), _number(environ, "DSTACK_NODES_NUM")
    hosts = tuple(environ.get("DSTACK_NODES_IPS", "").split())
    _check_nodes(nodes, "DSTACK_NODES_NUM", hosts or ("",) * nodes, "DSTACK_NODES_IPS", rank, "DSTACK_NODE_RANK")
    run_id = environ.get("DSTACK_RUN_ID", environ.get("DSTACK_RUN_NAME", ""))
    return EngineContext(
        "dstack",
        num_nodes=nodes,
        node_rank=rank,
        rdzv_endpoint=f"{environ['DSTACK_MASTER_NODE_IP']}:{DEFAULT_PORT}",
        run_id=run_id,
        hosts=hosts,
        title=f"dstack run {environ.get('DSTACK_RUN_NAME', run_id)}".rstrip(),
        source="DSTACK_MASTER_NODE_IP",
    )


_READERS = {
    "slurm": _slurm,
    "trainjob": _trainjob,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "dstack": _dstack,
}
ENGINES = ("auto", "none", *_READERS)
_SIGNS = {
    "slurm": "a task of srun has SLURM_STEP_ID, which is not",
    "trainjob": "a TrainJob sets PET_NODE_RANK and PET_MASTER_ADDR, which are not both",
    "kubernetes": "an Indexed Job sets JOB_COMPLETION_INDEX, which is not",
    "skypilot": "SkyPilot sets SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS, which are not both",
    "dstack": "dstack sets DSTACK_NODE_RANK and DSTACK_MASTER_NODE_IP, which are not both",
}
"""By engine: the beginning of the sentence that this process was not started by it."""


# The order of nodes alone, which more schedulers say.

_INDEXES = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
)
"""Variables in which schedulers store a task's index and the number of tasks."""


def scheduler_index(environ: _Environ) -> int | None:
    """
    Return this node's place as its scheduler numbers it; None without a scheduler, or with one task only.

    Each job of a JobSet numbers its pods from 0, so its manifest must pass on the job's own number and size:
    ``JOB_GLOBAL_INDEX`` from the label ``jobset.sigs.k8s.io/job-global-index``, and ``JOB_COMPLETIONS`` if a job has
    more than one pod.
    """
    for place, size in _INDEXES:
        index, tasks = number_in(environ, place), number_in(environ, size)
        if index is not None and tasks is not None and tasks > 1:
            return index
    return _index_of_pod(environ)


def _index_of_pod(environ: _Environ) -> int | None:
    pod = number_in(environ, "JOB_COMPLETION_INDEX")
    job, pods = number_in(environ, "JOB_GLOBAL_INDEX", "0"), number_in(environ, "JOB_COMPLETIONS", "1")
    if pod is None or job is None or pods is None:
        return None
    return job * pods + pod


# Values.


def number_in(environ: _Environ, name: str, default: str = "") -> int | None:
    """Return the whole number in the variable *name*; None for any other text."""
    return _whole(environ.get(name, default))


def _whole(text: str) -> int | None:
    # `int` also reads digits of other scripts, and texts of any length.
    is_number = text.isdecimal() and text.isascii() and len(text) < 20
    return int(text) if is_number else None


def _number(environ: _Environ, name: str, default: int | None = None) -> int:
    """Return the whole number of the variable *name*. Raises `ConfigError`."""
    text = environ.get(name, "" if default is None else str(default))
    number = _whole(text)
    if number is None:
        raise _error(f"{name}={text[:80]!r} must be a whole number")
    return number


def _hosts(environ: _Environ, name: str) -> tuple[str, ...]:
    try:
        return hosts_of(environ.get(name, ""))
    except ValueError as error:
        raise _error(f"{name}: {error}") from None


def _deadline(environ: _Environ, name: str, now: float) -> float:
    """Return the time in the variable *name*; inf if it is in the past or, as in Slurm before 23.02, is missing."""
    deadline = _number(environ, name, default=0)
    # The owner may have extended the time since, and Slurm may let jobs run on (OverTimeLimit).
    return float(deadline) if deadline > now else math.inf


def _check_nodes(nodes: int, of_nodes: str, hosts: tuple[str, ...], of_hosts: str, rank: int, of_rank: str) -> None:
    """Raise `ConfigError` unless the number of nodes, their names and this node's rank fit each other."""
    if len(hosts) != nodes or not hosts:
        raise _error(f"{of_nodes}={nodes}, but {of_hosts} names {len(hosts)} hosts")
    if rank >= nodes:
        raise _error(f"{of_rank}={rank} is not below {of_nodes}={nodes}")


def _error(complaint: str) -> ConfigError:
    return ConfigError(f"{complaint}; --engine none ignores the variables of the engine")
