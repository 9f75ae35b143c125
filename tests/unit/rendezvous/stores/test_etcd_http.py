"""The etcd client's connections, with a server of the standard library in place of etcd."""

from __future__ import annotations

import contextlib
import http.server
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elasticlib.rendezvous.stores.etcd import _keeper
from elasticlib.rendezvous.stores.etcd._http import Line, Site

FD_SETSIZE = 1024
"""Number of file descriptors that ``select`` supports."""


class Answers(http.server.BaseHTTPRequestHandler):
    """Says through which connection it was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = f'{{"port": {self.client_address[1]}}}'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/and-close"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def line() -> Iterator[Line]:
    """A way to such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with contextlib.closing(Line(Site("127.0.0.1", server.server_port, "127.0.0.1"), 5.0)) as line:
            yield line
        server.shutdown()
        thread.join()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """1,100 descriptors are open, so that each further one has a number which ``select`` cannot count to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * FD_SETSIZE)), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_calls_share_a_connection_with_any_descriptor_number(line: Line) -> None:
    answers = [line.call("GET", "/").json() for _ in range(3)]

    assert answers[0] == answers[1] == answers[2]
    assert line._kept is not None
    assert line._kept.sock.fileno() > FD_SETSIZE


@pytest.mark.usefixtures("many_open_files")
def test_connection_closed_by_the_server_is_opened_again(line: Line) -> None:
    first = line.call("GET", "/and-close").json()
    assert line._kept is not None
    line._kept.sock.recv(1)  # its end is here

    assert first != line.call("GET", "/").json()


@pytest.mark.usefixtures("many_open_files")
def test_kept_command_ends_with_its_caller_however_many_files_are_open() -> None:
    reading, writing = os.pipe()
    assert reading > FD_SETSIZE
    kept = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with subprocess.Popen(
        [sys.executable, _keeper.__file__, str(reading), *kept],
        pass_fds=[reading],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        os.close(reading)
        os.close(writing)
        _, stderr = keeper.communicate(timeout=20)

    assert (signal.SIGTERM, "") == (keeper.returncode, stderr)
