"""An allocation is given back only if its batch script was on the lost machine, and the step's srun is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elasticlib.engines import _lost_script, engine_context, release_after_loss
from elasticlib.engines._lost_script import release_command
from tests.unit.engines import recorded

BATCH = {"JobId": "1", "JobState": "RUNNING", "BatchFlag": "1", "BatchHost": "n1", "Requeue": "0"}


@pytest.mark.parametrize(
    ("job", "command"),
    [
        (BATCH, ("scancel", "1")),
        (BATCH | {"Requeue": "1"}, ("scancel", "1")),
        (BATCH | {"BatchHost": "n2"}, ()),
        (BATCH | {"BatchFlag": "0"}, ()),
        (BATCH | {"JobState": "COMPLETING"}, ()),
        ({}, ()),
    ],
)
def test_only_a_running_job_whose_script_is_lost_is_given_back(job: dict[str, str], command: tuple[str, ...]) -> None:
    assert command == release_command("1", job, "n1")


@pytest.fixture
def release(tmp_path: Path) -> Callable[..., str]:
    """Call `release_after_loss` with programs in place of Slurm's, whose srun prints *witness*."""

    def call(port: int, *, rank: int = 1, witness: str = "false", node: str = "", more: Mapping[str, str] = {}) -> str:
        shown = " ".join(f"{name}={value}" for name, value in BATCH.items())
        for name, script in {
            "scontrol": f"case $3 in node) {node};; *) echo '{shown}';; esac",
            "scancel": f"touch {tmp_path}/done",
            "srun": witness,
        }.items():
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        step = {**recorded.STEP, **more, "SLURM_NODEID": str(rank), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        step |= {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_STEP_LAUNCHER_PORT": str(port)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", step["PATH"])
            command = release_after_loss(step, engine_context(step, now=0.0))
        assert bool(command) is (tmp_path / "done").exists()
        return command

    return call


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_job_of_an_srun_that_has_ended_is_given_back(release: Callable[..., str]) -> None:
    assert "scancel 1" == release(free_port())


def test_the_job_of_an_srun_that_lives_stays(release: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "" == release(server.getsockname()[1])


def test_two_of_the_survivors_ask(release: Callable[..., str]) -> None:
    assert "" == release(free_port(), rank=3)


@pytest.mark.parametrize(
    ("witness", "command"), [("echo unreachable", "scancel 1"), ("true", ""), ("false", ""), ("exec not-there", "")]
)
def test_unreachable_machine_is_lost_only_if_another_node_confirms(
    release: Callable[..., str], witness: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)

    assert command == release(1, witness=witness)


OF_TWO = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("states", "command"),
    [
        (["ALLOCATED", "ALLOCATED*"], "scancel 1"),
        (["DOWN"], "scancel 1"),
        (["ALLOCATED+NOT_RESPONDING"], "scancel 1"),
        (["ALLOCATED"], ""),
        ([""], ""),
    ],
)
def test_slurm_is_the_witness_of_a_step_of_two_nodes(
    release: Callable[..., str], states: list[str], command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def connect(*_: object) -> None:
        raise TimeoutError

    def look_again(_: float) -> None:
        file.write_text(f"State={rest.pop(0) if rest else first}")

    first, *rest = states
    file = tmp_path / "state"
    file.write_text(f"State={first}")
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(_lost_script, "sleep", look_again)
    monkeypatch.setattr(_lost_script, "monotonic", lambda: float(next(clock)))

    assert command == release(1, node=f"cat {file}", more=OF_TWO)
