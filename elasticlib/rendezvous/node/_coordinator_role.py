"""
One node's role in coordinating its job, beside its part as a member.

Rules of this file: wiring only. In c10d the node that can bind the endpoint hosts the store, and
the store's host coordinates. In etcd the holder of the lease does, and any node may be next.
"""

from __future__ import annotations

import abc
import logging
import socket
import threading
from typing import Any

from elasticlib._clock import Clock
from elasticlib.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError
from elasticlib.processes import start_thread
from elasticlib.rendezvous._membership import STAYS
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import Exchange
from elasticlib.rendezvous.protocol._messages import Leave
from elasticlib.rendezvous.protocol._shortening import SHORT, cut
from elasticlib.rendezvous.stores._election import LeadershipLost, StateLog
from elasticlib.rendezvous.stores._kept_document import KeptDocument
from elasticlib.rendezvous.stores._served_job import open_job, server_of

_log = logging.getLogger("elasticlib")

_MOST_NAMES = 8
_AGAIN = 0.5
_RESIGNING = 2.0
"""Seconds that `LeaderRole.close` waits until this node's candidate has resigned."""


class CoordinatorRole(abc.ABC):
    """
    One node's share in coordinating its *job*, beside its own part as a `member`.

    A subclass says which node coordinates. `begin` comes first, then `dial` from the member's
    threads.
    """

    member: NodeClient
    has_election = False
    """True if any node of the job may coordinate it."""

    def __init__(self, job: NodeJob, backend: Any, clock: Clock) -> None:
        self._job = job
        self._backend = backend
        self._clock = clock
        self._host: CoordinatorHost | None = None
        self._lock = threading.Lock()
        self._closing = False

    @abc.abstractmethod
    def prepare(self) -> None:
        """Import slow modules, in this thread and without a time limit; nothing is contacted."""

    def begin(self, member: NodeClient) -> None:
        """Note this node's *member*, which is not started yet."""
        self.member = member

    @abc.abstractmethod
    def dial(self, timeout: float) -> Exchange:
        """Connect this node to its job."""

    @property
    def hosts_store(self) -> bool:
        """True if the job ends with this node."""
        return False

    @property
    def endpoint(self) -> socket.socket | None:
        """
        The listening socket of the job's store, if it is here and its coordinator has a document.
        """
        return None

    def abandon(self, leave: Leave) -> bool:
        """Return whether the job must end because this node leaves; end it then."""
        return False

    def begin_close(self) -> bool:
        """Start no coordinator from now on; return False if that was said before."""
        with self._lock:
            is_first = not self._closing
            self._closing = True
        return is_first

    def close(self, linger: float) -> None:
        """End the coordinator once the others have read the end, *linger* s later at most."""
        if self._host is not None:
            # After this node's own goodbye, which its coordinator must still read.
            self._host.close(linger)

    @abc.abstractmethod
    def stay(self) -> None:
        """Keep the store up for the other jobs in it, if it is here; call it after `close`."""

    def _attempt(self, timeout: float) -> Exchange:
        # The user's own limit of an attempt, if given, replaces the caller's.
        exchange: Exchange = self._backend.dial(float(self._job.options.get("read_timeout", timeout)))
        return exchange

    def _new_host(
        self, exchange: Exchange, state_log: StateLog | KeptDocument | None = None, hint: str = ""
    ) -> CoordinatorHost:
        job = self._job
        return CoordinatorHost(
            exchange,
            job.rules,
            run_id=job.run_id,
            name=job.node,
            key=key_of(job.token) if job.token else None,
            clock=self._clock,
            state_log=state_log,
            hint=hint,
            seen=self.member.seen(),
        )


