"""
A client of the Debug Adapter Protocol that does what an IDE does with a breakpoint in all processes of a program.

https://microsoft.github.io/debug-adapter-protocol, and debugpy's event ``debugpyAttach``: for each child the client
opens one more connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from elasticlib.utils.distributed import get_free_port
from tests.waiting import wait_until

Reply = Callable[[Mapping[str, Any]], None]


@frozen
class Debugged:
    """Observations of a program that ran under the debugger."""

    status: int
    stdout: str
    stderr: str
    attached: list[str]
    """Names of the children that called back."""
    stops: list[tuple[str, str]]
    """Name of the function, and rank, of each stop at a breakpoint."""


@frozen
class _Seen:
    script: Path
    line: int
    attached: list[str] = field(factory=list)
    stops: list[tuple[str, str]] = field(factory=list)
    sessions: list[_Session] = field(factory=list)

    def close(self) -> None:
        """Close all sessions, so that the adapter ends: it waits for its clients to disconnect."""
        for session in self.sessions:
            session.close()


class _Session:
    """One connection to the adapter: one process under the debugger, which goes on from each breakpoint."""

    def __init__(self, seen: _Seen, port: int, attach: Mapping[str, Any]) -> None:
        self._seen, self._attach = seen, attach
        self._awaited: dict[int, Reply] = {}
        self._count = 0
        self._connection = _connected(port)
        seen.sessions.append(self)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._request("initialize", adapterID="test", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        self._request("attach", **self._attach)
        with self._connection, self._connection.makefile("rb") as file:
            while header := file.readline():
                length = int(header.partition(b":")[2])
                file.readline()
                self._take(json.loads(file.read(length)))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has gone first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _request(self, command: str, reply: Reply | None = None, **arguments: Any) -> None:
        self._count += 1
        if reply is not None:
            self._awaited[self._count] = reply
        message = {"seq": self._count, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _take(self, message: Mapping[str, Any]) -> None:
        body = message.get("body", {})
        if message["type"] == "response":
            self._awaited.pop(message["request_seq"], lambda _: None)(body)
        elif message.get("event") == "initialized":
            script, line = self._seen.script, self._seen.line
            self._request("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": line}])
            self._request("configurationDone")
        elif message.get("event") == "debugpyAttach":
            self._seen.attached.append(body["name"])
            _Session(self._seen, body["connect"]["port"], body)
        elif message.get("event") == "stopped":
            self._look(body["threadId"])

    def _look(self, thread: int) -> None:
        def with_stack(body: Mapping[str, Any]) -> None:
            frame = body["stackFrames"][0]

            def with_rank(value: Mapping[str, Any]) -> None:
                self._seen.stops.append((frame["name"], value["result"].strip("'")))
                self._request("continue", threadId=thread)

            self._request("evaluate", with_rank, expression="__import__('os').environ['RANK']", frameId=frame["id"])

        self._request("stackTrace", with_stack, threadId=thread, levels=1)


def _connected(port: int) -> socket.socket:
    """A connection to the adapter, once that listens."""
    found: list[socket.socket] = []

    def is_connected() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            found.append(socket.create_connection(("127.0.0.1", port)))
        return bool(found)

    wait_until(is_connected)
    return found[0]


def debug(script: Path, breakpoint_at: str, command: Sequence[str], cwd: Path) -> Debugged:
    """Run Python with *command* under debugpy; its breakpoint is the line of *script* that ends in *breakpoint_at*."""
    line = 1 + next(n for n, text in enumerate(script.read_text().splitlines()) if text.endswith(breakpoint_at))
    port = get_free_port()
    debugpy = ["-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    outputs = [cwd / "stdout", cwd / "stderr"]  # no pipes: the adapter holds them longer than the program
    with contextlib.ExitStack() as stack:
        stdout, stderr = (stack.enter_context(path.open("wb")) for path in outputs)
        process = subprocess.Popen([sys.executable, *debugpy, *command], cwd=cwd, stdout=stdout, stderr=stderr)
        stack.callback(process.kill)
        seen = stack.enter_context(contextlib.closing(_Seen(script, line)))
        attach = {"type": "python", "request": "attach", "connect": {"host": "127.0.0.1", "port": port}}
        _Session(seen, port, {**attach, "subProcess": True, "justMyCode": False})
        status = process.wait(120)
    return Debugged(status, *(path.read_text() for path in outputs), seen.attached, seen.stops)
