"""
One node's whole share in a job's rendezvous: its member, and the parts of the job on this node.

Rules of this file: wiring only. In c10d the node that can bind the endpoint hosts the store, and
the store's host coordinates. In etcd the holder of the lease does, and any node may be next.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError
from elasticlib.processes import start_thread
from elasticlib.rendezvous._membership import STAYS
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._binding import loopback
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.net._node_info import BoundNodeInfo, FixedNodeInfo
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.node._session_liveness import Limits
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import Exchange
from elasticlib.rendezvous.protocol._messages import Leave
from elasticlib.rendezvous.protocol._shortening import SHORT, cut
from elasticlib.rendezvous.stores._election import LeadershipLost, StateLog
from elasticlib.rendezvous.stores._kept_document import KeptDocument

_log = logging.getLogger("elasticlib")

_MOST_NAMES = 8
_MOST_MESSAGES = 1_000_000_000
"""Messages of one node through one sidecar."""
_AGAIN = 0.5
_RESIGNING = 2.0
"""Seconds that `NodeRuntime.close` waits until this node's candidate has resigned."""


def backend_of(job: NodeJob) -> Any:
    """
    Return the backend of *job*; nothing is contacted. Raises `ConfigError` for a job that cannot
    work.
    """
    if job.backend.startswith("etcd"):
        from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend

        return EtcdBackend(job)
    from elasticlib.rendezvous.stores._c10d import C10dBackend

    return C10dBackend(job)


def _named(run_id: str) -> str:
    """Return the id of another job as a text for people: its author is unknown."""
    return repr(cut(run_id, SHORT, 0.75))


