"""The text of a Slurm job from its options, values that are refused, and Slurm's answers."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest

from elasticlib.engines import BatchOptions, Slurm, SlurmJob, allocation_of, batch_script, name_of_job
from elasticlib.engines._slurm_jobs import job_shown, nodes_of
from elasticlib.errors import ConfigError

BOTH = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --no-kill --wait=0 --kill-on-bad-exit=0"


def test_script_has_one_task_on_each_node() -> None:
    engine = Slurm(2, "1:00:00", "gpu", {"gpus-per-node": 8}, requeue=2, folder="/shared", python="/opt/python")

    assert f"""\
#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --time=1:00:00
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=8
#SBATCH --output=/shared/c1/output
#SBATCH --error=/shared/c1/errors

{BOTH} /opt/python -u -m elasticlib.remote._batch_node /shared/c1 --requeue 2
status=$?
echo "$status" > /shared/c1/ended."${{SLURM_RESTART_COUNT:-0}}"
exit "$status"
""" == engine.script("train.py", "/shared/c1")


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({"gpus-per-node": 8}, ["#SBATCH --gpus-per-node=8"]),
        ({"nice": 0}, ["#SBATCH --nice=0"]),
        ({"exclusive": True, "contiguous": False}, ["#SBATCH --exclusive"]),
        ({"comment": "two words"}, ['#SBATCH "--comment=two words"']),
        ({"comment": 'a "b" #c \\d'}, ['#SBATCH "--comment=a \\"b\\" #c \\\\d"']),
        ({"constraint": "a&b"}, ['#SBATCH "--constraint=a&b"']),
        ({"job-name": "mine"}, []),
    ],
)
def test_further_options_of_sbatch(more: dict[str, Any], lines: list[str]) -> None:
    text = batch_script(BatchOptions(1, more=more).lines("train"), 1, ["true"])

    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines == header[7:]
    assert f"#SBATCH --job-name={more.get('job-name', 'train')}" == header[0]


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "", ()),
        ({"more": {"cpus-per-task": 4}}, "", ("--cpus-per-task=4",)),
        ({"time": 10}, "", ()),
        ({"time": 10}, "train-1", ("--job-name=train-1", "--time=10")),
    ],
)
def test_options_of_a_step(options: dict[str, Any], name: str, expected: tuple[str, ...]) -> None:
    assert expected == BatchOptions(2, **options).lines_of_step(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes=0 must be"),
        ({"nodes": "2"}, "nodes='2' must be"),
        ({"nodes": True}, "nodes=True must be"),
        ({"requeue": -1}, "requeue=-1 must be"),
        ({"requeue": "yes"}, "requeue='yes' must be"),
        ({"time": "1h"}, "time='1h' must be a time of Slurm"),
        ({"time": 0}, "time=0 must be"),
        ({"time": "1:00\n#SBATCH --uid=0"}, "time='1:00\\n#SBATCH --uid=0' must be"),
        ({"time": datetime.timedelta(hours=1)}, "time=datetime.timedelta(seconds=3600) must be"),
        ({"partition": ""}, "partition='' must be one line"),
        ({"partition": "a\nb"}, "partition='a\\nb' must be one line"),
        ({"partition": 3}, "partition=3 must be a text"),
        ({"more": ["--gpus=1"]}, "sbatch=['--gpus=1'] must be a dict"),
        ({"more": {"--gpus": 1}}, "sbatch='--gpus' is not a long option"),
        ({"more": {"gpus_per_node": 1}}, "sbatch='gpus_per_node' is not a long option"),
        ({"more": {"gpus": [1]}}, "sbatch['gpus']=[1] must be a text or a number, not list"),
        ({"more": {"gpus": None}}, "sbatch['gpus']=None must be a text or a number, not NoneType"),
        ({"more": {"comment": "a\nsrun x"}}, "sbatch['comment']='a\\nsrun x' must be one line"),
        ({"more": {"nodes": 3}}, "sbatch='nodes' cannot be given there: give nodes="),
        ({"more": {"time": "1:00"}}, "sbatch='time' cannot be given there: give time="),
        ({"more": {"export": "NONE"}}, "sbatch='export' cannot be given"),
        ({"more": {"array": "0-3"}}, "sbatch='array' cannot be given"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BatchOptions(**{"nodes": 2, **options})


@pytest.mark.parametrize("folder", ["/a%j", "/a\\b", "/a\nb"])
def test_folder_whose_name_slurm_would_change_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="folder="):
        Slurm(2, folder=folder)


@pytest.mark.parametrize(
    ("title", "name"),
    [("train.py", "train.py"), ("<lambda>", "lambda"), ("a b\n/c", "a_b_c"), ("../..", "job"), ("x" * 99, "x" * 64)],
)
def test_title_is_converted_to_a_valid_job_name(title: str, name: str) -> None:
    assert name == name_of_job(title)


@pytest.mark.parametrize(
    ("shown", "complaint", "job", "is_over"),
    [
        ("JobId=7 JobState=PENDING Reason=Resources Restarts=0", "", SlurmJob("7", "PENDING", "Resources"), False),
        ("JobId=7 JobState=RUNNING Reason=None Restarts=2", "", SlurmJob("7", "RUNNING", "", 2), False),
        ("JobId=7 JobState=COMPLETING Reason=None Restarts=0", "", SlurmJob("7", "COMPLETING"), False),
        ("JobId=7 JobState=TIMEOUT Reason=TimeLimit Restarts=0", "", SlurmJob("7", "TIMEOUT", "TimeLimit"), True),
        ("JobId=7 JobState=CANCELLED Reason=None Restarts=x", "", SlurmJob("7", "CANCELLED"), True),
        ("", "slurm_load_jobs error: Invalid job id specified", SlurmJob("7", "UNKNOWN"), True),
        ("", "slurm_load_jobs error: Unable to contact slurm controller", SlurmJob("7"), False),
        ("JobId=7 JobState=NEW_STATE", "", SlurmJob("7", "NEW_STATE"), False),
    ],
)
def test_state_of_a_job(shown: str, complaint: str, job: SlurmJob, is_over: bool) -> None:
    assert job == job_shown("7", shown, complaint)
    assert is_over == job.is_over


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(2**32 - 5)}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "x"}, "7"),
    ],
)
def test_allocation_of_a_program(environ: dict[str, str], number: str) -> None:
    assert number == allocation_of(environ)


@pytest.mark.parametrize(
    ("partition", "nodes"), [(None, 5), ("gpu", 4), ("all", 5), ("no-such", None), ("gpu,all", None)]
)
def test_nodes_of_a_partition(partition: str | None, nodes: int | None) -> None:
    assert nodes == nodes_of(partition, "all* 3\nall* 2\ngpu 4\n")
    assert nodes_of(partition, "") is None


@pytest.mark.parametrize(
    ("state", "reason", "may_never_start"),
    [
        ("PENDING", "Resources", False),
        ("PENDING", "", False),
        ("PENDING", "PartitionNodeLimit", True),
        ("RUNNING", "PartitionNodeLimit", False),
    ],
)
def test_job_that_may_never_start(state: str, reason: str, may_never_start: bool) -> None:
    assert may_never_start == SlurmJob("7", state, reason).may_never_start
