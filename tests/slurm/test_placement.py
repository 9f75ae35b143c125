"""Steps of a real Slurm: all that is not given comes from the step, and only where the step means one job."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster, cluster, missing
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
seen = os.environ["GROUP_RANK"], os.environ["SLURM_PROCID"], f"{total.item():g}", os.environ["TORCHELASTIC_RUN_ID"]
print("trained", *seen, "\\n", end="", flush=True)
"""
"""Says its node's rank, its task's number, the number of ranks, and the job's id."""

FUNCTION = """
import os, sys
from elasticlib import LaunchConfig, elastic_launch
def train():
    return os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RUN_ID"]
if __name__ == "__main__":
    config = LaunchConfig(min_nodes=sys.argv[1] if sys.argv[1] == "all" else 1, nproc_per_node=1)
    for rank, (world, run_id) in elastic_launch(config, train)().items():
        print("trained", rank, os.environ["SLURM_PROCID"], world, run_id, "\\n", end="", flush=True)
"""

ONE_EACH = ("--ntasks-per-node=1", "elasticrun")


@pytest.fixture
def train(tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return str(script)


def trained(output: str) -> list[tuple[str, ...]]:
    """[(node rank, task, ranks of the job, its id)], in order."""
    return sorted(re.findall(r"^trained (\S+) (\S+) (\S+) (\S+)", output, re.MULTILINE))


def of_one_job(output: str, nodes: int) -> str:
    """Return the id of the job that all *nodes* trained in, in the order of their tasks."""
    found = trained(output)
    [run_id] = {row[3] for row in found}
    assert [(str(node), str(node), str(nodes), run_id) for node in range(nodes)] == found, output
    return run_id


def on_terminal(slurm: Cluster, *command: str) -> str:
    """Return the output of *command* on a terminal."""
    line = slurm.head.entered("script", "-qefc", " ".join(command), "/dev/null")
    done = subprocess.run(line, env=slurm.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.replace("\r", "")


def test_a_step_of_four_nodes_needs_no_option(slurm: Cluster, train: str) -> None:
    output = slurm.run("srun", "-N4", *ONE_EACH, train)

    run_id = of_one_job(output, 4)
    assert re.fullmatch(r"\d+\.0\.0", run_id)
    port = 20000 + int(run_id.split(".")[0]) * 61 % 12000
    assert 1 == output.count(f"4 nodes, endpoint m1:{port}, id {run_id}"), output


def test_a_function_runs_on_all_nodes_of_a_step(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FUNCTION)

    output = slurm.run("srun", "-N3", "--ntasks-per-node=1", "python", str(script), "all")

    of_one_job(output, 3)


def test_a_function_with_one_node_stays_on_it(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FUNCTION)

    output = slurm.run("srun", "-N2", "--ntasks-per-node=1", "python", str(script), "1")

    assert [("0", "0", "1"), ("0", "1", "1")] == [row[:3] for row in trained(output)], output


def test_a_heterogeneous_step_is_one_job(slurm: Cluster, train: str) -> None:
    output = slurm.run(
        "srun", "-N1", "-n1", "elasticrun", train, ":", "-N2", "--ntasks-per-node=1", "elasticrun", train
    )

    of_one_job(output, 3)


def test_elements_of_an_array_share_nodes_and_no_job(slurm: Cluster, train: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun elasticrun {train}\n")

    job = slurm.submit(script, "--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append")
    job.wait_for_output("trained", times=4)

    rows = trained(job.output)
    assert 2 == len({row[3] for row in rows}), job.output
    assert {"2"} == {row[2] for row in rows}, job.output
    job.ends()


def test_a_requeued_job_has_another_id(slurm: Cluster, train: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    again = '[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }'
    script.write_text(f"#!/bin/bash\nsrun elasticrun {train}\n{again}\n")
    job = slurm.submit(script, "--requeue", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append")
    job.wait_for_output("trained", times=2)
    wait_until(lambda: job.facts()["JobState"] == "PENDING", what=lambda: job.output)
    job.start_again()

    job.wait_for_output("trained", times=4)

    assert {f"{job.number}.0.0", f"{job.number}.0.1"} == {row[3] for row in trained(job.output)}
    job.ends()


def test_two_tasks_on_a_node_are_refused(slurm: Cluster, train: str) -> None:
    output = slurm.run("srun", "-N2", "--ntasks-per-node=2", "elasticrun", train, check=False)

    assert 4 == output.count("4 tasks on 2 nodes"), output
    assert [] == trained(output)


def test_engine_none_starts_a_job_on_each_node(slurm: Cluster, train: str) -> None:
    output = slurm.run("srun", "-N2", *ONE_EACH, "--engine", "none", train)

    assert ["1", "1"] == [row[2] for row in trained(output)], output
    assert "separate jobs" not in output


def test_a_terminal_of_several_nodes_trains_on_one(slurm: Cluster, train: str) -> None:
    output = on_terminal(slurm, "srun", "-N2", "--pty", "bash", "-c", f"'elasticrun {train}'")

    assert {"1"} == {row[2] for row in trained(output)}, output
    assert 1 == output.count("2 separate jobs"), output


def test_the_shell_of_an_allocation_trains_on_its_node(slurm: Cluster, train: str) -> None:
    output = slurm.run("salloc", "-N2", "env", "SLURM_PROCID=-", "elasticrun", train)

    assert [("0", "-", "1")] == [row[:3] for row in trained(output)], output


def test_a_worker_of_a_step_starts_a_job_of_its_own(slurm: Cluster, train: str, tmp_path: Path) -> None:
    outer = tmp_path / "outer.py"
    outer.write_text(f"import subprocess\nsubprocess.run(['elasticrun', {train!r}], check=True)\n")

    output = slurm.run("srun", "-N2", *ONE_EACH, str(outer))

    assert ["1", "1"] == [row[2] for row in trained(output)], output


def test_tests_on_ranks_stay_on_their_node(slurm: Cluster, tmp_path: Path) -> None:
    tests = tmp_path / "test_ranks.py"
    tests.write_text(
        "import os, pytest\n"
        "@pytest.mark.elastic(nproc=2)\n"
        "def test_world():\n"
        "    assert os.environ['WORLD_SIZE'] == '2'\n"
    )

    output = slurm.run("srun", "-N2", "--ntasks-per-node=1", "python", "-m", "pytest", "-q", str(tests))

    assert 2 == output.count("1 passed"), output


@pytest.mark.parametrize("alone", [0, 1])
def test_a_node_alone_names_the_missing_ones(slurm: Cluster, train: str, tmp_path: Path, alone: int) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, subprocess, sys\n"
        f"if os.environ['SLURM_PROCID'] == '{alone}':\n"
        f"    sys.exit(subprocess.run(['elasticrun', '--rdzv-conf', 'join_timeout=16', {train!r}]).returncode)\n"
    )

    # By name: the nodes of the test before may still be busy with its end.
    nodes = ("--nodelist=m1,m2,m3", "-N3", "--ntasks-per-node=1")
    output = slurm.run("srun", *nodes, "--wait=0", "python", str(driver), check=False)

    assert [] == trained(output)
    missing_nodes = "m2, m3" if alone == 0 else "m1"
    assert re.search(rf"has waited (5|15) s .*{missing_nodes}.*--engine none", output), output


def test_names_that_do_not_resolve_need_no_option(train: str) -> None:
    if why := missing():
        pytest.skip(why)
    with cluster(2, prefix="unknown") as slurm:
        output = slurm.run("srun", "-N2", *ONE_EACH, train)

        of_one_job(output, 2)
        assert "endpoint unknown1" not in output, output
