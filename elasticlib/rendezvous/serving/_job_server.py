"""
A server of jobs: a store at an endpoint, and a coordinator for each job that its nodes ask for.

Rules of this file: one thread answers all requests; each job has its own. What strangers write is refused, and logged
a few times a minute. `_job_table` decides.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress

from attrs import Factory, define, evolve, field
from typing_extensions import Self, assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib._untrusted import Refusals
from elasticlib.errors import (
    ConfigError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    StartError,
)
from elasticlib.processes import start_thread
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._binding import ANYWHERE, bind_endpoint, listen, loopback, outward_address
from elasticlib.rendezvous.net._endpoint import spell
from elasticlib.rendezvous.net._resolver import resolve
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.serving._hosted_job import HostedJob
from elasticlib.rendezvous.serving._job_table import Admit, Begin, Decline, Drop, JobTable
from elasticlib.rendezvous.serving._requests import (
    MARK,
    NO_JOB,
    OpenDeclined,
    Opened,
    OpenJob,
    ServerMark,
    answer_key,
    encode,
)
from elasticlib.rendezvous.serving._settings import ServerSettings
from elasticlib.rendezvous.stores._c10d import CLONE, LOOK_UP, START, C10dBackend
from elasticlib.rendezvous.stores._torch_store import SERVES, StoreExchange, full_key

_log = logging.getLogger("elasticlib")

_REMIND = 10.0
"""Seconds after which the server writes its mark again, in case a stranger has removed it."""
_GOODBYE = 5.0
"""Seconds that nodes have to read that the server ends."""
_OWN_END = 2.0
"""Seconds for the end of the server's own thread."""
_UNREAD = 256
"""Answers that are kept for nodes which have not read them; the oldest are removed."""


