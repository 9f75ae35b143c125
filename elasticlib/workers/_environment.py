"""
The environment of a worker, as torch's workers find it.

PURE: takes ranks and a specification, returns variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticlib._untrusted import TOKEN_VARIABLE
from elasticlib.errors import ConfigError

CUDA_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that lists the devices for CUDA and ROCm, separated by commas."""
HIP_DEVICES_VARIABLE = "HIP_VISIBLE_DEVICES"
"""The same for ROCm alone, which reads it first."""
THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class NodePlace:
    """Place of a node's workers in one round of the job."""

    run_id: str
    role: str
    local_world_size: int
    group_rank: int
    group_world_size: int
    rank_base: int
    """Global rank of local rank 0."""
    world_size: int
    role_rank_base: int
    role_world_size: int
    restart_count: int
    max_restarts: int
    master_addr: str
    master_port: int
    agent_store: bool = True
    """True if the launcher hosts the store at the master's address (otherwise worker 0 must)."""


def worker_variables(place: NodePlace, local_rank: int, error_file: str) -> dict[str, str]:
    """Return the variables of worker *local_rank* that differ from the launcher's."""
    values: dict[str, object] = {
        "LOCAL_RANK": local_rank,
        "RANK": place.rank_base + local_rank,
        "GROUP_RANK": place.group_rank,
        "ROLE_RANK": place.role_rank_base + local_rank,
        "ROLE_NAME": place.role,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "WORLD_SIZE": place.world_size,
        "GROUP_WORLD_SIZE": place.group_world_size,
        "ROLE_WORLD_SIZE": place.role_world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "TORCHELASTIC_RESTART_COUNT": place.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": place.max_restarts,
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": place.agent_store,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    return {name: str(value) for name, value in values.items()}


def alone_with_a_device(environment: Mapping[str, str], workers: int) -> tuple[dict[str, str], ...]:
    """
    Return, for each worker with a virtual local rank, the variables that show it one device only,
    as number 0.

    ``HIP_VISIBLE_DEVICES`` is the list if it is set and not empty, and then both variables are
    set. A worker whose entry is empty sees no device. Raises `ConfigError` (a ``ValueError``) if
    the launcher's own list of devices has no entry for a worker.
    """
    names = [CUDA_DEVICES_VARIABLE]

    # HIP reads its own variable first, so both must name the same device.
    if environment.get(HIP_DEVICES_VARIABLE):
        names.append(HIP_DEVICES_VARIABLE)
    name = names[-1]
    listed = environment.get(name)
    if listed is None:
        entries = [str(rank) for rank in range(workers)]
    else:
        entries = [entry.strip() for entry in listed.split(",")]

    count = sum(map(bool, entries))
    hides_all = workers > 1 and count == 0
    if len(entries) < workers or hides_all:
        raise ConfigError.of_setting(
            "virtual_local_rank",
            f"True: {name}={listed!r} names {count} devices for {workers} workers: "
            "list one for each worker, start fewer workers, or leave the option out",
        )

    return tuple({"LOCAL_RANK": "0", **dict.fromkeys(names, entry)} for entry in entries[:workers])


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """
    Return *environment* without the job's token, which only its nodes may see, not workers or
    helpers.
    """
    return {name: value for name, value in environment.items() if name != TOKEN_VARIABLE}


def common_variables(environment: Mapping[str, str], threads: int, signals: str) -> dict[str, str]:
    """
    Return the launcher's environment with the variables that all workers share.

    The user's values are kept, except for the signals.
    """
    return {
        THREADS_VARIABLE: str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **without_secrets(environment),
        # An inherited value comes from a launcher around this one, like any other of
        # TORCHELASTIC_*.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": signals,
    }


def threads_per_worker(environment: Mapping[str, str], cpus: float, workers: int) -> int:
    """
    Return the threads of each worker: the user's ``OMP_NUM_THREADS``, else CPUs divided by
    workers, at least 1.
    """
    # OpenMP allows a number for each nesting level: the first is that of the outermost.
    first = environment.get(THREADS_VARIABLE, "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return max(1, int(cpus // workers))


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables whose value *now* differs; None for removed ones."""
    gone: dict[str, str | None] = {name: None for name in before if name not in now}
    return gone | {name: value for name, value in now.items() if before.get(name) != value}
