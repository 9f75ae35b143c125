"""
The coordinator as the store sees it: what it reads and writes, and in which order. Pure.

    Load --> Save --> greeting --> Receive --> (Read beats) --> Save, Write, greeting, Discard --> Receive --> ...

What was decided is in the journal, where there is one, before anybody is told: whoever takes over tells it again.

Rules of this file: no decision is made here (`_coordinator` does); `Server.step` is a function of the server, an
event and the time: it returns the next server and what is to be done. A thread (`_host`) and the simulated cluster
drive the same object. Times are this node's monotonic seconds, and only differences count.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve, field
from typing_extensions import Self, assert_never

from elasticlib._times import soonest
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous import _coordinator
from elasticlib.rendezvous._contact import INTERVAL
from elasticlib.rendezvous._coordinator import Beats, ClearStore, Received, Send, State, Tick, WakeAt
from elasticlib.rendezvous._document import decode_state, encode_state
from elasticlib.rendezvous._endings import in_brief
from elasticlib.rendezvous._exchange import HELLO, PULSE, Posted, beat_key, key_place, report_place
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
    sealed,
)
from elasticlib.rendezvous._operations import ClearForeign, Discard, Log, Read, Receive, Write
from elasticlib.rendezvous._server_events import (
    Abandon,
    Action,
    Arrived,
    Broke,
    Close,
    Destroyed,
    Event,
    Heard,
    Interrupt,
    Load,
    Loaded,
    Purge,
    Save,
    Stop,
    Unsaved,
)
from elasticlib.rendezvous._shortening import LETTER

LOOK = 0.1
"""Share of the heartbeat time between two readings of all beats."""
_SHORTEST_LOOK = 0.01
REFUSALS = 2


@define(eq=False, repr=False)
class Server:
    """The coordinator of one job, for one term of office."""

    run_id: str
    name: str
    """The node that coordinates."""
    key: bytes | None
    nonce: str
    """Of this beginning of the job; a successor goes on with it."""
    state: State
    journaled: bool = False
    """Whether another node may take the coordination over."""
    remark: str = ""
    """What may explain that nobody comes."""
    logic: Any = _coordinator
    """What decides: a module or object with the coordinator's functions."""
    stopped: bool = False
    refusals: int = 0
    """How often the store would not take the document; after `REFUSALS` there is nothing more to leave out of it."""
    _epoch: int = 0
    _mail: Mail = field(factory=Mail)
    _interval: float = 0.0
    _receives: bool = False
    _posted: tuple[Posted, ...] = ()
    """What came, and is to be forgotten once what followed from it is written."""
    _reads: tuple[tuple[str, str], ...] = ()
    """The nodes and their boxes whose beats are being read."""
    _greet_at: float = 0.0
    _look_at: float = 0.0
    _looked: float = 0.0
    _next_loss: float = math.inf
    _pulses: int = 0
    _wake_at: float | None = None
    _dirty: bool = False
    _abandon: Abandon | None = None
    _missing: dict[str, tuple[int, float]] = field(factory=dict)
    """Nodes of which a letter is in the store that never came, its number, and since when."""
    _beats: dict[str, Beat] = field(factory=dict)
    """The latest beat of each box: one with a lower count is of the past, whoever wrote it again."""
    _leave_by: float | None = None

    def begin(self, now: float) -> tuple[Self, tuple[Action, ...]]:
        """Start to coordinate."""
        after, out = self._copy(), list[Action]()
        after._interval = self.state.rules.heartbeat * INTERVAL
        after._greet_at = after._look_at = after._looked = now
        if after.journaled:
            out.append(Load())
        else:
            after._open(now, out)
        return after, tuple(out)

    def step(self, event: Event, now: float) -> tuple[Self, tuple[Action, ...]]:
        """The server after *event*, and what is to be done, in order; *now* never goes back."""
        after, out = self._copy(), list[Action]()
        if not self.stopped:
            after._hear(event, now, out)
        return after, tuple(out)

    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state.final is not None

    def _copy(self) -> Self:
        after = copy.copy(self)
        after._mail = self._mail.copy()
        after._missing = dict(self._missing)
        return after

    def _hear(self, event: Event, now: float, out: list[Action]) -> None:
        match event:
            case Loaded(data):
                self._take_over(data, now, out)
            case Destroyed(why):
                self._forget_all(why, now, out)
            case Arrived(entries):
                self._receives = False
                self._turn(entries, now, out)
            case Heard(found):
                self._listen(found, now, out)
                self._conclude(now, out)
            case Abandon():
                self._abandon = event
                self._interrupt(out)
            case Close(linger):
                if self._leave_by is None:
                    self._leave_by = now + linger
                    self._interrupt(out)
            case Unsaved(why, undone):
                self._save_less(why, undone, now, out)
            case Broke(why):
                self._receives = False
                self._follow(self.logic.abandon(self.state, why), now, out)
                self._conclude(now, out)
            case _:
                assert_never(event)

    def _interrupt(self, out: list[Action]) -> None:
        if self._receives:
            out.append(Interrupt())

    # Its life: one turn after the other.

    def _open(self, now: float, out: list[Action]) -> None:
        self._step(Tick(), now, out)
        self._commit(now, out)
        self._greet(now, out)
        self._rest(now, out)

    def _turn(self, entries: Sequence[Posted], now: float, out: list[Action]) -> None:
        self._posted = tuple(entries)
        for entry in entries:
            self._read(entry, now, out)
        if self._abandon is not None:
            (why, leaver), self._abandon = (self._abandon.why, self._abandon.leaver), None
            self._follow(self.logic.abandon(self.state, why), now, out)
            if leaver is not None:
                self._mail.part(leaver)
        if self._wake_at is not None and now >= self._wake_at:
            self._step(Tick(), now, out)
        if self._interval and now >= self._look():
            self._reads = tuple(self.logic.boxes(self.state).items())
            out.append(Read(tuple(beat_key(box) for _, box in self._reads)))
        else:
            self._conclude(now, out)

    def _conclude(self, now: float, out: list[Action]) -> None:
        self._commit(now, out)
        if self._interval and now >= self._greet_at:
            self._greet(now, out)
        if self._posted:
            out.append(Discard(self._posted))
            self._posted = ()
        self._rest(now, out)

    def _rest(self, now: float, out: list[Action]) -> None:
        if self._is_done(now):
            if self.journaled and self.is_over():
                out.append(Purge())
            self.stopped = True
            out.append(Stop())
            return
        times = [self._wake_at, self._leave_by]
        if self._interval:
            times += [self._look(), self._greet_at]
        due = now if self._abandon is not None else soonest(*times)
        self._receives = True
        out.append(Receive(None if due is None else max(0.0, due - now)))

    def _look(self) -> float:
        """When to read the beats: often enough that a silent node is noticed soon after its time is over."""
        return min(self._look_at, self._next_loss)

    def _is_done(self, now: float) -> bool:
        if self._leave_by is None:
            return False
        return now >= self._leave_by or not (self._mail.unparted or self._abandon)

    # What comes in.

    def _read(self, entry: Posted, now: float, out: list[Action]) -> None:
        if not entry.data:
            return
        try:
            letter = self._letter(entry.data)
        except RendezvousStateError as error:
            out.append(Log("warning", f"a report was refused: {error}"))
            return
        self._step(Received(letter.seq, letter.report), now, out)
        if isinstance(letter.report, (Bye, Leave)):  # who leaves does not wait for the answer
            self._mail.part(letter.report.node)

    def _letter(self, data: bytes) -> Letter:
        place = ""
        if len(data) > LETTER:
            raise RendezvousStateError(f"the inbox holds {len(data):,} bytes, and no letter has more than {LETTER:,}")
        if self.key is not None:
            try:  # whom it is from must be known to check that it is from them
                body = json.loads(data)
                place = report_place(self.run_id, self.nonce, str(body["report"]["node"]), int(body["seq"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise RendezvousStateError(f"the inbox holds {data[:80]!r}, which is no letter") from None
        message = decode(data, self.key, place)
        if not isinstance(message, Letter):
            raise RendezvousStateError(f"a node may not post a {type(message).__name__}")
        return message

    def _listen(self, found: Sequence[bytes | None], now: float, out: list[Action]) -> None:
        beats = {}
        for (node, box), data in zip(self._reads, found, strict=True):
            beat, known = self._beat(box, data, out), self._beats.get(box)
            if beat is not None and known is not None and beat.count < known.count:
                beat = known
            if beat is not None:
                beats[box] = beat
                self._mail.note(box, beat.read)
                self._look_for_letters(node, beat.said, now)
            elif known is not None:
                beats[box] = known
        self._beats = beats
        counts = {box: beat.count for box, beat in beats.items()}
        self._step(Beats(counts), now, out)
        self._mail.bury(counts, now, self.state.rules.heartbeat)
        # Once a beat says that a notice was not read for longer than a beat takes, the store has lost it.
        self._mail.remind(now, 2 * self._interval)
        self._looked = now
        self._look_at = now + self.state.rules.heartbeat * LOOK
        loss = self.logic.next_loss(self.state)  # who comes later is lost later
        self._next_loss = math.inf if loss is None else max(loss, now + _SHORTEST_LOOK)

    def _look_for_letters(self, node: str, said: int, now: float) -> None:
        """A letter that its node saw in the store and that never comes here was removed by somebody."""
        heard = self.state.heard.get(node, 0)
        if said <= heard:
            self._missing.pop(node, None)
            return
        number, since = self._missing.setdefault(node, (said, now))
        if number <= heard:
            del self._missing[node]
        elif now > since + self.state.rules.heartbeat:
            self._abandon = Abandon(f"letter {number} of node {node} was removed from the store before it was read")

    def _beat(self, box: str, data: bytes | None, out: list[Action]) -> Beat | None:
        if data is None:
            return None
        place = key_place(self.run_id, self.nonce, beat_key(box))
        try:
            beat = decode(data, self.key, place)
            if not isinstance(beat, Beat):
                raise RendezvousStateError(f"{beat_key(box)} holds a {type(beat).__name__}")
        except RendezvousStateError as error:
            out.append(Log("warning", f"a beat was refused: {error}"))
            return None
        return beat

    # What goes out.

    def _step(self, event: _coordinator.Event, now: float, out: list[Action]) -> None:
        self._wake_at = None
        self._follow(self.logic.step(self.state, event, now), now, out)

    def _follow(self, outcome: tuple[State, Sequence[_coordinator.Action]], now: float, out: list[Action]) -> None:
        state, actions = outcome
        if self.journaled:
            self._dirty = self._dirty or state != self.state  # signs of life alone make no difference
        self.state = state
        for action in actions:
            match action:
                case Send(box=box, node=node, notice=notice):
                    if isinstance(notice, Final) and notice.kind == "timeout" and self.remark:
                        notice = evolve(notice, why=f"{notice.why}; {self.remark}")
                    self._mail.add(box, node, notice, now)
                case WakeAt(when=when):
                    self._wake_at = when
                case ClearStore():
                    self._commit(now, out)
                    out.append(ClearForeign())
                case _:
                    assert_never(action)

    def _commit(self, now: float, out: list[Action]) -> None:
        if self.refusals:
            self.state = in_brief(self.state)
            self._mail.shorten()
        due = dict(self._mail.due())
        if self.journaled and (due or self._dirty):
            out.append(Save(self._document(now)))
        self._dirty = False
        if due:
            out.append(Write(sealed(due, self.key, lambda key: key_place(self.run_id, self.nonce, key))))
            self._mail.written(keep=bool(self._interval))

    def _greet(self, now: float, out: list[Action]) -> None:
        """Say who we are and that we live; again and again, in case somebody removed or scribbled on it."""
        rules = self.state.rules
        terms = Terms(rules.min_nodes, rules.max_nodes, rules.max_restarts)
        hello = Hello(self.run_id, self.nonce, self.name, terms, rules.heartbeat, self.key is not None)
        self._pulses += 1
        status = self.logic.status(self.state, now)
        status += f"; {self.remark}" if status and self.remark else ""
        # A successor's count must be above ours, whatever it is.
        pulse = Pulse((self._epoch << 32) + self._pulses, status, len(self.state.waiting))
        self._greet_at = now + self._interval
        out.append(Write({HELLO: self._sign(hello, HELLO, ""), PULSE: self._sign(pulse, PULSE, self.nonce)}))

    def _sign(self, message: Message, key: str, nonce: str) -> bytes:
        return encode(message, self.key, key_place(self.run_id, nonce, key))

    # For whoever takes over.

    def _save_less(self, why: str, undone: Sequence[Action], now: float, out: list[Action]) -> None:
        """The store is there, and does not take the document: keep less; then end the job, and say why."""
        self.refusals += 1
        if self.refusals > 1:
            self._follow(self.logic.abandon(self.state, f"the store refused the job's state: {why}"), now, out)
        self._dirty = True  # of what was to be saved this is the latest; what was to follow follows now
        self._commit(now, out)
        out += [action for action in undone if not isinstance(action, Save)]

    def _document(self, now: float) -> bytes:
        state = encode_state(self.state, now).decode("ascii")
        body = {"v": 1, "nonce": self.nonce, "epoch": self._epoch, "state": state, "mail": self._mail.plain(self.state)}
        return json.dumps(body, separators=(",", ":")).encode("ascii")

    def _take_over(self, data: bytes | None, now: float, out: list[Action]) -> None:
        if data is not None:
            try:
                body = json.loads(data)
                nonce, epoch = str(body["nonce"]), int(body["epoch"])
                state = decode_state(body["state"].encode("ascii"), now)
                mail = Mail.from_plain(body["mail"], state, now)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RendezvousStateError) as error:
                self._forget_all(f"the coordinator's document is damaged: {error!r}", now, out)
                return
            self.nonce, self._epoch, self.state, self._mail = nonce, epoch + 1, state, mail
        self._save_and_open(now, out)

    def _forget_all(self, why: str, now: float, out: list[Action]) -> None:
        # Who is in the job is not known any more; those who were see that it has begun anew.
        out.append(Log("error", f"job {self.run_id!r}: {why}"))
        self.state = State(self.state.rules)
        self._follow(self.logic.abandon(self.state, f"the coordinator's memory was destroyed: {why}"), now, out)
        self._save_and_open(now, out)

    def _save_and_open(self, now: float, out: list[Action]) -> None:
        out.append(Save(self._document(now)))  # from now on nothing of a former holder is accepted
        self._open(now, out)
