"""
elasticlib's rendezvous for code that calls a handler itself, with torch's methods.

Rules of this file: a node is one place in the round, with one slot. A separate process talks to the
others (`sidecar._shared`), so that this program may be as busy as it likes. One thread receives the
coordinator's notices and only stores them; the caller's threads read them. Nothing is contacted
before the first call that needs to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from elasticlib.errors import (
    ConfigError,
    ElasticError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from elasticlib.processes import start_thread, wait_for_change, wait_readable
from elasticlib.rendezvous._membership import HandlerMembership, Membership, MembershipEvent
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers import _round_store
from elasticlib.rendezvous.handlers._base import NO_SHARING, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from elasticlib.rendezvous.node._runtime import backend_of
from elasticlib.rendezvous.protocol._messages import (
    Close,
    ContactLost,
    Final,
    RankAssignment,
    RoundEnd,
    Stopped,
    Succeeded,
)
from elasticlib.rendezvous.sidecar._shared import SharedSidecar

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ROLE = "default"
STALL = 1.0
"""
Share of the heartbeat time for which no thread of this program may run before its node's heartbeats
pause.
"""

_log = logging.getLogger("elasticlib")


class CoordinatedHandler(RendezvousHandler):
    """
    One node of *job*, by torch's contract; several threads may use it, but wait for one round at a
    time.

    Differs from torch's handlers where those fail:

    * Each round has its own store.
    * A peer that is lost, leaves or asks for a new round makes `num_nodes_waiting` positive on all
      others.
    * Spares do not count in `num_nodes_waiting`.

    With backend ``static`` no node can close the job: `set_closed` does nothing and `is_closed` is
    never true.

    The first call that needs the others starts a process that keeps the contact; it ends with this
    program. In a program with several handlers these processes are forked from one that has done
    the imports. A program that stands still for twice the heartbeat time is lost to the others.

    Raises `ConfigError` for a job that cannot work.
    """

    def __init__(self, job: NodeJob, connect: Callable[..., HandlerMembership] | None = None) -> None:
        """
        *connect* makes a node of a job in place of `SharedSidecar`; its caller has checked the job.
        """
        self.job = job
        if connect is None:
            backend_of(job)  # raises for settings that cannot work
        self._connect = connect or SharedSidecar
        self._turned = threading.Condition()
        self._notes = _Notes(self._turned)
        self._node = _HandlerNode(job, self._connect, self._notes)
        self._agents_member: HandlerMembership | None = None
        self._seeking = threading.Lock()
        self._stores: list[Store] = []
        self._closed = False

    def get_backend(self) -> str:
        """Return the backend's name, such as ``c10d``."""
        return self.job.backend

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self.job.run_id

    @property
    def use_agent_store(self) -> bool:
        """
        True if the workers may use the round's store: unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``
        is 1.
        """
        return os.environ.get(NO_SHARING) != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """
        Wait for the next round and return this node's place in it. No worker of this node may run
        any more.

        A spare waits until a place is free. Raises as described at the base class, and
        `ConfigError` if the store cannot be used in the requested way.
        """
        with self._seeking:
            while True:
                self._open()

                assignment = self._node.next_assignment()
                # Not before: until all nodes have left the last round, one of them may still connect to its store.
                self._stores.clear()
                try:
                    return self._info(assignment)
                except RendezvousConnectionError:
                    # Group rank 0 died after it got its ranks; the coordinator will report it.
                    if not self._notes.wait_for(self._notes.has_ended, self.job.heartbeat):
                        raise

    def is_closed(self) -> bool:
        """Return whether the job is known to be over."""
        if self._fixed:
            return False
        with self._turned:
            is_over = self._closed or self._notes.final is not None
            # Once the job is over, a lost connection is no error any more.
            if not is_over:
                self._notes.check()
            return is_over

    def set_closed(self) -> None:
        """
        End the job for all nodes, and return once the coordinator has confirmed it.

        Raises `RendezvousTimeoutError` if it does not within ``close_timeout`` seconds. While an
        agent has this node's place, that agent gets the answer.
        """
        if self._fixed:
            return

        # Under one lock with the request: an agent cannot take the place in between.
        with self._turned:
            if self._notes.is_over:
                self._closed = True
                self._notes.check()
                return

            if self._agents_member is not None:
                self._close_for_agent(self._agents_member)
                return

            self._request_close()

        self._wait_until_closed()
        self._closed = True

    def _close_for_agent(self, member: HandlerMembership) -> None:
        """Request the end of the job in the place of this node's agent, which gets the answer."""
        self._closed = True
        # The agent may have finished.
        with contextlib.suppress(RendezvousClosedError):
            self._post_close(member)

    def _request_close(self) -> None:
        """Request the end of the job; the answer is among the notices."""
        member = self._open()
        is_known = self._node.is_known
        self._post_close(member)
        # The coordinator answers only nodes that have asked for ranks.
        if not is_known:
            member.join(1, ROLE)

    def _post_close(self, member: HandlerMembership) -> None:
        member.post(Close(member.node, f"node {self.job.node} closed it"))

    def _wait_until_closed(self) -> None:
        limit = self.job.close_timeout
        if not self._notes.wait_for(self._notes.has_final, limit):
            raise RendezvousTimeoutError(
                f"job {self.job.run_id!r} could not be closed within {limit:g} s: its coordinator does not answer"
            )

    def num_nodes_waiting(self) -> int:
        """
        Return the number of nodes that wait for a new round, including this one's peers; 0 during a
        round.

        Nodes that wait for a place to become free are not counted: a new round would not give them
        ranks.
        """
        with self._turned:
            if self._closed or self._notes.final is not None:
                return 0
            self._notes.check()
            member = self._node.member
            if member is None or not self._notes.round_is_over:
                return 0
            # The round is over: this node's peers wait at least, whatever the last heartbeat said.
            return max(1, member.waiting())

    def shutdown(self) -> bool:
        """
        Close the job for all nodes and free all resources; return False, with a warning in the log,
        if that failed.

        With backend ``static`` this node's part is reported as done instead, and the others
        continue.
        """
        is_confirmed = True
        try:
            if self._fixed:
                self._node.report_success()
            elif self._notes.final is None:
                self.set_closed()
        except ElasticError as error:
            _log.warning("job %r: closing the rendezvous failed: %s", self.job.run_id, error)
            # The other nodes of a static job continue without this one: nothing failed for them.
            is_confirmed = self._fixed

        self._release()
        return is_confirmed

    @contextlib.contextmanager
    def open_membership(self, max_restarts: int, local_addr: str | None = None) -> Iterator[Membership]:
        """
        Open this node's place in the job for an agent, which takes part itself and does not use the
        handler.

        For the others that is a new node each time. Afterwards the handler knows how the job ended.
        Raises `ConfigError` when the place is taken, and as `next_rendezvous` when the job is over.
        """
        with self._turned:
            self._check_open()
            if self._node.member is not None:
                raise ConfigError(
                    f"this rendezvous handler of job {self.job.run_id!r} is already in use: create another handler for "
                    "the agent"
                )
            address = local_addr or self.job.local_addr
            job = evolve(self.job, node=node_name(address), local_addr=address, max_restarts=max_restarts)
            member = self._agents_member = self._connect(job)

        try:
            yield member
        finally:
            member.close()
            with self._turned:
                self._agents_member = None
                if member.final is not None and member.final.kind != "left":  # the job continues without us
                    self._notes.final = member.final

    # Details of the contract's methods.

    @property
    def _fixed(self) -> bool:
        return self.job.backend == "static"

    def _check_open(self) -> None:
        self._node.check_open()
        if self._agents_member is not None:
            raise ConfigError(
                f"this rendezvous handler of job {self.job.run_id!r} is in use by an agent: create another handler"
            )

    def _open(self) -> HandlerMembership:
        # Under one lock with the check: an agent cannot take the place in between.
        with self._turned:
            self._check_open()
            return self._node.open()

    def _info(self, assignment: RankAssignment) -> RendezvousInfo:
        whole, address = _round_store.open_store(self.job, assignment, self._node.listener(assignment))
        # The server ends with the last reference to it. A caller may drop the round's store while
        # workers still use its address.
        self._stores.append(whole)
        store = _round_store.apart(whole, self.job.run_id, assignment.round)
        where = RendezvousStoreInfo(address, assignment.master_port)
        if not self.use_agent_store:
            where = RendezvousStoreInfo.build(assignment.group_rank, store, address)
        return RendezvousInfo(store, assignment.group_rank, assignment.group_world_size, where)

    def _release(self) -> None:
        self._closed = True
        if self._node.close():
            self._stores.clear()


