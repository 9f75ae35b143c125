"""
Runs the coordinator: reads the inbox and the beats, steps, writes the notices.

Rules of this file: no decision is made here; one thread does all the work and holds all the state; it waits
for the next report, the next reading of beats or the coordinator's own deadline. What was decided is in the
journal, where there is one, before anybody is told: whoever takes over tells it again.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import uuid
from collections.abc import Mapping, Sequence

from attrs import evolve
from typing_extensions import assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib._programs import start_thread
from elasticlib._wire import soonest
from elasticlib.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError, StartError
from elasticlib.rendezvous import _coordinator
from elasticlib.rendezvous._contact import INTERVAL
from elasticlib.rendezvous._coordinator import Action, ClearStore, Received, Rules, Send, State, Tick, WakeAt
from elasticlib.rendezvous._document import decode_state, encode_state
from elasticlib.rendezvous._exchange import HELLO, PULSE, Exchange, Posted, beat_key, box_key, key_place, report_place
from elasticlib.rendezvous._journal import Journal, LeadershipLost
from elasticlib.rendezvous._mail import Mail
from elasticlib.rendezvous._messages import (
    Beat,
    Bye,
    Final,
    Hello,
    Leave,
    Letter,
    Message,
    Pulse,
    Terms,
    decode,
    encode,
)

_log = logging.getLogger("elasticlib")

LOOK = 0.1
"""Share of the heartbeat time between two readings of all beats."""
_SHORTEST_LOOK = 0.01
_STOPPING = 1.0
"""Seconds that `Host.close` waits for a turn to end; a store that hangs never lets it."""


class Host:
    """The coordinator of one job, at work on *exchange*: `run` in a thread of the caller's, or `start`."""

    def __init__(
        self,
        exchange: Exchange,
        rules: Rules,
        *,
        run_id: str = "",
        name: str = "",
        key: bytes | None = None,
        clock: Clock = monotonic,
        journal: Journal | None = None,
        remark: str = "",
    ) -> None:
        self._exchange = exchange
        self._wakes = exchange.clone()
        self._waking = threading.Lock()
        self._clock = clock
        self._run_id, self._name, self._key = run_id, name, key
        self._journal = journal
        self._remark = f"; {remark}" if remark else ""
        """What may explain that nobody comes."""
        self._nonce = uuid.uuid4().hex
        self._epoch = 0
        self._state = State(rules)
        self._mail = Mail()
        self._interval = rules.heartbeat * INTERVAL
        self._greet_at = self._look_at = self._looked = clock()
        self._next_loss = math.inf
        self._pulses = 0
        self._wake_at: float | None = None
        self._dirty = False
        self._abandon: str | None = None
        self._leaver: str | None = None
        self._missing: dict[str, tuple[int, float]] = {}
        self._ends: dict[str, tuple[int | None, float]] = {}
        """Nodes that were told the end: their last count, and since when."""
        self._leave_by: float | None = None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def start(self) -> None:
        """Begin to answer, in a thread of its own; once in the life of a host."""
        self._thread = threading.Thread(target=self.run, name="elasticlib-coordinator", daemon=True)
        start_thread(self._thread)

    def abandon(self, why: str, leaver: str | None = None) -> None:
        """End the job for everybody, *leaver* needs no answer; may be called from any thread."""
        self._leaver = leaver
        self._abandon = why
        self._wake()

    def close(self, linger: float = 0.0) -> None:
        """
        Stop answering and end the thread, once all nodes have read how the job ended.

        Waits *linger* seconds for that at the most. Nodes that were told nothing yet are not told.
        """
        if self._leave_by is None:
            self._leave_by = self._clock() + linger
            self._wake()
        self._done.wait(linger + _STOPPING)
        if self._thread is not None:
            self._thread.join(0.1)

    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self._state.final is not None

    def run(self) -> None:
        """
        Answer until `close`, or until the lead is lost.

        Raises `LeadershipLost` when another node coordinates now, `RendezvousConnectionError` when the store
        is gone: then nothing more was written.
        """
        try:
            self._begin()
            while not self._is_done():
                self._turn()
            if self._journal is not None and self.is_over():
                self._journal.purge()  # the job's id is free again
        except (LeadershipLost, RendezvousConnectionError) as error:
            if self._thread is None:
                raise
            _log.warning("the coordinator of job %r stops: %s", self._run_id, error)
        except Exception as error:
            _log.exception("the coordinator of job %r broke", self._run_id)
            self._give_up(f"the coordinator broke: {error!r}")
        finally:
            self._done.set()
            self._wakes.close()
            self._exchange.close()

    def _begin(self) -> None:
        if self._journal is not None:
            self._take_over(self._journal)
        self._step(Tick())
        self._commit()
        self._greet()

    def _turn(self) -> None:
        posted = self._exchange.receive(self._patience())
        for entry in posted:
            self._read(entry)
        if self._abandon is not None:
            why, self._abandon = self._abandon, None
            self._follow(_coordinator.abandon(self._state, why))
            if self._leaver is not None:
                self._mail.part(self._leaver)
        now = self._clock()
        if self._wake_at is not None and now >= self._wake_at:
            self._step(Tick())
        if self._interval and now >= self._look():
            self._listen_to_beats()
        self._commit()
        if self._interval and now >= self._greet_at:
            self._greet()
        if posted:
            self._exchange.discard(posted)

    def _patience(self) -> float | None:
        times = [self._wake_at, self._leave_by]
        if self._interval:
            times += [self._look(), self._greet_at]
        due = soonest(*times)
        return None if due is None else max(0.0, due - self._clock())

    def _look(self) -> float:
        """When to read the beats: often enough that a silent node is noticed soon after its time is over."""
        return min(self._look_at, self._next_loss)

    def _is_done(self) -> bool:
        if self._leave_by is None:
            return False
        return self._clock() >= self._leave_by or not (self._mail.unparted or self._abandon)

    def _wake(self) -> None:
        """Have `_turn` look at what it was told; a store that hangs holds up nobody but a thread for this alone."""

        def post() -> None:
            with self._waking:  # one thread at a time uses a connection
                try:
                    self._wakes.post(b"")
                except RendezvousError as error:
                    _log.debug("the coordinator could not be woken: %s", error)

        try:
            start_thread(threading.Thread(target=post, name="elasticlib-wake", daemon=True))
        except StartError:
            post()  # there is room for no more

    # What comes in.

    def _read(self, entry: Posted) -> None:
        if not entry.data:
            return
        try:
            letter = self._letter(entry.data)
        except RendezvousStateError as error:
            _log.warning("a report was refused: %s", error)
            return
        self._step(Received(letter.seq, letter.report))
        if isinstance(letter.report, (Bye, Leave)):  # who leaves does not wait for the answer
            self._mail.part(letter.report.node)

    def _letter(self, data: bytes) -> Letter:
        place = ""
        if self._key is not None:
            try:  # whom it is from must be known to check that it is from them
                body = json.loads(data)
                place = report_place(self._run_id, self._nonce, str(body["report"]["node"]), int(body["seq"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise RendezvousStateError(f"the inbox holds {data[:80]!r}, which is no letter") from None
        message = decode(data, self._key, place)
        if not isinstance(message, Letter):
            raise RendezvousStateError(f"a node may not post a {type(message).__name__}")
        return message

    def _listen_to_beats(self) -> None:
        boxes = _coordinator.boxes(self._state)
        counts = {}
        found = self._exchange.read([beat_key(box) for box in boxes.values()])
        for (node, box), data in zip(boxes.items(), found, strict=True):
            beat = self._beat(box, data)
            if beat is not None:
                counts[box] = beat.count
                self._mail.note(box, beat.read)
                self._look_for_letters(node, beat.said)
        self._step(_coordinator.Beats(counts))
        self._bury(counts)
        # Once a beat says that a notice was not read for longer than a beat takes, the store has lost it.
        self._mail.remind(self._clock(), 2 * self._interval)
        self._looked = self._clock()
        self._look_at = self._looked + self._state.rules.heartbeat * LOOK
        loss = _coordinator.next_loss(self._state)  # who comes later is lost later
        self._next_loss = math.inf if loss is None else max(loss, self._looked + _SHORTEST_LOOK)

    def _bury(self, counts: Mapping[str, int]) -> None:
        """Wait no more for nodes that were told the end, and whose beats have stopped since."""
        now = self._clock()
        for node in list(self._mail.unparted):
            count = counts.get(self._mail.box_of(node))
            seen, since = self._ends.get(node, (None, now))
            if node not in self._ends or (count is not None and count != seen):
                self._ends[node] = (count, now)
            elif now >= since + self._state.rules.heartbeat:
                self._mail.part(node)

    def _look_for_letters(self, node: str, said: int) -> None:
        """A letter that its node saw in the store and that never comes here was removed by somebody."""
        if said <= self._state.heard.get(node, 0):
            self._missing.pop(node, None)
            return
        number, since = self._missing.setdefault(node, (said, self._clock()))
        if number <= self._state.heard.get(node, 0):
            del self._missing[node]
        elif self._clock() > since + self._state.rules.heartbeat:
            self._abandon = f"letter {number} of node {node} was removed from the store before it was read"

    def _beat(self, box: str, data: bytes | None) -> Beat | None:
        if data is None:
            return None
        place = key_place(self._run_id, self._nonce, beat_key(box))
        try:
            beat = decode(data, self._key, place)
            if not isinstance(beat, Beat):
                raise RendezvousStateError(f"{beat_key(box)} holds a {type(beat).__name__}")
        except RendezvousStateError as error:
            _log.warning("a beat was refused: %s", error)
            return None
        return beat

    # What goes out.

    def _step(self, event: _coordinator.Event) -> None:
        self._wake_at = None
        self._follow(_coordinator.step(self._state, event, self._clock()))

    def _follow(self, outcome: tuple[State, Sequence[Action]]) -> None:
        state, actions = outcome
        if self._journal is not None:
            self._dirty = self._dirty or state != self._state  # signs of life alone make no difference
        self._state = state
        for action in actions:
            match action:
                case Send(box=box, node=node, notice=notice):
                    if isinstance(notice, Final) and notice.kind == "timeout":
                        notice = evolve(notice, why=notice.why + self._remark)
                    index = self._mail.next_index(box)
                    key = box_key(box, index)
                    data = encode(notice, self._key, key_place(self._run_id, self._nonce, key))
                    self._mail.add(box, node, index, data, notice, self._clock())
                case WakeAt(when=when):
                    self._wake_at = when
                case ClearStore():
                    self._commit()
                    self._exchange.clear_foreign()
                case _:
                    assert_never(action)

    def _commit(self) -> None:
        due = self._mail.due()
        if self._journal is not None and (due or self._dirty):
            self._journal.save(self._document())
        self._dirty = False
        if due:
            self._exchange.write(due)
            self._mail.written(keep=bool(self._interval))

    def _greet(self) -> None:
        """Say who we are and that we live; again and again, in case somebody removed or scribbled on it."""
        rules = self._state.rules
        terms = Terms(rules.min_nodes, rules.max_nodes, rules.max_restarts)
        signed = self._key is not None
        hello = Hello(self._run_id, self._nonce, self._name, terms, rules.heartbeat, signed)
        self._pulses += 1
        status = _coordinator.status(self._state, self._clock())
        status += self._remark if status else ""
        # A successor's count must be above ours, whatever it is.
        pulse = Pulse((self._epoch << 32) + self._pulses, status, len(self._state.waiting))
        self._greet_at = self._clock() + self._interval
        self._exchange.write({HELLO: self._sign(hello, HELLO, ""), PULSE: self._sign(pulse, PULSE, self._nonce)})

    def _sign(self, message: Message, key: str, nonce: str) -> bytes:
        return encode(message, self._key, key_place(self._run_id, nonce, key))

    # For whoever takes over.

    def _document(self) -> bytes:
        state = encode_state(self._state, self._clock()).decode("ascii")
        body = {"v": 1, "nonce": self._nonce, "epoch": self._epoch, "state": state, "mail": self._mail.plain()}
        return json.dumps(body, separators=(",", ":")).encode("ascii")

    def _take_over(self, journal: Journal) -> None:
        try:
            data = journal.load()
            if data is not None:
                self._read_document(data)
        except RendezvousStateError as error:
            # Who is in the job is not known any more; those who were see that it has begun anew.
            _log.error("job %r: %s", self._run_id, error)
            self._state = State(self._state.rules)
            self._follow(_coordinator.abandon(self._state, f"the coordinator's memory was destroyed: {error}"))
        journal.save(self._document())  # from now on nothing of a former holder is accepted

    def _read_document(self, data: bytes) -> None:
        try:
            body = json.loads(data)
            nonce, epoch = str(body["nonce"]), int(body["epoch"])
            state = decode_state(body["state"].encode("ascii"), self._clock())
            mail = Mail.from_plain(body["mail"], self._clock())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RendezvousStateError(f"the coordinator's document is damaged: {error!r}") from error
        self._nonce, self._epoch, self._state, self._mail = nonce, epoch + 1, state, mail

    def _give_up(self, why: str) -> None:
        """Tell whoever waits for an answer, and whoever will: nobody must wait for ever."""
        try:
            self._follow(_coordinator.abandon(self._state, why))
            self._commit()
            while not self._is_done():
                self._turn()
        except RendezvousError as error:
            if self._thread is None and isinstance(error, (LeadershipLost, RendezvousConnectionError)):
                raise
            _log.warning("the coordinator of job %r stops: %s", self._run_id, error)