class StoreRole(CoordinatorRole):
    """
    The role of a node at its job's endpoint (c10d): it opens the store there, shares that of
    another job, or is a guest.

    The node that opens the store coordinates; in a shared one, the first node that claims the job. No
    node does in the store of a server (`elasticrun serve`).
    """

    def __init__(self, job: NodeJob, backend: Any, clock: Clock, document: KeptDocument | None) -> None:
        """If this node opens the store, its coordinator continues with the *document*."""
        super().__init__(job, backend, clock)
        self._document = document
        self._began = clock()
        self._met = False
        self._served: str | None = None
        """
        Id of the job whose store this one shares; empty if that job has ended; None: its own store.
        """
        self._server: str | None = None
        """Name of the server that coordinates the job; None: a node does."""
        self._store_mark: bytes | None = None
        """A mark that the store's process made up: another process has no data of this job."""

    def prepare(self) -> None:
        self._backend.prepare()

    def begin(self, member: NodeClient) -> None:
        super().begin(member)
        self._began = self._clock()

    @property
    def hosts_store(self) -> bool:
        return self._host is not None

    @property
    def endpoint(self) -> socket.socket | None:
        # Without a document a new process would open an empty store, without any node.
        if self._host is None or self._document is None:
            return None
        listening: socket.socket | None = self._backend.listening
        return listening

    def abandon(self, leave: Leave) -> bool:
        if self._host is None:
            return False
        # After the job's end, too: nobody has to wait for this node.
        # A person's stop is no failure of this node: all nodes get that person's reason.
        if leave.stops:
            self._host.abandon(leave.why, leave.node, "stopped")
        else:
            self._host.abandon(f"node {leave.node}, which hosts the job's store, left: {leave.why}", leave.node)
        return True

    def close(self, linger: float) -> None:
        super().close(linger)
        if self._is_over():
            self._backend.forget_job()

    def stay(self) -> None:
        if self._is_over():
            self._backend.stay(self._job.store_linger, self._log_stay, threading.Event())

    def _is_over(self) -> bool:
        """Return whether this node coordinated the job until its end."""
        return self._host is not None and self._host.is_over()

    def _log_stay(self, jobs: list[str]) -> None:
        names = ", ".join(map(_named, jobs[:_MOST_NAMES]))
        names += f" and {more} more" if (more := len(jobs) - _MOST_NAMES) > 0 else ""
        limit = self._job.store_linger
        final = self.member.final
        how = "has ended" if final is None or final.succeeded else "has failed"
        what = f"job {self._job.run_id!r} {how}; node {self._job.node}, which hosts the store at {self._job.endpoint},"
        why = f"stays up for job{'s' * (len(jobs) > 1)} {names}, which also {'use' if len(jobs) > 1 else 'uses'} it"
        # People who wait for this process must know how long that may take.
        _log.warning("%s %s: %g s at most (store_linger), or until Ctrl-C", what, why, limit, extra={STAYS: limit})

    def dial(self, timeout: float) -> Exchange:
        """Connect; before the first contact, become the store's host if this machine is it."""
        if self._is_new():
            self._host_store(timeout)
        exchange = self._reach_store(timeout)

        if self._is_new():
            self._find_coordinator(exchange)
        self._met = True
        return exchange

    def _is_new(self) -> bool:
        """Return whether this node has reached no store yet, and coordinates nothing."""
        return self._host is None and not self._met

    def _host_store(self, timeout: float) -> None:
        """Open the store and coordinate the job, if this machine is the host of the endpoint."""
        backend = self._backend
        if not backend.serve(self._began + self._job.rules.join_limit):
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

        is_shared = self._met and self._served is not None
        if is_shared and self._backend.word_of(exchange) != self._store_mark:
            exchange.close()
            again = f"the store at {self._job.endpoint} was started again, and has no data of this job"
            raise self._shared_store_lost(again)

        return exchange

    def _find_coordinator(self, exchange: Exchange) -> None:
        """Make the server of the store coordinate the job, or claim it if the store serves another job."""
        served = self._backend.served_run(exchange)
        self._server = server_of(exchange)
        if self._server is not None:
            self._served, self._store_mark = served, self._backend.word_of(exchange)
            open_job(exchange, self._job)
        elif served != self._job.run_id:
            # Several jobs may use the endpoint: their keys are separate, and each has its own
            # coordinator.
            self._share_store(exchange, served)

    def _share_store(self, exchange: Exchange, served: str) -> None:
        """Use the store of the job *served*: the first node of this job that claims it coordinates."""
        backend, job = self._backend, self._job

        # This mark differs from that of a store that is opened again later.
        self._served, self._store_mark = served, backend.word_of(exchange)
        if not backend.claim(exchange):
            return

        hint = ""
        if served:
            owner = f"the store at {job.endpoint} was opened for job {_named(served)}"
            hint = f"{owner}, but this is job {job.run_id!r}: is this id right?"

        self._coordinate(backend.coordinating(exchange), hint)

    def _shared_store_lost(self, why: str) -> RefusedError:
        if self._server is not None:
            return RefusedError(f"{why}; it was the store of the server {self._server}, which coordinated this job")
        owner = f"of job {_named(self._served)}" if self._served else "of a job that has ended"
        return RefusedError(f"{why}; it was the store {owner}, which this job shared")

    def _coordinate(self, exchange: Exchange, hint: str = "", state_log: KeptDocument | None = None) -> None:
        with self._lock:
            if self._closing:
                # `close` would not find this host, and its thread would continue alone.
                raise RendezvousConnectionError("the rendezvous was closed while this node connected to the store")
            host = self._host = self._new_host(exchange, state_log, hint)
            start_thread(threading.Thread(target=self._serve, args=(host,), name="elasticlib-coordinator", daemon=True))

    def _serve(self, host: CoordinatorHost) -> None:
        try:
            host.run()
        except LeadershipLost as error:
            why = f"node {self._job.node} no longer coordinates job {self._job.run_id!r}: {error}"
            _log.warning("%s", why)
            self.member.fail(RendezvousClosedError(why))
        except RendezvousError as error:
            _log.warning("the coordinator of job %r stops: %s", self._job.run_id, error)