class NodeRuntime:
    """
    The node's share of *job*: `member` communicates for it from `start` on. `close` it when done.

    Raises `ConfigError` for a job that cannot work; nothing is connected before `start`.
    """

    member: NodeClient

    def __init__(
        self,
        job: NodeJob,
        clock: Clock = monotonic,
        backend: Any = None,
        *,
        document: KeptDocument | None = None,
        endpoint: socket.socket | None = None,
    ) -> None:
        """
        *backend* carries the job, such that any node may coordinate it; None: the backend that the
        job names.

        If this node hosts the store, its coordinator continues with the *document*. *endpoint* is
        the listening socket of the store that was here before.
        """
        self.job = job
        self._clock = clock
        self._key = key_of(job.token) if job.token else None
        self._began = clock()
        self._met = False
        self._host: CoordinatorHost | None = None
        self._candidate: Any = None
        self._served: str | None = None
        """
        Id of the job whose store this one shares; empty if that job has ended; None: its own store.
        """
        self._store_mark: bytes | None = None
        """A mark that the store's process made up: another process has no data of this job."""
        self._closing = False
        self._witnessed = False
        """True if the other nodes know why this node leaves."""
        self._leads = False
        self._pause = threading.Event()
        self._lock = threading.Lock()
        self._by_election = backend is not None or job.backend.startswith("etcd")
        self._document = document
        self._backend = backend_of(job) if backend is None else backend
        if endpoint is not None:
            self._backend.listening = endpoint

    def prepare(self) -> None:
        """Import slow modules, in this thread and without a time limit; nothing is contacted."""
        if not self._by_election:
            self._backend.prepare()

    def start(self) -> None:
        """Start to look for the job."""
        job = self.job
        self._began = self._clock()
        self.member = NodeClient(
            self._dial_etcd if self._by_election else self._dial_c10d,
            job.node,
            self._offer(),
            run_id=job.run_id,
            terms=job.terms,
            key=self._key,
            limits=Limits(job.rules.join_limit, job.reconnect_timeout, 0.0, has_election=self._by_election),
            clock=self._clock,
            on_leave=self._left,
            where=f"{job.backend} at {job.endpoint}",
            after=job.after,
            sent=job.sidecars * _MOST_MESSAGES,
        )

        # Only now: its threads call this runtime, which communicates through it.
        self.member.start()

    @property
    def hosts_store(self) -> bool:
        """True if the job ends with this node."""
        return self._host is not None and self._candidate is None

    @property
    def endpoint(self) -> socket.socket | None:
        """
        The listening socket of the job's store, if it is here and its coordinator has a document.
        """
        # Without a document a new process would open an empty store, without any node.
        hosts = self.hosts_store and self._document is not None and not self._by_election
        listening: socket.socket | None = self._backend.listening if hosts else None
        return listening

    def witness(self, why: str, workers_gone: bool) -> None:
        """Send a `Leave` in place of the dead agent."""
        self._witnessed = True
        with contextlib.suppress(RendezvousError):
            self.member.post(Leave(self.job.node, why, None if workers_gone else self.member.round, lost=True))

    def close(self, linger: float) -> None:
        """
        Leave the job if that was not done, wait *linger* s for others to read the end, free all
        resources.

        It returns at most five seconds later than that: a thread that hangs in the store is left
        behind.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True

        # Sent once: by a second message without workers, others could take the ranks of running
        # workers.
        if not self.member.is_over() and not self._witnessed:
            with contextlib.suppress(RendezvousError):
                self.member.post(Leave(self.job.node, "its agent ended without leaving the job", lost=True))

        self.member.close()
        if self._host is not None:
            # After this node's own goodbye, which its coordinator must still read.
            self._host.close(linger)
            if self.hosts_store and self._host.is_over():
                self._backend.forget_job()
                if not self._witnessed:
                    # A launcher that has died, or left, waits for no other job.
                    self._backend.stay(self.job.store_linger, self._log_stay, self._pause)

        if self._candidate is not None:
            self._candidate.close(_RESIGNING)
        self._pause.set()
        self._backend.close()

    def _log_stay(self, jobs: list[str]) -> None:
        names = ", ".join(map(_named, jobs[:_MOST_NAMES]))
        names += f" and {more} more" if (more := len(jobs) - _MOST_NAMES) > 0 else ""
        limit = self.job.store_linger
        final = self.member.final
        how = "has ended" if final is None or final.succeeded else "has failed"
        what = f"job {self.job.run_id!r} {how}; node {self.job.node}, which hosts the store at {self.job.endpoint},"
        why = f"stays up for job{'s' * (len(jobs) > 1)} {names}, which also {'use' if len(jobs) > 1 else 'uses'} it"
        # People who wait for this process must know how long that may take.
        _log.warning("%s %s: %g s at most (store_linger), or until Ctrl-C", what, why, limit, extra={STAYS: limit})

    def _offer(self) -> BoundNodeInfo | FixedNodeInfo:
        job = self.job
        if job.backend == "static":
            host, port = self._backend.host, self._backend.port
            is_first = job.node_rank == 0
            said = job.work, job.command, job.is_scheduled
            return FixedNodeInfo(host, lambda: int(port), job.node_rank, lambda: is_first, *said)
        return BoundNodeInfo(
            self._address, index=job.node_rank, hosts=lambda: self.hosts_store, work=job.work, command=job.command
        )

    def _address(self) -> str:
        if self.job.local_addr:
            return self.job.local_addr
        # If all workers are on this node, no other node may reach their store.
        return loopback() if self.job.max_nodes == 1 else self._backend.address() or loopback()

    def _left(self, why: str) -> bool:
        """Return whether the job must end because this node leaves; end it then."""
        self._witnessed = True
        if not self.hosts_store:
            return False
        assert self._host is not None
        # After the job's end, too: nobody has to wait for this node.
        self._host.abandon(f"node {self.job.node}, which hosts the job's store, left: {why}", self.job.node)
        return True

    def _new_host(
        self, exchange: Exchange, state_log: StateLog | KeptDocument | None = None, hint: str = ""
    ) -> CoordinatorHost:
        job = self.job
        return CoordinatorHost(
            exchange,
            job.rules,
            run_id=job.run_id,
            name=job.node,
            key=self._key,
            clock=self._clock,
            state_log=state_log,
            hint=hint,
            seen=self.member.seen(),
        )

    def _attempt(self, timeout: float) -> Exchange:
        # The user's own limit of an attempt, if given, replaces the caller's.
        exchange: Exchange = self._backend.dial(float(self.job.options.get("read_timeout", timeout)))
        return exchange

    # c10d

    def _dial_c10d(self, timeout: float) -> Exchange:
        """Connect; before the first contact, become the store's host if this machine is it."""
        if self._is_new():
            self._host_store(timeout)
        exchange = self._reach_store(timeout)

        # Several jobs may use the endpoint: their keys are separate, and each has its own
        # coordinator.
        served = self._backend.served_run(exchange)
        if self._is_new() and served != self.job.run_id:
            self._share_store(exchange, served)
        self._met = True
        return exchange

    def _is_new(self) -> bool:
        """Return whether this node has reached no store yet, and coordinates nothing."""
        return self._host is None and not self._met

    def _host_store(self, timeout: float) -> None:
        """Open the store and coordinate the job, if this machine is the host of the endpoint."""
        backend = self._backend
        if not backend.serve(self._began + self.job.rules.join_limit):
            return
        # Only to be cloned: the coordinator gets its own connection.
        own = self._attempt(timeout)
        self._coordinate(backend.coordinating(own), state_log=self._document)
        own.close()

    def _reach_store(self, timeout: float) -> Exchange:
        """Connect to the store; raise `RefusedError` where it was another job's, and is gone."""
        try:
            exchange = self._attempt(timeout)
        except RefusedError as error:
            if self._served is None:
                raise
            # A store that another job opened ends with that job's host; it is not opened again for this one.
            raise self._shared_store_lost(str(error)) from error

        is_shared = self._served is not None
        if is_shared and self._backend.word_of(exchange) != self._store_mark:
            exchange.close()
            again = f"the store at {self.job.endpoint} was opened again, and has nothing of this job"
            raise self._shared_store_lost(again)

        return exchange

    def _share_store(self, exchange: Exchange, served: str) -> None:
        """Use the store of the job *served*: the first node of this job that claims it coordinates."""
        backend, job = self._backend, self.job

        # This mark differs from that of a store that is opened again later.
        self._served, self._store_mark = served, backend.word_of(exchange)
        if not backend.claim(exchange):
            return

        hint = ""
        if served:
            owner = f"the store at {job.endpoint} was opened for job {_named(served)}"
            hint = f"{owner}, this is job {job.run_id!r}: is its id right?"

        self._coordinate(backend.coordinating(exchange), hint)

    def _shared_store_lost(self, why: str) -> RefusedError:
        owner = f"of job {_named(self._served)}" if self._served else "of a job that has ended"
        return RefusedError(f"{why}; it was the store {owner}, which this job shared")

    def _coordinate(self, exchange: Exchange, hint: str = "", state_log: KeptDocument | None = None) -> None:
        with self._lock:
            if self._closing:
                # `close` would not find this host, and its thread would continue alone.
                raise RendezvousConnectionError("the rendezvous was closed while it connected")
            host = self._host = self._new_host(exchange, state_log, hint)
            start_thread(threading.Thread(target=self._serve, args=(host,), name="elasticlib-coordinator", daemon=True))

    def _serve(self, host: CoordinatorHost) -> None:
        try:
            host.run()
        except LeadershipLost as error:
            why = f"node {self.job.node} no longer coordinates job {self.job.run_id!r}: {error}"
            _log.warning("%s", why)
            self.member.fail(RendezvousClosedError(why))
        except RendezvousError as error:
            _log.warning("the coordinator of job %r stops: %s", self.job.run_id, error)

    # etcd

    def _dial_etcd(self, timeout: float) -> Exchange:
        exchange = self._attempt(timeout)
        with self._lock:
            # Once: it keeps trying through all later connections of this node.
            if self._candidate is None and not self._closing:
                self._candidate = self._backend.candidate(self.job.node, self._begin_leading, self._stop_leading)
                self._candidate.start()
        return exchange

    def _begin_leading(self, state_log: StateLog) -> None:
        try:
            # This node knows the end, and the document of the job is gone: no node is left that
            # would ask.
            over = self.member.is_over() and state_log.load() is None
        except RendezvousError:
            raise
        except Exception as error:
            self._broke(error)
            raise

        if over:
            raise RendezvousClosedError(f"job {self.job.run_id!r} has ended, and no node is left in it")

        self._leads = True
        start_thread(threading.Thread(target=self._lead, args=(state_log,), name="elasticlib-coordinator", daemon=True))

    def _stop_leading(self, why: str) -> None:
        self._leads = False
        _log.warning("node %s no longer coordinates job %r: %s", self.job.node, self.job.run_id, why)

    def _broke(self, error: Exception) -> None:
        """
        End this node with *error*, so that no node waits for a coordinator that will not come.
        """
        why = f"node {self.job.node} could not coordinate job {self.job.run_id!r}: {type(error).__name__}: {error}"
        broken = RendezvousError(why)
        broken.__cause__ = error
        self.member.fail(broken)

    def _lead(self, state_log: StateLog) -> None:
        """Coordinate until the term ends."""
        while self._leads and not self._closing:
            try:
                host = self._new_host(state_log.exchange(), state_log)
                self._host = host
                host.run()
                return
            except LeadershipLost as error:
                # The candidate must know that its term is over, though the lease still stands.
                state_log.lose(str(error))
                _log.info("node %s no longer coordinates: %s", self.job.node, error)
                return
            except RendezvousConnectionError as error:
                _log.warning("the coordinator of job %r starts again: %s", self.job.run_id, error)
                # The term continues while the lease is renewed: only the connection was lost.
                self._pause.wait(_AGAIN)
            except Exception as error:
                _log.exception("the coordinator of job %r failed", self.job.run_id)
                self._broke(error)
                return
