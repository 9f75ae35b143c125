"""
Environments of real processes, as engines left them.

Slurm's are those of version 22.05.8, reduced to the variables about jobs, steps, nodes and tasks. Those of other
engines are as their documentation gives them.
"""

from __future__ import annotations

BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
}
"""The script of ``sbatch --nodes=4 --ntasks-per-node=1``."""

STEP = {
    **BATCH,
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
"""Task 2 of ``srun`` in that script."""

ONE_NODE = {
    **BATCH,
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}
"""``srun -N1 -n1`` in that script."""

TWO_TASKS = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
"""``srun --ntasks-per-node=2``."""

PTY = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "39055",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
"""``srun -N2 --pty bash``; its variable of the terminal is also in the steps that this shell starts."""

INTERACTIVE = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
"""The shell of ``salloc -N4`` if Slurm starts it on the first node."""

ALLOCATED = {"SLURM_JOB_ID": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
"""The shell of ``salloc -N2``."""

HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_ID_PACK_GROUP_0": "5",
    "SLURM_JOB_ID_PACK_GROUP_1": "6",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
}
"""Task 1 of ``srun -N1 ... : -N2 ...``: one step of two components."""

ARRAY = {
    "SLURM_ARRAY_JOB_ID": "9",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
"""A step in the first element of ``sbatch --array=0-1``; the other element is job 9."""

REQUEUED = {**ARRAY, "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
"""A step of a job that has been requeued once."""

TRAINJOB = {
    "PET_MASTER_ADDR": "llm-node-0-0.llm",
    "PET_MASTER_PORT": "29500",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_NPROC_PER_NODE": "8",
}

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-28-10-00-00-000000_train_7",
}

DSTACK = {
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.7",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "0",
    "DSTACK_RUN_ID": "f3b1",
    "DSTACK_RUN_NAME": "train",
}
