"""
A node's place in a job that meets in one shared state, kept by threads of this program.

Rules of this file: wiring only. A back end that somebody made is an object of this program, so no process of its own
can keep the contact: this node is silent when the program stands still, and dies with it without a goodbye.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._membership import Talk
from elasticlib.rendezvous.node._runtime import NodeRuntime
from elasticlib.rendezvous.stores._compare_and_set import CompareAndSetExchange
from elasticlib.rendezvous.stores._election import Candidate
from elasticlib.rendezvous.stores._state_backend import RendezvousBackend
from elasticlib.rendezvous.stores._state_keys import LONGEST, SharedState, StateKeys
from elasticlib.rendezvous.stores._state_log import StateLog

ROOT = "/job"
"""What all keys lie below: a state belongs to one job."""
_LOOK, _SHORTEST_LOOK = 1 / 15, 0.25
"""Share of the heartbeat time, and seconds at least, that may lie between two looks of a node that waits."""


class StateBackend:
    """Makes connections for one job in the state that *backend* holds; *address* is where peers reach this machine."""

    def __init__(self, backend: RendezvousBackend, heartbeat: float, address: str | None = None) -> None:
        self.name = backend.name
        # A change that is seen late must not look like silence.
        longest = min(LONGEST, max(heartbeat * _LOOK, _SHORTEST_LOOK)) if heartbeat else LONGEST
        self._state = SharedState(backend, longest=longest)
        self._heartbeat = heartbeat
        self._address = address

    def dial(self, timeout: float) -> CompareAndSetExchange:
        """A connection; raises `RendezvousConnectionError` when the back end does not answer now."""
        return CompareAndSetExchange(self.connect(timeout), ROOT)

    def connect(self, timeout: float) -> StateKeys:
        """Like `dial`, for those who need more than an exchange; *timeout* binds the back end's own calls only."""
        del timeout  # nobody can end a call of somebody else's code; the thread that makes it is given up instead
        self._state.read()
        return StateKeys(self._state)

    def address(self) -> str | None:
        """Where peers reach this machine; None for this machine's loopback."""
        return self._address

    def candidate(
        self,
        name: str,
        on_elected: Callable[[StateLog], None],
        on_lost: Callable[[str], None],
        ttl: float | None = None,
    ) -> Candidate:
        """One who stands for the coordination of the job; *ttl* is half the heartbeat time, and 2 s at least."""
        seconds = max(2.0, self._heartbeat / 2) if ttl is None else ttl
        return Candidate(self.connect, ROOT, name, seconds, on_elected, on_lost)

    def close(self) -> None:
        """Nothing: the back end is its owner's."""


class _Place:
    """The member of a station, closed together with it."""

    def __init__(self, runtime: NodeRuntime, linger: float) -> None:
        self._runtime = runtime
        self._linger = linger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime.member, name)

    def close(self) -> None:
        self._runtime.close(self._linger)


def connect_here(job: Job, backend: RendezvousBackend, address: str | None) -> Talk:
    """This node's place in *job*, whose nodes meet in the state that *backend* holds."""
    runtime = NodeRuntime(job, backend=StateBackend(backend, job.heartbeat, address))
    runtime.start()
    return cast(Talk, _Place(runtime, job.close_timeout))