@define(eq=False)
class _HandlerNode:
    """
    The node of a handler that finds its round itself: its membership, opened when it is first
    needed, and the thread that receives its notices.

    Several threads of the caller may use it, but only one asks for ranks at a time.
    """

    job: NodeJob
    _connect: Callable[..., HandlerMembership]
    notes: _Notes
    member: HandlerMembership | None = field(init=False, default=None)
    """The membership; None before `open`."""
    _listener: threading.Thread | None = field(init=False, default=None)
    _wake: int = field(init=False, factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    """Descriptor that ends the thread's wait for notices."""
    _seeks: bool = field(init=False, default=False)
    """True while it waits for ranks."""
    _closing: bool = field(init=False, default=False)

    @property
    def is_known(self) -> bool:
        """True if the coordinator knows this node: it has ranks, or asked for them."""
        return self._seeks or self.notes.assignment is not None

    def check_open(self) -> None:
        """Raise the reason why this node cannot take part any more, if there is one."""
        if self._closing:
            raise RendezvousClosedError(
                f"this rendezvous handler of job {self.job.run_id!r} was shut down: create another handler"
            )
        if self.notes.final is not None:
            raise _reason(self.notes.final, self.job)

    def open(self) -> HandlerMembership:
        """Return the membership, opened by the first call. The caller holds the lock of the notes."""
        if self.member is None:
            # Its caller supervises no workers: a program that is busy for a while must not
            # count as dead.
            member = self.member = self._connect(self.job, stall=STALL)
            self._listener = threading.Thread(
                target=self._listen, args=(member,), name="elasticlib-handler", daemon=True
            )
            start_thread(self._listener)

        return self.member

    def next_assignment(self) -> RankAssignment:
        """Ask for ranks in the next round and wait for them; the membership is open."""
        member = self._opened
        with self.notes.changed:
            old = self.notes.forget_round()
            # By this call's contract none of its workers runs any more: the others do not have to
            # wait for that.
            if old is not None:
                member.post(Stopped(member.node, old.round, ()))
            member.join(1, ROLE)
            self._seeks = True

        try:
            _round_store.prepare()  # while the others are asked
            return self._wait_for_ranks(member)
        finally:
            self._seeks = False

    def _wait_for_ranks(self, member: HandlerMembership) -> RankAssignment:
        notes = self.notes
        with notes.changed:
            while True:
                wait_for_change(notes.changed, self._has_news, None)
                if notes.assignment is not None:
                    return notes.assignment
                self.check_open()
                notes.check()
                # Cut off meanwhile: the others may have removed this node from the round.
                notes.ended = False
                member.join(1, ROLE)

    def _has_news(self) -> bool:
        """Return True if a wait for ranks is over, or must ask for them again."""
        return self.notes.assignment is not None or self.notes.ended or self.notes.is_over or self._closing

    def listener(self, assignment: RankAssignment) -> socket.socket | None:
        """Return the bound socket for the round's store if this node serves it; None on other nodes."""
        # It was bound before the round: no other process can have taken its port.
        return self._opened.listener() if assignment.group_rank == 0 else None

    def report_success(self) -> None:
        """Report this node's work as done; while the store of the others lives here, give them time to finish."""
        assignment = self.notes.assignment
        if self.member is None or assignment is None:
            return
        if self.notes.ended:
            return
        self.member.post(Succeeded(self.member.node, assignment.round))
        # The store of the others' workers lives here, and ends with this process.
        if self.job.node_rank == 0:
            self.notes.wait_for(self.notes.has_final, self.job.close_timeout)

    def close(self) -> bool:
        """End the membership and all waits; return False if another call does that, or did."""
        with self.notes.changed:
            if self._closing:
                return False
            self._closing = True
            self.notes.changed.notify_all()

        os.eventfd_write(self._wake, 1)

        # Before the membership is closed: the thread still reads from it.
        if self._listener is not None:
            self._listener.join()
        if self.member is not None:
            self.member.close()
        os.close(self._wake)
        return True

    @property
    def _opened(self) -> HandlerMembership:
        assert self.member is not None, "`open` comes first"
        return self.member

    def _listen(self, member: HandlerMembership) -> None:
        while not self._closing:
            wait_readable([member, self._wake], member.poll_timeout())
            try:
                notices = member.drain()
            except (ElasticError, OSError) as error:
                self.notes.fail(error)
                return
            self.notes.take(notices)


@define(eq=False)
class _Notes:
    """
    The coordinator's notices, written by one thread and read by the caller's threads.

    A thread holds *changed* while it reads several of them; it is notified after each change.
    """

    changed: threading.Condition
    assignment: RankAssignment | None = None
    """The ranks of the latest round; None once other ones are asked for."""
    ended: bool = False
    """True if that round is over, or this node was cut off from it."""
    final: Final | None = None
    """The end of the job."""
    error: ElasticError | None = None
    """The error that ended the conversation."""

    @property
    def is_over(self) -> bool:
        """True if no more notices will come."""
        return self.final is not None or self.error is not None

    @property
    def round_is_over(self) -> bool:
        """True if there was a round, and it is over."""
        return self.assignment is not None and self.ended

    def has_final(self) -> bool:
        """Return whether the job has ended."""
        return self.final is not None

    def has_ended(self) -> bool:
        """Return whether the round has ended."""
        return self.ended

    def check(self) -> None:
        """Raise the error that ended the conversation, if there was one."""
        if self.error is not None:
            raise self.error

    def wait_for(self, condition: Callable[[], bool], limit: float) -> bool:
        """
        Return whether *condition* became true within *limit* seconds; raise the error that ended
        the conversation.
        """
        with self.changed:
            wait_for_change(self.changed, lambda: condition() or self.is_over, limit)
            if condition():
                return True
            self.check()
            return False

    def forget_round(self) -> RankAssignment | None:
        """Return the ranks of the latest round, which is over from now on."""
        old, self.assignment, self.ended = self.assignment, None, False
        return old

    def take(self, notices: Iterable[MembershipEvent]) -> None:
        """Note the notices that arrived."""
        with self.changed:
            for notice in notices:
                self._note(notice)
            self.changed.notify_all()

    def fail(self, error: ElasticError | OSError) -> None:
        """Note the error that ended the conversation."""
        if not isinstance(error, ElasticError):
            error = RendezvousError(f"the rendezvous of this node failed: {error}")
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def _note(self, notice: MembershipEvent) -> None:
        match notice:
            case RankAssignment():
                self.assignment, self.ended = notice, False
            case Final():
                self.final = notice
            case ContactLost():
                self.ended = True
            case RoundEnd(round=number) if self.assignment is not None and number == self.assignment.round:
                self.ended = True


def _reason(final: Final, job: NodeJob) -> RendezvousError:
    if final.succeeded:
        return RendezvousGracefulExitError(f"job {job.run_id!r} succeeded without this node: {final.why}")
    if final.kind == "timeout":
        return RendezvousTimeoutError(final.why)
    return RendezvousClosedError(f"job {job.run_id!r} has ended: {final.why}")