class LeaderRole(CoordinatorRole):
    """
    The role of a node in a job whose coordinator is elected (etcd, shared states): a candidate, and
    the leader for a term.
    """

    has_election = True

    def __init__(self, job: NodeJob, backend: Any, clock: Clock) -> None:
        super().__init__(job, backend, clock)
        self._candidate: Any = None
        self._leads = False
        self._pause = threading.Event()
        """Set at the end: no further coordinator is started in the term."""

    def prepare(self) -> None:
        """Do nothing: the clients of these backends import nothing slow."""

    def stay(self) -> None:
        """Do nothing: the store is not here."""

    def close(self, linger: float) -> None:
        super().close(linger)
        if self._candidate is not None:
            self._candidate.close(_RESIGNING)
        self._pause.set()

    def dial(self, timeout: float) -> Exchange:
        exchange = self._attempt(timeout)
        with self._lock:
            # Once: it keeps trying through all later connections of this node.
            if self._candidate is None and not self._closing:
                self._candidate = self._backend.candidate(self._job.node, self._begin_leading, self._stop_leading)
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
            raise RendezvousClosedError(f"job {self._job.run_id!r} has already ended, and all its nodes have left")

        self._leads = True
        start_thread(threading.Thread(target=self._lead, args=(state_log,), name="elasticlib-coordinator", daemon=True))

    def _stop_leading(self, why: str) -> None:
        self._leads = False
        _log.warning("node %s no longer coordinates job %r: %s", self._job.node, self._job.run_id, why)

    def _broke(self, error: Exception) -> None:
        """
        End this node with *error*, so that no node waits for a coordinator that will not come.
        """
        why = f"node {self._job.node} could not coordinate job {self._job.run_id!r}: {type(error).__name__}: {error}"
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
                _log.info("node %s no longer coordinates: %s", self._job.node, error)
                return
            except RendezvousConnectionError as error:
                _log.warning("the coordinator of job %r starts again: %s", self._job.run_id, error)
                # The term continues while the lease is renewed: only the connection was lost.
                self._pause.wait(_AGAIN)
            except Exception as error:
                _log.exception("the coordinator of job %r failed", self._job.run_id)
                self._broke(error)
                return


def _named(run_id: str) -> str:
    """Return the id of another job as a text for people: its author is unknown."""
    return repr(cut(run_id, SHORT, 0.75))
