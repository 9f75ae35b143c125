"""`elastic_launch` on real processes: results, environment, restarts, logs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, DefaultLogsSpecs, LaunchConfig, Std, elastic_launch
from tests.process.launches import run_python

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

METHODS = ["forkserver", "spawn", "fork"]
BARE = {"preload": ()}
"""For workers that need no torch: their fork server starts in a moment."""


def launch(count: int, function: Any, *args: Any, **settings: Any) -> dict[int, Any]:
    """The results of *function* on *count* workers."""
    return elastic_launch(LaunchConfig(nproc_per_node=count, **settings), function)(*args)


def environment() -> dict[str, str]:
    """All variables of this worker."""
    return dict(os.environ)


def double(value: Any, times: int = 2) -> Any:
    """Works on anything that can be multiplied."""
    return value * times


def sum_of_ranks() -> int:
    """Return the all_reduce of all ranks; also proves that the group can be made."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


@pytest.mark.parametrize("method", METHODS)
def test_results_are_returned_by_global_rank(method: str) -> None:
    """Row 163, with keyword arguments too."""
    config = LaunchConfig(nproc_per_node=3, start_method=method, **BARE)  # type: ignore[arg-type]

    assert dict.fromkeys(range(3), "ababab") == elastic_launch(config, double)("ab", times=3)


@pytest.mark.parametrize("method", METHODS)
def test_result_of_any_size_is_returned(method: str) -> None:
    """Row 175: far more than any pipe holds."""
    results = launch(2, double, b"x" * 30_000_000, start_method=method, **BARE)

    assert [60_000_000, 60_000_000] == [len(value) for value in results.values()]


def test_a_script_a_module_and_a_program_give_none_by_rank(tmp_path: Path) -> None:
    """Row 164: commands have no return value."""
    script = tmp_path / "job.py"
    script.write_text("import sys; assert sys.argv[1:] == ['--x', '1']")

    assert {0: None, 1: None} == launch(2, str(script), "--x", 1, **BARE)
    assert {0: None} == launch(1, "this", module=True, logs_specs=DefaultLogsSpecs(redirects=Std.ALL), **BARE)
    assert {0: None} == launch(1, "true")


