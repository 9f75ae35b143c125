"""
Runs the coordinator: a thread that performs the requests of a `Server` and returns their outcomes.

Rules of this file: nothing is decided here. One thread does all the work. Other threads step the
server under a lock that is never held during a request to the store.
"""

from __future__ import annotations

import logging
import threading
import uuid

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError, StartError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.coordinator import _server_events as events
from elasticlib.rendezvous.coordinator._server import REFUSALS, Server
from elasticlib.rendezvous.coordinator._state import JobState, Rules
from elasticlib.rendezvous.node._presence_watch import PresenceWatch
from elasticlib.rendezvous.protocol._exchange import Exchange, RequestRefusedError
from elasticlib.rendezvous.protocol._messages import Final
from elasticlib.rendezvous.protocol._operations import Log, Read, Receive, perform
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.stores._election import LeadershipLost, StateLog
from elasticlib.rendezvous.stores._kept_document import KeptDocument

_log = logging.getLogger("elasticlib")

_STOPPING = 1.0
"""
Seconds that `CoordinatorHost.close` waits for a turn to end; in a store that hangs it never ends.
"""


class CoordinatorHost:
    """
    The coordinator of one job, at work on *exchange*: `run` it in a thread of the caller, or
    `start` it.
    """

    def __init__(
        self,
        exchange: Exchange,
        rules: Rules,
        *,
        run_id: str = "",
        name: str = "",
        key: bytes | None = None,
        clock: Clock = monotonic,
        state_log: StateLog | KeptDocument | None = None,
        hint: str = "",
        seen: Seen | None = None,
        closes_after: float | None = None,
    ) -> None:
        """*closes_after*: seconds after the job's end at which `run` returns without `close`, at the latest."""
        self._exchange = exchange

        # The thread that works may wait in the store: another connection must wake it.
        self._wakes = exchange.clone()
        self._waking = threading.Lock()
        self._clock = clock
        self._run_id = run_id
        self._state_log = state_log
        self._stepping = threading.Lock()
        nonce = uuid.uuid4().hex
        self._server = Server(
            run_id,
            name,
            key,
            nonce,
            JobState(rules),
            state_log is not None,
            hint,
            seen or Seen(),
            closes_after=closes_after,
        )
        self._presences = PresenceWatch(lambda presence: self._tell(events.NodeEnded(presence)))
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def start(self) -> None:
        """Start to answer, in a new thread; once in the life of a host."""
        self._thread = threading.Thread(target=self.run, name="elasticlib-coordinator", daemon=True)
        start_thread(self._thread)

    def abandon(self, why: str, leaver: str | None = None, kind: str = "closed") -> None:
        """End the job for all nodes, as *kind* of end; *leaver* needs no answer. May be called from any thread."""
        self._tell(events.Abandon(why, leaver, kind))

    def close(self, linger: float = 0.0) -> None:
        """
        Stop answering and end the thread, once all nodes have read how the job ended.

        Waits *linger* seconds for that at most. Nodes that have no notice yet get none.
        """
        self._tell(events.CloseServer(linger))
        self._done.wait(linger + _STOPPING)
        if self._thread is not None:
            # It has ended, or hangs in the store: waiting any longer would help neither.
            self._thread.join(0.1)

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self._server.is_over()

    def final(self) -> Final | None:
        """Return how the job ended; None before its end."""
        return self._server.state.final

    def run(self) -> None:
        """
        Answer until `close`, or until the lead is lost.

        Raises:

        * `LeadershipLost` when another node coordinates now
        * `RendezvousConnectionError` when the store is gone
        * `RequestRefusedError` when the store refuses even the end of the job; then nothing more
          was written
        """
        try:
            try:
                with self._stepping:
                    self._server, actions = self._server.begin(self._clock())
                self._work(actions)
            # Not a failure of this coordinator: the caller decides what that means.
            except (LeadershipLost, RendezvousConnectionError):
                raise
            except Exception as error:
                _log.exception("the coordinator of job %r failed", self._run_id)
                # An error of this library: the nodes must learn that there are no more decisions,
                # and why.
                self._work(self._step(events.OperationFailed(f"the coordinator failed: {error!r}")))
        except RendezvousError as error:
            # In a separate thread no caller could catch it.
            if self._thread is None and isinstance(
                error, (LeadershipLost, RendezvousConnectionError, RequestRefusedError)
            ):
                raise
            _log.warning("the coordinator of job %r stops: %s", self._run_id, error)
        finally:
            self._done.set()
            self._presences.close()
            self._wakes.close()
            self._exchange.close()

    def _work(self, actions: tuple[events.Action, ...]) -> None:
        while actions:
            event = self._perform(actions)
            actions = () if event is None else self._step(event)

    def _perform(self, actions: tuple[events.Action, ...]) -> events.Event | None:
        """
        Do the actions in order; return the result of the last one, or that a state was not saved.
        """
        event = None
        for index, action in enumerate(actions):
            try:
                event = self._do(action)
            except RequestRefusedError as error:
                # The store refuses a state of this size: the server makes a smaller one, and tries
                # that a few times only.
                may_save_less = isinstance(action, events.Save) and self._server.refused < REFUSALS
                if not may_save_less:
                    raise
                return events.Unsaved(str(error), actions[index + 1 :])

        return event

    def _do(self, action: events.Action) -> events.Event | None:
        """Do one action; return its result, if the server waits for that."""
        match action:
            case Receive():
                return events.Arrived(self._exchange.receive(action.timeout))
            case Read():
                return events.HeartbeatsFetched(self._exchange.read(action.keys))
            case events.Load():
                return _load(self._log_of_state())
            case events.Save(data):
                self._log_of_state().save(data)
            case events.Purge():
                self._log_of_state().purge()
            case events.WatchNodes(presences):
                self._presences.watch(presences)
            case events.Interrupt():
                self._wake()
            case Log(level, text):
                _log.log(logging.getLevelName(level.upper()), text)
            case events.ServerStopped():
                # It is the last action: without an event the work ends.
                pass
            case _:
                perform(self._exchange, action)

        return None

    def _log_of_state(self) -> StateLog | KeptDocument:
        assert self._state_log is not None
        return self._state_log

    def _step(self, event: events.Event) -> tuple[events.Action, ...]:
        with self._stepping:
            self._server, actions = self._server.step(event, self._clock())
            return actions

    def _tell(self, event: events.Event) -> None:
        """
        Step the server from any thread; urgent actions are done here, all others by its own thread.
        """
        for action in self._step(event):
            self._do(action)

    def _wake(self) -> None:
        """End the wait for the inbox; a store that hangs only blocks a thread for this purpose."""

        def post() -> None:
            with self._waking:  # one thread at a time uses a connection
                try:
                    self._wakes.post(b"")
                except RendezvousError as error:
                    _log.debug("the coordinator could not be woken: %s", error)

        try:
            # In a thread: posting may block, and the caller may be the agent's own thread.
            start_thread(threading.Thread(target=post, name="elasticlib-wake", daemon=True))
        except StartError:
            # No thread can be started: waiting here is better than leaving the coordinator asleep.
            post()


def _load(state_log: StateLog | KeptDocument) -> events.Event:
    """Return the saved state of the last coordinator, or that it cannot be read."""
    try:
        data = state_log.load()
    except RendezvousStateError as error:
        return events.Destroyed(str(error))
    return events.Loaded(data, is_private=isinstance(state_log, KeptDocument))
