"""
One connection of a node to its job, with its two threads: one speaks, one waits for notices.

Rules of this file: the threads do what stands on the `Desk` and tell what happened; they decide nothing.
A line that was given up changes nothing any more: its threads end when their last call returns.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from attrs import Factory, define, field

from elasticlib._clock import Clock
from elasticlib._programs import start_thread
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    StartError,
)
from elasticlib.rendezvous._contact import INTERVAL, NO_PULSE, Acknowledged, Broken, Greeted
from elasticlib.rendezvous._dial import RefusedError
from elasticlib.rendezvous._exchange import HELLO, PULSE, Exchange, beat_key, box_key, key_place, report_place
from elasticlib.rendezvous._messages import (
    VERSION,
    Beat,
    Final,
    Hello,
    Letter,
    Notice,
    Pulse,
    Report,
    RoundEnd,
    Seat,
    decode,
    encode,
)

_log = logging.getLogger("elasticlib")

Dial: TypeAlias = Callable[[float], Exchange]
"""One attempt to connect, of about so many seconds; raises `RendezvousConnectionError`."""
Happening: TypeAlias = Greeted | Acknowledged | Broken | Notice | RendezvousError | ConfigError | StartError

_WAKE = b""
ATTEMPT = 5.0
"""Seconds for one attempt to connect."""
_SLICE = 60.0
_DOUBT = 3.0
"""Seconds for which a greeting that cannot be ours may be someone's scribble; a coordinator renews its own."""


@define(eq=False)
class Desk:
    """What outlives a connection: letters to send, the box to read, and how far both have come."""

    run_id: str
    node: str
    key: bytes | None
    turned: threading.Condition = Factory(threading.Condition)
    letters: deque[tuple[int, Callable[[], Report]]] = Factory(deque)
    seq: int = 0
    said: int = 0
    box: str = ""
    joined: int = 0
    """Number of the letter that opened the box: until it was said, there is nothing to beat for."""
    joined_sent: float | None = None
    """When that letter was sent for the first time: it may have arrived then, though nothing came back."""
    read: int = 0
    beats: int = 0
    held: bool = False
    closed: bool = False
    nonce: str = ""
    host: str = ""
    """Who coordinates, for people."""
    status: str = ""
    """For whom the job waits, as the coordinator says."""
    waiting: int = 0
    """Nodes that wait for a seat, as the coordinator says."""

    def post(self, report: Callable[[], Report]) -> int:
        """Put a letter on the desk; call with `turned` held. Its number."""
        self.seq += 1
        self.letters.append((self.seq, report))
        self.turned.notify_all()
        return self.seq