def test_workers_get_torchs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 046-059 on one node."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)

    seen = launch(2, environment, run_id="job-7", role="trainer", max_restarts=5, **BARE)

    for rank, values in seen.items():
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "trainer",
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "5",
            "TORCHELASTIC_RUN_ID": "job-7",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert expected == {name: values[name] for name in expected}
        assert values["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
    assert 1 == len({values["MASTER_PORT"] for values in seen.values()})


def test_an_inherited_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 058, and any other variable of the caller at the time of the call."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("A_VARIABLE_OF_MINE", "x=y\udcff")

    seen = launch(1, environment, **BARE)[0]

    assert ("0", "x=y\udcff") == (seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"], seen["A_VARIABLE_OF_MINE"])


def test_workers_may_host_the_store_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 064: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    assert {0: 1, 1: 1} == launch(2, sum_of_ranks)
    assert "False" == launch(1, environment)[0]["TORCHELASTIC_USE_AGENT_STORE"]


def fail_until(attempt: int, folder: str) -> tuple[int, str, str]:
    """Fails in each attempt before *attempt*; notes who ran when."""
    now = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(folder, f"{now}-{os.environ['RANK']}").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']}")
    if now < attempt and os.environ["RANK"] == "1":
        while not Path(folder, f"{now}-0").exists():
            time.sleep(0.002)
        raise ValueError(f"attempt {now}")
    if now < attempt:
        signal.pause()
    return now, os.environ["RANK"], os.environ["MASTER_PORT"]


@pytest.mark.parametrize("method", METHODS)
def test_all_workers_start_again_until_the_budget_is_used_up(method: str, tmp_path: Path) -> None:
    """Rows 117, 119: new processes, a new store, the count of restarts in the environment."""
    results = launch(2, fail_until, 2, str(tmp_path), max_restarts=2, start_method=method, **BARE)

    notes = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert [(2, "0"), (2, "1")] == [value[:2] for value in results.values()]
    assert {f"{attempt}-{rank}" for attempt in range(3) for rank in range(2)} == set(notes)
    assert 6 == len({pid for pid, _ in notes.values()})
    assert 3 == len({port for _, port in notes.values()})


def test_a_failure_with_no_restart_left_ends_the_job(tmp_path: Path) -> None:
    """Row 118: the error is that of the last attempt."""
    with pytest.raises(ChildFailedError, match="ValueError: attempt 1"):
        launch(2, fail_until, 9, str(tmp_path), max_restarts=1, **BARE)

    assert 4 == len(list(tmp_path.iterdir()))


def key_of_the_last_attempt() -> bool:
    """Return whether attempt 1 sees a key that attempt 0 wrote into the workers' store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        store.set("left behind", "1")
        store.get("left behind")
        sys.exit(1)
    return bool(store.check(["left behind"]))


def test_a_restart_finds_a_fresh_store() -> None:
    """Row 121: torch's own restarts fail on just that."""
    assert {0: False} == launch(1, key_of_the_last_attempt, max_restarts=1)


MOVES = """
import os, sys
from elasticlib import LaunchConfig, elastic_launch
def rank(): return os.environ["RANK"]
def meets():
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.add("came", 1) > 0
def launch(count, function):
    return elastic_launch(LaunchConfig(nproc_per_node=count, max_restarts=0, preload=()), function)()
if __name__ == "__main__":
    os.mkdir("first")
    os.chdir("first")
    launch(1, rank)
    os.chdir("..")
    os.rmdir("first")
    print({*launch("auto", meets).values()})
"""


def test_launch_works_once_the_folder_of_the_first_one_is_removed(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(MOVES)

    done = run_python("moves.py", cwd=tmp_path)

    assert ("{True}\n", 0) == (done.stdout, done.returncode), done.stderr


def write_lines(text: str) -> None:
    """A line on each stream, the last one by the C library's own descriptor and without an end."""
    print(f"out {text}")
    print(f"err {text}", file=sys.stderr)
    os.write(1, b"no newline")


@pytest.mark.parametrize("method", METHODS)
def test_redirected_streams_are_in_the_log_folder(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows 066, 086: files by attempt and rank, at the level of descriptors; nothing on the console."""
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)

    launch(2, write_lines, "hello", logs_specs=logs, run_id="r/1", start_method=method, **BARE)

    (run,) = tmp_path.iterdir()
    for rank in ("0", "1"):
        assert "out hello\nno newline" == (run / "attempt_0" / rank / "stdout.log").read_text()
        assert "err hello\n" == (run / "attempt_0" / rank / "stderr.log").read_text()
    assert ("", "") == capfd.readouterr()


def test_tee_reaches_the_console_with_prefixes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows 070, 073, 076: whole lines, the last one too; only the ranks that the filter names."""
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL, local_ranks_filter={0})

    launch(2, write_lines, "hello", logs_specs=logs, role="trainer", **BARE)

    out, err = capfd.readouterr()
    assert "[trainer0]:out hello\n[trainer0]:no newline\n" == out
    assert "[trainer0]:err hello\n" == err
    assert 2 == len(list(tmp_path.glob("*/attempt_0/*/stdout.log")))


def test_tee_prints_to_the_streams_that_python_prints_to(capsys: pytest.CaptureFixture[str]) -> None:
    """In notebooks and under test runners ``sys.stdout`` is not descriptor 1."""
    launch(1, write_lines, "hello", logs_specs=DefaultLogsSpecs(tee=Std.OUT), **BARE)

    assert "[default_role0]:out hello\n[default_role0]:no newline\n" == capsys.readouterr().out


def test_an_attempts_logs_are_kept(tmp_path: Path) -> None:
    """Row 081."""
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    notes = tmp_path / "notes"
    notes.mkdir()

    launch(2, fail_until, 1, str(notes), max_restarts=1, logs_specs=logs, **BARE)

    assert "ValueError: attempt 0" in next((tmp_path / "logs").glob("*/attempt_0/1/stderr.log")).read_text()
    assert "" == next((tmp_path / "logs").glob("*/attempt_1/1/stderr.log")).read_text()


def test_launches_side_by_side_each_form_a_group_of_their_own() -> None:
    """Row 062: calls from several threads of one program."""
    results: dict[int, dict[int, int]] = {}

    def one(count: int) -> None:
        results[count] = launch(count, sum_of_ranks)

    threads = [threading.Thread(target=one, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {count: dict.fromkeys(range(count), sum(range(count))) for count in (1, 2, 3)} == results


def served(port: int) -> tuple[str, int]:
    """Which round it is, once a process group stood on the port that was asked for; fails in the first two."""
    assert int(os.environ["MASTER_PORT"]) == port
    total = sum_of_ranks()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] in ("0", "1"):
        raise ValueError("once more")
    return os.environ["TORCHELASTIC_RESTART_COUNT"], total


@pytest.mark.parametrize("method", METHODS)
def test_every_round_has_the_requested_port(method: str) -> None:
    """Nobody holds the listener of the round before: neither who was forked from the caller, nor its reaper."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    results = launch(
        2,
        served,
        port,
        max_restarts=2,
        start_method=method,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
    )

    assert dict.fromkeys((0, 1), ("2", 1)) == results


def open_sockets(pid: int) -> set[str]:
    """The sockets that a process holds."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def holders() -> tuple[set[str], set[str], set[str]]:
    """The sockets of this worker, of its spawner, and of the reaper above them."""
    spawner = os.getppid()
    reaper = int(Path(f"/proc/{spawner}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return open_sockets(os.getpid()), open_sockets(spawner), open_sockets(reaper)


def test_workers_forked_from_the_caller_keep_its_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = os.readlink(f"/proc/self/fd/{listener.fileno()}")
        worker, spawner, reaper = launch(1, holders, start_method="fork")[0]

    assert name in worker
    assert worker <= spawner
    assert reaper == set()
