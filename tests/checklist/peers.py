"""
Launchers under test, behind one set of methods: elasticlib, torchrun, and one that does nothing.

Rules of this file: all facts that a row needs about a launcher are here, so that a row never asks
for its name. Each process that a row starts carries a mark in its environment. The mark identifies
the process, which is ended with the row.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import MagicMock

from attrs import define, field, frozen

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds that any single command may take."""
MARK = "ELASTICLIB_CHECKLIST_MARK"

REPORT = """
import json, os, sys
with open(f"report{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.part", "w") as file:
    facts = {"argv": sys.argv, "name": __name__, "pid": os.getpid(), "executable": sys.executable}
    json.dump({"env": dict(os.environ), **facts}, file)
os.rename(file.name, file.name.removesuffix(".part") + ".json")
"""
"""A worker's script that tells what it sees; `Peer.reports` reads it."""


@frozen
class Launcher:
    """One of the things that the rows are run with."""

    name: str
    command: tuple[str, ...]
    """The command line before its options."""
    legacy: tuple[str, ...]
    """The same for the legacy command."""
    elastic: str
    """The package that stands for ``torch.distributed.elastic``."""
    distributed: str
    """The package that stands for ``torch.distributed`` (launcher, run, launch, argparse_util)."""
    numa: str


PYTHON = sys.executable
"""The interpreter of the rows' programs: the peer is the torchrun of the interpreter that runs the rows."""
ELASTICLIB = Launcher(
    "elasticlib",
    (PYTHON, "-m", "elasticlib.run"),
    (PYTHON, "-m", "elasticlib.launch"),
    "elasticlib.elastic",
    "elasticlib",
    "elasticlib.numa",
)
TORCHRUN = Launcher(
    "torchrun",
    (PYTHON, "-m", "torch.distributed.run"),
    (PYTHON, "-m", "torch.distributed.launch"),
    "torch.distributed.elastic",
    "torch.distributed",
    "torch.numa",
)
NOTHING = Launcher("nothing", (PYTHON, "-c", "pass"), (PYTHON, "-c", "pass"), "", "", "")
"""A launcher that takes everything and does nothing: no row may pass with it."""
LAUNCHERS = {each.name: each for each in (ELASTICLIB, TORCHRUN, NOTHING)}

_OF_DISTRIBUTED = ("launcher", "run", "launch", "argparse_util")


@frozen
class Finished:
    """Result of a command."""

    returncode: int
    out: str
    err: str
    seconds: float


@frozen
class Seen:
    """Facts about one worker, written by `REPORT`."""

    rank: int
    restart: int
    env: dict[str, str]
    argv: list[str]
    name: str
    pid: int
    executable: str


