"""
What one coordinator leaves to the next, signed where the job has a token; and who can tell that it is an old one. Pure.

A signature keeps strangers from writing such a text. It does not keep them from putting an older one back: that is
noticed by what nodes have seen since, and ends the job, for a round or a restart that was spent would come again.

Rules of this file: the text is JSON; with a token its signature, which covers the job's id and every byte after it,
comes first. What is not exactly that is a `RendezvousStateError`.
"""

from __future__ import annotations

import hashlib
import hmac
import json

from attrs import evolve, frozen

from elasticlib._untrusted import name, shown
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator._garbage import Garbage
from elasticlib.rendezvous.coordinator._liveness import mailboxes
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._snapshot import decode_state, encode_state
from elasticlib.rendezvous.coordinator._state import State
from elasticlib.rendezvous.protocol._exchange import key_place
from elasticlib.rendezvous.protocol._messages import LAST_EPOCH

VERSION = 1
OBJECTION = 1.0
"""
Share of the heartbeat time in which every node hears of a new coordinator and is heard, or has stopped its workers.

Heartbeats come after 0.3 of it; one that comes back without a coordinator's heartbeat that is not older than the last
one does not count.
"""
ADVICE = "; another program writes to this job's keys: give each job its own --rdzv-id, or restrict access to the store"
_MARK = b"signed:"
_DAMAGES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_DIGITS = hashlib.sha256().digest_size * 2


@frozen
class Handover:
    """The coordinator's memory, as it was when it was last written down."""

    nonce: str
    epoch: int
    """How often the coordination had been taken over."""
    state: State
    outbox: Outbox
    garbage: Garbage

    @property
    def round(self) -> int:
        """Number of the last round; -1: there was none."""
        return -1 if self.state.round is None else self.state.round.number


def write_handover(memory: Handover, run_id: str, key: bytes | None, now: float) -> bytes:
    """The text; *now* is the time of the clock that the memory was made with."""
    state = encode_state(memory.state, now).decode("ascii")
    parts = {
        "state": state,
        "mail": memory.outbox.plain(memory.state),
        "gone": memory.garbage.plain(mailboxes(memory.state)),
    }
    body = {"v": VERSION, "nonce": memory.nonce, "epoch": memory.epoch, **parts}
    text = json.dumps(body, separators=(",", ":")).encode("ascii")
    return text if key is None else b"%s%s:%s" % (_MARK, _signature(text, run_id, key), text)


def read_handover(data: bytes | None, run_id: str, key: bytes | None, now: float) -> Handover:
    """The memory that *data* holds, in the time of a clock that shows *now*; else a `RendezvousStateError`."""
    if data is None:
        raise RendezvousStateError("it is not in the store any more: the job ended without this node, or was deleted")
    text = _checked(data, run_id, key)
    try:
        body = json.loads(text)
        nonce, epoch = name(body["nonce"]), body["epoch"]
        if type(epoch) is not int or not 0 <= epoch < LAST_EPOCH:
            raise ValueError(f"its epoch {shown(epoch)} is not a number of takeovers")
        state = _reserved(decode_state(body["state"].encode("ascii"), now), now, key is not None)
        outbox, garbage = Outbox.from_plain(body["mail"], state, now), Garbage.from_plain(body["gone"], now)
        return Handover(nonce, epoch, state, outbox, garbage)
    except (*_DAMAGES, RendezvousStateError) as error:
        raise RendezvousStateError(f"the coordinator's document is damaged: {error!r:.400}") from error


def _reserved(state: State, now: float, signed: bool) -> State:
    """
    One that may be an old one opens no round before whoever is at work had the time to say so.

    That is one without a round, and with a token any: to put an old one back is all that strangers can do with it.
    """
    if state.round is not None and not signed:
        return state
    return evolve(state, opens_at=now + OBJECTION * state.rules.heartbeat)


def _checked(data: bytes, run_id: str, key: bytes | None) -> bytes:
    if key is None:
        if data.startswith(_MARK):
            raise RendezvousStateError("the coordinator's document is signed, and this node has no token")
        return data
    if not data.startswith(_MARK):
        raise RendezvousStateError("the coordinator's document is not signed, and this job has a token")
    start = len(_MARK) + _DIGITS
    found, mark, text = data[len(_MARK) : start], data[start : start + 1], data[start + 1 :]
    if mark != b":" or not hmac.compare_digest(found, _signature(text, run_id, key)):
        raise RendezvousStateError("the signature of the coordinator's document is not of this job and its token")
    return text


def _signature(text: bytes, run_id: str, key: bytes) -> bytes:
    place = key_place(run_id, "", "state").encode("utf-8", "surrogatepass")
    return hmac.new(key, place + b"\0" + text, hashlib.sha256).hexdigest().encode("ascii")
