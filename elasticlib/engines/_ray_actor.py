"""
A program behind a Ray actor: bytes to its standard input, bytes from its standard output.

Rules of this file: it runs in the actor's process, on a machine of the cluster. The program's standard input is its
lease: the pipe closes with the actor's process, whatever ends that. So nothing outlives the actor.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_CHUNK = 2**16
_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Variables that Ray sets in its running process, from the actor's CPUs and to a debugger that only an actor has."""


class PipedProgram:
    """``python ARGV --address ADDRESS``, with the address of this machine in the cluster."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        address = importlib.import_module("ray.util").get_node_ip_address()
        self._messages = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, *argv, "--address", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**variables(os.environ, _variables_at_start()), **environment},
            bufsize=0,
            start_new_session=True,
        )

    def node(self) -> str:
        """Return Ray's id of this machine."""
        return str(importlib.import_module("ray").get_runtime_context().get_node_id())

    def send(self, data: bytes) -> None:
        """Write *data* to the standard input; a program that has ended gets nothing."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        with contextlib.suppress(OSError, ValueError):
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def end_input(self) -> None:
        """Close the standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def read(self) -> bytes | str:
        """Return the next bytes of the standard output; at its end, a text that says how the program ended."""
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _CHUNK)
        return data or self._end()

    def _end(self) -> str:
        assert self._process.stdout is not None
        self._process.stdout.close()
        status = self._process.wait()
        with self._messages as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").split("\n")
        messages = [line.strip()[:300] for line in lines if line.strip()]
        return f"its program ended with status {status}{f': {messages[-1]}' if messages else ''}"


def variables(now: Mapping[str, str], at_start: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the program: those of the actor, with `_SET_BY_RAY` as they were at its start."""
    kept = {name: value for name, value in now.items() if name not in _SET_BY_RAY}
    return {**kept, **{name: at_start[name] for name in _SET_BY_RAY if name in at_start}}


def _variables_at_start() -> dict[str, str]:
    """Return the variables with which this process was started."""
    with open("/proc/self/environ", "rb") as file:
        fields = file.read().split(b"\0")
    pairs = [os.fsdecode(field).partition("=") for field in fields if b"=" in field]
    return {name: value for name, _, value in pairs}
