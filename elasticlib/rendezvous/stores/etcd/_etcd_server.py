"""
A private etcd server, for tests and experiments.

Rules of this file: the server has its own folder and its own ports, on loopback only. It dies with
the program that started it, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from typing import IO, Any

from elasticlib._clock import monotonic, sleep
from elasticlib.errors import ConfigError, RendezvousConnectionError, StartError
from elasticlib.processes import unseen_by_debugger
from elasticlib.rendezvous.stores.etcd import _keeper
from elasticlib.rendezvous.stores.etcd._http import Line, Site
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys
from elasticlib.utils import get_socket_with_port

_log = logging.getLogger("elasticlib")

_HOST = "127.0.0.1"
_CALL_LIMIT = 5.0
_POLL = 0.02


def find_etcd() -> str:
    """
    Return the etcd program: `TORCHELASTIC_ETCD_BINARY_PATH`, else that on the PATH; raise
    `ConfigError` without one.
    """
    named = os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH")
    found = shutil.which(named or "etcd")
    if found is None:
        where = f"TORCHELASTIC_ETCD_BINARY_PATH={named!r} is not a program" if named else "etcd is not on the PATH"
        raise ConfigError(f"{where}: install etcd, for example with apt-get install etcd-server")
    return found


def find_free_port() -> socket.socket:
    """
    Return a bound socket on a free port of this machine; close it before another program binds the
    port.
    """
    return get_socket_with_port()


def stop_etcd(subprocess: subprocess.Popen[bytes], data_dir: str | None = None) -> None:
    """End the server in *subprocess*, if it still runs, and delete *data_dir* if given."""
    if subprocess.poll() is None:
        subprocess.terminate()
        subprocess.wait()
    if data_dir is not None:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """
    One etcd process; `start` it, `stop` it, or use it in a ``with`` statement. (torch:
    ``torch.distributed.elastic.rendezvous.etcd_server.EtcdServer``)
    """

    def __init__(self, data_dir: str | None = None) -> None:
        """Store data in *data_dir*, which is kept, or in a temporary folder."""
        self._given_dir = data_dir
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._dir = ""
        self._owner = os.getpid()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """
        Return once the server answers. If another process took the port meanwhile, try
        *num_retries* more times.

        Raises `ConfigError` without an etcd program, `StartError` when it does not answer.
        """
        if self._process is not None:
            _log.warning("this etcd server is already running: start() has no effect")
            return

        program = find_etcd()
        self._owner = os.getpid()
        deadline = monotonic() + timeout
        why = ""
        for _ in range(num_retries + 1):
            why = self._attempt(program, deadline, stderr)
            if not why:
                atexit.register(self.stop)
                return
            self.stop()
            if monotonic() >= deadline:
                break

        raise StartError(f"{program} did not start: {why}")

    def stop(self) -> None:
        """
        End the server and delete its temporary folder; may be called twice. Has no effect in a
        forked child.
        """
        if os.getpid() != self._owner:
            return

        process, self._process = self._process, None
        if process is not None:
            # communicate() closes the pipe first, which ends the server.
            process.communicate()

        if self._dir and self._given_dir is None:
            shutil.rmtree(self._dir, ignore_errors=True)
        self._dir = ""
        atexit.unregister(self.stop)

    def get_host(self) -> str:
        """Return the address on which it listens."""
        return _HOST

    def get_port(self) -> int:
        """Return its port; -1 before it was started."""
        return self._port

    def get_endpoint(self) -> str:
        """Return ``host:port``, as `rdzv_endpoint` expects it."""
        return f"{_HOST}:{self._port}"

    def get_client(self) -> V3Keys:
        """Return a connection to its v3 keys, for one thread."""
        return V3Keys(Line(Site(_HOST, self._port, _HOST), _CALL_LIMIT))

    def _attempt(self, program: str, deadline: float, stderr: int | IO[Any] | None) -> str:
        """Start the server once; return the reason for a failure, empty once it answers."""
        self._dir = self._given_dir or tempfile.mkdtemp(prefix="elasticlib_etcd_")
        self._port, peer = _free_ports()
        client, peers = f"http://{_HOST}:{self._port}", f"http://{_HOST}:{peer}"
        name = f"etcd-{uuid.uuid4().hex[:8]}"
        command = [
            *(program, "--name", name, "--data-dir", self._dir),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"{name}={peers}"),
        ]
        with unseen_by_debugger():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _keeper.__file__, "0", *command],
                # The server's keeper reads this pipe, which closes when this program ends.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
                # Ctrl-C at the terminal is for the program alone, which may still need the server.
                start_new_session=True,
            )

        while self._process.poll() is None:
            if self._answers():
                return ""
            if monotonic() >= deadline:
                return "it did not answer in time"
            sleep(_POLL)

        return f"it ended with exit status {self._process.returncode}; start(stderr=None) hides its output"

    def _answers(self) -> bool:
        line = Line(Site(_HOST, self._port, _HOST), _CALL_LIMIT)
        with contextlib.closing(line), contextlib.suppress(RendezvousConnectionError):
            return line.call("GET", "/health").json().get("health") == "true"
        return False


def _free_ports() -> tuple[int, int]:
    # Both are open at once, so they differ.
    with socket.create_server((_HOST, 0)) as one, socket.create_server((_HOST, 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