@define
class Peer:
    """The launcher under test, in a folder of its own where its commands run."""

    launcher: Launcher
    folder: pathlib.Path
    _mark: str = field(factory=lambda: uuid.uuid4().hex, init=False)
    _started: list[subprocess.Popen[str]] = field(factory=list, init=False)

    # Its API.

    def name_of(self, module: str) -> str:
        """The full name of torch's *module*, such as ``multiprocessing.errors`` or ``run``, in this launcher."""
        first, _, rest = module.partition(".")
        if first == "numa":
            return f"{self.launcher.numa}.{rest}" if rest else self.launcher.numa
        package = self.launcher.distributed if first in _OF_DISTRIBUTED else self.launcher.elastic
        return f"{package}.{module}"

    def module(self, module: str) -> Any:
        """Torch's *module*, or its counterpart, imported; with nothing, an object that takes every call."""
        return MagicMock(name=module) if self.launcher is NOTHING else importlib.import_module(self.name_of(module))

    def python(self, code: str, *args: str, env: Mapping[str, str] | None = None, limit: float = LIMIT) -> Finished:
        """Run a program; ``{elastic}``, ``{distributed}`` and ``{numa}`` in it stand for the launcher's packages."""
        path = self.script(code, f"program{len(self._started)}.py")
        command = (PYTHON, "-c", "pass") if self.launcher is NOTHING else (PYTHON, path)
        return self._finish(self._start((*command, *args), env), limit)

    def start_python(self, code: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program as `python` does, with its stdin in a pipe."""
        path = self.script(code, f"program{len(self._started)}.py")
        command = (PYTHON, "-c", "pass") if self.launcher is NOTHING else (PYTHON, path)
        return self._start((*command, *args), env, subprocess.PIPE)

    # Its command line.

    def script(self, code: str, name: str = "script.py") -> str:
        """Write a file for workers or for `python`; returns its name in `folder`."""
        packages = {"elastic": self.launcher.elastic, "distributed": self.launcher.distributed}
        for placeholder, package in {**packages, "numa": self.launcher.numa}.items():
            code = code.replace(f"{{{placeholder}}}", package)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return name

    def start(self, *args: str, env: Mapping[str, str] | None = None, legacy: bool = False) -> subprocess.Popen[str]:
        """Start the command in `folder`, with its output in pipes."""
        return self._start((*(self.launcher.legacy if legacy else self.launcher.command), *args), env)

    def run(
        self, *args: str, env: Mapping[str, str] | None = None, legacy: bool = False, limit: float = LIMIT
    ) -> Finished:
        """Run the command to its end."""
        return self._finish(self.start(*args, env=env, legacy=legacy), limit)

    def finish(self, process: subprocess.Popen[str], limit: float = LIMIT) -> Finished:
        """Wait for the end of a command that `start` started. Raises `TimeoutExpired`."""
        return self._finish(process, limit)

    def report(self, *args: str, env: Mapping[str, str] | None = None) -> list[Seen]:
        """Run workers that tell what they see; *args* are the launcher's options. The run must end well."""
        done = self.run(*args, self.script(REPORT), env=env)
        assert done.returncode == 0, done.err
        return self.reports()

    def reports(self) -> list[Seen]:
        """Return the reports of workers that ran `REPORT`, by restart and rank."""
        found = []
        for path in self.folder.glob("report*.json"):
            rank, restart = path.name.removeprefix("report").removesuffix(".json").split(".")
            found.append(Seen(int(rank), int(restart), **json.loads(path.read_text())))
        return sorted(found, key=lambda seen: (seen.restart, seen.rank))

    def parse(self, *args: str) -> tuple[Any, Any, list[str]]:
        """(configuration, entry point, arguments) of a command line in this process' environment."""
        run = self.module("run")
        if self.launcher is NOTHING:
            return run, run, []
        config, entry, rest = run.config_from_args(run.parse_args(list(args)))
        return config, entry, list(rest)

    def _start(
        self, command: Iterable[str], env: Mapping[str, str] | None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
        for name in ("LOGLEVEL", "OMP_NUM_THREADS"):
            inherited.pop(name, None)
        process = subprocess.Popen(
            tuple(command),
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": str(ROOT), MARK: self._mark, **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._started.append(process)
        return process

    @staticmethod
    def _finish(process: subprocess.Popen[str], limit: float) -> Finished:
        begun = time.monotonic()
        out, err = process.communicate(timeout=limit)
        return Finished(process.returncode, out, err, time.monotonic() - begun)

    # What it leaves.

    def alive(self) -> set[int]:
        """Pids of all processes that descend from commands of this row, wherever they hang in the tree by now."""
        found = set()
        wanted = f"{MARK}={self._mark}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/environ", "rb") as file:
                        marked = wanted in file.read().split(b"\0")
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        state = file.read().rpartition(b")")[2].split()[0]
                except OSError:
                    continue
                if marked and state not in (b"Z", b"X"):
                    found.add(int(entry))
        return found

    def wait_until(self, condition: Callable[[], object], limit: float = 30.0) -> bool:
        """Return whether *condition* becomes true within *limit* seconds."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End all that the row left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for _ in range(50):
            pids = self.alive()
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        for process in self._started:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