@define(eq=False)
class JobServer:
    """Coordinates jobs of other processes' nodes, from `start` to `close`."""

    name: str
    endpoint: str
    """Address for the nodes."""
    _backend: C10dBackend
    _desk: StoreExchange
    _table: JobTable
    _failed: Callable[[str], None]
    _clock: Clock = monotonic
    _lock: threading.Lock = Factory(threading.Lock)
    """Held while `_table`, `_jobs` and `_closing` change."""
    _jobs: dict[str, HostedJob] = Factory(dict)
    _closing: bool = False
    _refusals: Refusals = Factory(Refusals)
    _handled: int = 0
    """Number of the last entry of the inbox that was handled."""
    _unread: deque[str] = Factory(deque)
    """Keys of the last answers."""
    _thread: threading.Thread = field(init=False)

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        *,
        failed: Callable[[str], None] = lambda why: None,
    ) -> Self:
        """
        Return a server that listens.

        *failed* gets the reason if the server's own thread ends before `close`. Raises `ConfigError` for an address
        that it cannot listen at.
        """
        host = settings.host
        listener = _listen(host, settings.port)
        name = node_name()
        mark = {full_key(NO_JOB, MARK): encode(ServerMark(name)).decode("ascii")}
        reached_at = spell(host or loopback(), listener.getsockname()[1])
        job = NodeJob(run_id=NO_JOB, node=name, backend="c10d", endpoint=reached_at)
        backend = C10dBackend(job, facts=mark)
        backend.listening = listener
        try:
            backend.serve(monotonic() + START)
            desk = backend.dial(CLONE)
        except BaseException:
            backend.close()
            raise

        assert isinstance(desk, StoreExchange)
        endpoint = spell(host or outward_address() or loopback(), backend.port)
        keys = [None if token is None else key_of(token) for token in settings.tokens]
        server = cls(name, endpoint, backend, desk, JobTable(settings.max_jobs, keys), failed)
        server._begin_to_answer()
        return server

    def close(self, why: str) -> None:
        """End all jobs because the server ends, with the reason *why*; may be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            jobs = list(self._jobs.values())

        text = f"the server {self.name} at {self.endpoint}, which coordinated the job, ended: {why}"
        for job in jobs:
            job.host.abandon(text)

        # Once their nodes have read it.
        deadline = self._clock() + _GOODBYE
        for job in jobs:
            job.close(max(0.0, deadline - self._clock()))

        self._end_thread()
        self._backend.close()

    def _begin_to_answer(self) -> None:
        self._thread = threading.Thread(target=self._answer_all, name="elasticlib-server", daemon=True)
        start_thread(self._thread)

    def _end_thread(self) -> None:
        with suppress(RendezvousError), closing(self._backend.dial(_OWN_END)) as own:
            # Ends its wait for the next request.
            own.post(b"")
        self._thread.join(_OWN_END)

    # The thread.

    def _answer_all(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            if not self._closing:
                _log.exception("the server failed")
                self._failed(f"the server failed: {error!r}")

    def _turn(self) -> None:
        try:
            self._write_mark()
            entries = self._desk.receive(_REMIND)
            for entry in entries:
                self._handled = entry.number
                self._handle(entry.data)
            self._desk.discard(entries)
        except RendezvousStateError as error:
            # Requests that the counter hides are lost; their nodes send them again.
            self._log_refusal("inbox", str(error))
            self._desk.delete(["inbox"])
            self._desk, self._handled = evolve(self._desk.clone(), first=1), 0
        except RendezvousConnectionError:
            # Only this connection broke; or the store is gone, which raises again.
            self._desk = evolve(self._desk.clone(), first=self._handled + 1)

    def _write_mark(self) -> None:
        """Write again what nodes look for first: a stranger may have changed it."""
        self._desk.write({MARK: encode(ServerMark(self.name))})
        self._backend.server.set(SERVES, NO_JOB)

    def _handle(self, data: bytes) -> None:
        with self._lock:
            if self._closing:
                return
            self._table, decision = self._table.receive(data, self._ended())

        match decision:
            case Begin(request, key):
                self._begin(request, key)
            case Admit(request):
                self._answer(request, Opened())
            case Decline(request, why):
                self._log_refusal("request", f"node {request.node} is refused: {why}")
                self._answer(request, OpenDeclined(why))
            case Drop(why):
                self._log_refusal("entry", why)
            case _:
                assert_never(decision)

    def _ended(self) -> dict[str, str]:
        """Return how the jobs ended that are over and still hosted."""
        ends = {run_id: job.ended() for run_id, job in self._jobs.items()}
        return {run_id: why for run_id, why in ends.items() if why is not None}

    def _begin(self, request: OpenJob, key: bytes | None) -> None:
        try:
            job = HostedJob.begin(request, key, self._desk, name=self.name, closed=self._note_closed, clock=self._clock)
            self._start(job)
        except (RendezvousError, StartError) as error:
            self._note_closed(request.run_id)
            why = f"its coordinator cannot be started: {error}"
            _log.warning("job %r: %s", request.run_id, why)
            self._answer(request, OpenDeclined(why))
            return

        least, most = request.rules.min_nodes, request.rules.max_nodes
        _log.info("job %r (%d to %d nodes) is opened by node %s", request.run_id, least, most, request.node)
        self._answer(request, Opened())

    def _start(self, job: HostedJob) -> None:
        with self._lock:
            if self._closing:
                raise RendezvousError("the server ends")
            # Under the lock: `close` ends every job that it finds, and has begun.
            job.start()
            self._jobs[job.run_id] = job

    def _note_closed(self, run_id: str) -> None:
        """Free the id of a job; called from its own thread, too."""
        with self._lock:
            self._table = self._table.without(run_id)
            self._jobs.pop(run_id, None)

    def _answer(self, request: OpenJob, answer: Opened | OpenDeclined) -> None:
        key = answer_key(request.word)
        self._desk.write({key: encode(answer)})
        self._unread.append(key)
        if len(self._unread) > _UNREAD:
            self._desk.delete([self._unread.popleft()])

    def _log_refusal(self, kind: str, why: str) -> None:
        self._refusals, text = self._refusals.refuse(kind, why, self._clock())
        if text is not None:
            _log.warning("%s", text)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at *host* and *port*."""
    if host:
        bound = bind_endpoint(host, port, resolve(host, port, LOOK_UP))
    else:
        bound = listen(ANYWHERE, port)
    if isinstance(bound, socket.socket):
        return bound
    raise ConfigError.of_setting("port" if not host else "host", f"{host or port!r}: {bound.why}")