@define(eq=False)
class Line:
    """A connection from its first attempt to its end; `start` it once."""

    dial: Dial
    desk: Desk
    clock: Clock
    tell: Callable[[Line, Happening], None]
    attempt: float = ATTEMPT
    stale: bool = False
    _exchange: Exchange | None = None
    _watch: Exchange | None = None
    _awaited: str | None = None
    _heartbeat: float = 0.0
    _beat_at: float = 0.0
    _pulse: int = -1
    _just_joined: bool = False
    _alien_since: float | None = None
    _threads: list[threading.Thread] = field(factory=list)

    def start(self) -> None:
        """Begin to connect."""
        self._run(self._speak, "elasticlib-member")

    def abandon(self) -> None:
        """Give it up; never blocks. Call with `turned` held."""
        self.stale = True
        self.desk.turned.notify_all()
        if self._watch is not None:
            self._watch.close()

    def end(self, patience: float) -> None:
        """Wait until the letters are sent and the threads have ended, at most *patience* seconds for each."""
        for thread in self._threads:
            thread.join(patience)
        with self.desk.turned:
            self.abandon()

    def _run(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RendezvousConnectionError as error:
            self.tell(self, Broken(str(error), isinstance(error, RefusedError)))
        except (RendezvousError, ConfigError, StartError) as error:
            self.tell(self, error)
        except Exception as error:
            _log.exception("a thread of the rendezvous broke")
            self.tell(self, RendezvousStateError(f"the rendezvous of node {self.desk.node} broke: {error!r}"))

    # The thread that speaks.

    def _speak(self) -> None:
        exchange = self._exchange = self.dial(self.attempt)
        try:
            hello = self._greet(exchange)
            if hello is None:
                return
            self._heartbeat = hello.heartbeat
            self.tell(self, Greeted(hello.heartbeat))
            self._run(self._listen, "elasticlib-notices")
            while self._say(exchange):
                pass
        finally:
            exchange.close()

    def _greet(self, exchange: Exchange) -> Hello | None:
        """The coordinator's greeting; None when this line was given up meanwhile."""
        doubted: float | None = None
        while not (self.stale or self.desk.closed):
            if not exchange.wait(HELLO, 1.0):
                self.desk.status = "the store answers, but nobody coordinates this job yet"
                continue
            try:
                return self._check(exchange.read([HELLO])[0] or b"")
            except RendezvousStateError as error:
                doubted = self.clock() if doubted is None else doubted
                if self.clock() > doubted + _DOUBT:
                    raise
                self.desk.status = str(error)
                with self.desk.turned:
                    self.desk.turned.wait(0.1)
        return None

    def _check(self, data: bytes) -> Hello:
        desk = self.desk
        try:
            hello = decode(data, desk.key, key_place(desk.run_id, "", HELLO))
        except RendezvousStateError as error:
            raise RendezvousStateError(_doubt(data, desk.key, error)) from error
        if not isinstance(hello, Hello) or hello.run_id != desk.run_id:
            raise RendezvousStateError(f"where the greeting of job {desk.run_id!r} should be is {data[:80]!r}")
        if desk.nonce and hello.nonce != desk.nonce:
            raise RendezvousClosedError(f"job {desk.run_id!r} has begun anew on {hello.host}: our part of it is over")
        desk.nonce, desk.host = hello.nonce, hello.host
        return hello

    def _say(self, exchange: Exchange) -> bool:
        """Do the next thing on the desk, or wait for one; False at the end."""
        desk = self.desk
        with desk.turned:
            if self.stale:
                return False
            awaited = self._awaited
            wake = awaited is not None and (desk.closed or awaited != self._next_key())
            letter = desk.letters[0] if desk.letters and not wake else None
            due = self._beats() and self.clock() >= self._beat_at
            if not (wake or letter or due):
                if desk.closed:
                    return False
                desk.turned.wait(max(0.0, self._beat_at - self.clock()) if self._beats() else None)
                return True
            if wake:
                self._awaited = None
        if wake:
            assert awaited is not None
            exchange.write({awaited: _WAKE})
        elif letter:
            self._send(exchange, *letter)
        else:
            self._beat(exchange)
        return True

    def _send(self, exchange: Exchange, seq: int, make: Callable[[], Report]) -> None:
        desk = self.desk
        report = make()
        sent = self.clock()
        with desk.turned:
            if seq == desk.joined:
                sent = desk.joined_sent = sent if desk.joined_sent is None else desk.joined_sent
        exchange.post(encode(Letter(seq, report), desk.key, report_place(desk.run_id, desk.nonce, desk.node, seq)))
        with desk.turned:
            if desk.letters and desk.letters[0][0] == seq:
                desk.letters.popleft()
                desk.said = seq
        if seq == desk.joined:
            self._beat_at, self._just_joined = self.clock(), True
            self.tell(self, Acknowledged(sent))

    def _beats(self) -> bool:
        desk = self.desk
        return bool(self._heartbeat and desk.box and desk.said >= desk.joined and not desk.held and not desk.closed)

    def _beat(self, exchange: Exchange) -> None:
        desk, sent = self.desk, self.clock()
        self._beat_at = sent + INTERVAL * self._heartbeat
        with desk.turned:
            desk.beats += 1
            key, beat = beat_key(desk.box), Beat(desk.beats, desk.read, desk.said)
        exchange.write({key: encode(beat, desk.key, key_place(desk.run_id, desk.nonce, key))})
        pulse, hello = exchange.read([PULSE, HELLO])
        count = self._hear_pulse(pulse)
        if count is not None and count > self._pulse:
            self._pulse, self._alien_since = count, None
        elif self._is_alien(hello):
            self._alien_since = sent if self._alien_since is None else self._alien_since
            if sent > self._alien_since + self._heartbeat:
                raise RendezvousClosedError(f"job {desk.run_id!r} has begun anew: our part of it is over")
        self.tell(self, Acknowledged(sent, NO_PULSE if count is None else count))

    def _hear_pulse(self, data: bytes | None) -> int | None:
        desk = self.desk
        try:
            pulse = decode(data or b"", desk.key, key_place(desk.run_id, desk.nonce, PULSE))
        except RendezvousStateError as error:
            _log.debug("a pulse was refused: %s", error)
            return None
        if not isinstance(pulse, Pulse):
            return None
        # Whoever reads it right after the Join reads of a time before it, in which nobody may have been there.
        desk.status, desk.waiting = "" if self._just_joined else pulse.status, pulse.waiting
        self._just_joined = False
        return pulse.count

    def _is_alien(self, data: bytes | None) -> bool:
        """Whether the job greets in the name of another beginning: then nobody knows our box any more."""
        desk = self.desk
        try:
            hello = decode(data or b"", desk.key, key_place(desk.run_id, "", HELLO))
        except RendezvousStateError:
            return False
        return isinstance(hello, Hello) and hello.nonce != desk.nonce

    # The thread that waits for notices.

    def _next_key(self) -> str | None:
        desk = self.desk
        return box_key(desk.box, desk.read) if desk.box and not desk.closed else None

    def _listen(self) -> None:
        assert self._exchange is not None
        exchange = self._watch = self._exchange.clone()
        try:
            while (key := self._await()) is not None:
                if exchange.wait(key, _SLICE):
                    self._read(exchange, key)
        finally:
            exchange.close()

    def _await(self) -> str | None:
        with self.desk.turned:
            self.desk.turned.wait_for(lambda: self.stale or self.desk.closed or self.desk.box)
            self._awaited = None if self.stale else self._next_key()
            return self._awaited

    def _read(self, exchange: Exchange, key: str) -> None:
        desk = self.desk
        data = exchange.read([key])[0]
        notice: Notice | None = None
        if data:
            try:
                message = decode(data, desk.key, key_place(desk.run_id, desk.nonce, key))
                if not isinstance(message, (Seat, RoundEnd, Final)):
                    raise RendezvousStateError(f"{key} holds a {type(message).__name__}, which no coordinator sends")
                notice = message
            except RendezvousStateError as error:
                _log.warning("a notice was refused: %s", error)
        with desk.turned:
            if self.stale:
                return  # left to the line that follows
            self._awaited = None
            # What lies in the box of an earlier Join speaks of a round that this node has done with.
            if notice is not None and key == self._next_key():
                desk.read += 1
                self.tell(self, notice)
        exchange.delete([key])


def _doubt(data: bytes, key: bytes | None, error: RendezvousStateError) -> str:
    """Why this greeting is not for us, as clear as can be."""
    try:
        body = json.loads(data)
        version, signed = body.get("v"), body.get("mac") is not None
    except (ValueError, AttributeError, RecursionError):
        return str(error)
    if version != VERSION:
        told = f"the job's coordinator speaks version {version!r:.40} of our language, this node version {VERSION}"
        return f"{told}: install the same elasticlib on all nodes"
    if signed and key is None:
        return "the job runs with a token, and this node has none: give it the same token (ELASTICLIB_TOKEN)"
    if not signed and key is not None:
        return "this node has a token, and the job runs without one: give all nodes the same token, or none"
    if signed:
        return "this node's token is not the job's: give all nodes the same token (ELASTICLIB_TOKEN)"
    return str(error)


__all__ = ["Desk", "Dial", "Happening", "Line"]
