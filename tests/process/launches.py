"""Commands of jobs that tests let go on, end, and listen to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticlib.workers.child._start_spec import StartSpec

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
WORK = "import sys; print('at work', flush=True); sys.stdin.read(); print('done', flush=True)"
"""A worker that works until its standard input ends."""
WORKER = (sys.executable, "-c", WORK)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    """The variables of a program that finds elasticlib and the tests wherever it runs."""
    return {**os.environ, "PYTHONPATH": str(ROOT)} | variables


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; *options* are those of `subprocess.run`."""
    options = {"env": environment(), "timeout": 120, "capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([sys.executable, *arguments], **options)  # type: ignore[no-any-return]


def children(pid: int) -> list[int]:
    """Processes whose parent is *pid*, whichever of its threads made them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for path in lists for each in path.read_text().split()]


def hold_second_start(monkeypatch: pytest.MonkeyPatch, begun: Path, seconds: float) -> None:
    """In the first round of a job that forks this program, have the start of worker 1 take time, and make *begun*."""
    from elasticlib.workers.spawner._spawner import Spawner

    start = Spawner._start_worker

    def start_slowly(spawner: Spawner, spec: StartSpec, streams: list[int]) -> None:
        if spec.local_rank == 1 and not begun.exists():
            begun.touch()
            time.sleep(seconds)  # stands for a log file on a slow file system
        start(spawner, spec, streams)

    monkeypatch.setattr(Spawner, "_start_worker", start_slowly)


class Program:
    """Python with these arguments, whose lines are read as they are written."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options = {"env": environment(), "text": True, **pipes, **options}
        self.popen: subprocess.Popen[str] = subprocess.Popen([sys.executable, *arguments], **options)
        self.log: list[str] = []
        self._news = threading.Condition()
        self._silent = 0
        """Number of the program's streams that have ended."""
        self._readers = [
            threading.Thread(target=self._read, args=(file,)) for file in (self.popen.stdout, self.popen.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            with self._news:
                self.log.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._silent += 1
            self._news.notify_all()

    def wait_for_line(self, text: str, times: int = 1) -> str:
        """The line that holds *text*, once it is there; the last one of so many."""

        def found() -> list[str]:
            return [line for line in self.log if text in line]

        with self._news:
            assert self._news.wait_for(lambda: self._silent == 2 or len(found()) >= times, LIMIT)
            assert len(found()) >= times, self.log
            return found()[times - 1]

    def rendezvous_process(self) -> int:
        """The process that keeps its contact, and its store where it hosts one."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(self.popen.pid)}
        [pid] = [pid for pid, command in commands.items() if b"sidecar._bridge" in command]
        return pid

    def ends(self, limit: float = LIMIT) -> tuple[int, str]:
        """Its exit status, and all that it wrote."""
        status = self.popen.wait(limit)
        for reader in self._readers:
            reader.join()
        return status, "\n".join(self.log)

    def close(self) -> None:
        self.popen.kill()
        self.ends()
        for file in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert file is not None
            file.close()


class Launch(Program):
    """``elasticrun`` of a node of a job of one or two nodes, with one worker, which works until it is told to end."""

    def __init__(
        self, port: int, run_id: str, options: Sequence[str] = (), program: Sequence[str] = WORKER, **conf: object
    ) -> None:
        self.port = port
        conf = {"wait_for": "min", "heartbeat_timeout": 10, "reconnect_timeout": 10, **conf}
        super().__init__(
            *("-m", "elasticlib.run", "--nnodes", "1:2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", run_id, "--max-restarts", "0"),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())),
            *(*options, "--no-python", *program),
        )

    def at_work(self) -> Launch:
        self.wait_for_line("at work")
        return self

    def finish(self) -> None:
        """Let its worker end well."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.wait_for_line("done")


class Commands:
    """Launches of ``elasticrun`` with two workers a node, as often as a test wants."""

    def __init__(self) -> None:
        self._started: list[Program] = []

    def __call__(self, script: str, *options: str, **variables: str) -> Program:
        """Start a *script* of the folder ``scripts``, with more *options* and *variables*."""
        path = str(Path(__file__).parent / "scripts" / script)
        line = ("-m", "elasticlib.run", "--nproc-per-node", "2", "--preload", "", *options, path)
        program = Program(*line, env=environment(**variables), start_new_session=True)
        self._started.append(program)
        return program

    def close(self) -> None:
        """End those that still run."""
        for each in self._started:
            each.close()
