"""
One job of a server: its coordinator in a thread, from the first request to the end of the job.

Rules of this file: wiring only. The thread ends once the job is over and all nodes have read that.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from attrs import define, field
from typing_extensions import Self

from elasticlib._clock import Clock
from elasticlib.errors import RendezvousError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.serving._requests import OpenJob
from elasticlib.rendezvous.stores._shared_store import Claim, forget
from elasticlib.rendezvous.stores._torch_store import StoreExchange

_log = logging.getLogger("elasticlib")

_OWN_END = 2.0
"""Seconds to delete the job's traces."""


@define(eq=False)
class HostedJob:
    """The job *run_id* of a server."""

    run_id: str
    host: CoordinatorHost
    _claim: Claim
    _exchange: StoreExchange
    _closed: Callable[[str], None]
    _thread: threading.Thread = field(init=False)

    @classmethod
    def begin(
        cls,
        request: OpenJob,
        key: bytes | None,
        desk: StoreExchange,
        *,
        name: str,
        closed: Callable[[str], None],
        clock: Clock,
    ) -> Self:
        """
        Return the coordinator of the job that *request* describes, in the store behind *desk*; `start` it.

        It is called *name*, and its messages are signed with *key*. *closed* gets the job's id once the id is free.
        """
        exchange = desk.of(request.run_id)
        claim = Claim(request.run_id, request.rules.heartbeat, secrets.token_hex(16).encode(), key)

        # Left by an earlier job, or by a stranger: this server coordinates no job of this id yet.
        forget(exchange)
        claim.take(exchange)
        host = CoordinatorHost(
            claim.coordinating(exchange),
            request.rules,
            run_id=request.run_id,
            name=name,
            key=key,
            clock=clock,
            closes_after=request.close_timeout,
        )
        return cls(request.run_id, host, claim, exchange, closed)

    def start(self) -> None:
        """Start to coordinate, in a new thread."""
        self._thread = threading.Thread(target=self._run, name="elasticlib-coordinator", daemon=True)
        start_thread(self._thread)

    def close(self, limit: float) -> None:
        """End the thread, once all nodes have read how the job ended, or *limit* seconds from now."""
        self.host.close(limit)
        # A thread that is left in the store aborts the process at its end.
        self._thread.join(_OWN_END)

    def ended(self) -> str | None:
        """Return how the job ended; None before its end."""
        final = self.host.final()
        return None if final is None else final.why

    def _run(self) -> None:
        try:
            self.host.run()
        except RendezvousError as error:
            _log.warning("the coordinator of job %r stops: %s", self.run_id, error)
        finally:
            self._free()
            _log.info("job %r is over: %s", self.run_id, self.ended())

    def _free(self) -> None:
        """Delete the job's traces, so that a new job can have its id."""
        try:
            with suppress(RendezvousError), closing(self._exchange.clone()) as own:
                if self._claim.give_up(own):
                    # A server may host thousands of jobs in its life.
                    own.clear()
        finally:
            self._closed(self.run_id)
