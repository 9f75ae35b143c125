"""
What a node may say at most, and what is left out where it has more to say. Pure.

Rules of this file: sizes are bytes on the wire, where a character costs one to twelve. Wherever a text was cut it says
so. Of several failures the one that may be the root cause loses its text last.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps

from attrs import asdict, evolve

from elasticlib.rendezvous.protocol._codec import write
from elasticlib.rendezvous.protocol._messages import Close, Failed, FailureNote, Final, Leave, Report, Stopped, encode

ENVELOPE = 64 * 1024
"""Bytes of a node's message: one failure with two texts of 20,000 characters, and a few lines of each other."""
EARLY = 8 * 1024
"""Bytes of a message on failures, none known yet to be the root cause: who has that is asked for all."""
WHOLE = 2 * 1024
"""Bytes of a root cause that each node is told in a notice of its own: a longer one lies in one place for all."""
LINE = 1000
"""Bytes of a text that goes to every node of a job."""
SHORT = 200
"""Bytes of each text of a failure that is not told whole."""
MOST_NOTES = 32
"""Failures that one message tells."""
_ENVELOPE = 1024
"""Bytes that a message has besides its report, or its report besides texts: number, signature, names."""
_MARK = "[... {:,} characters were cut here ...]"
_MARK_COST = 60
_BEGINNING = 0.25
"""Share of a shortened text that is its beginning: the end of a traceback says most."""


def cost(text: str) -> int:
    """Bytes of a text on the wire."""
    return len(dumps(text)) - 2


def cut(text: str, most: int, beginning: float = _BEGINNING) -> str:
    """The text in at most so many bytes: its beginning, as large a share as that, a mark, and its end."""
    if len(text) <= most and cost(text) <= most:
        return text
    room = most - _MARK_COST
    if room <= 0:
        return ""
    first = _first(text, int(room * beginning))
    last = _first(text[-room:][::-1], room - cost(first))[::-1]
    return f"{first}{_MARK.format(len(text) - len(first) - len(last))}{last}"


def _first(text: str, most: int) -> str:
    """As much of the beginning as costs so many bytes."""
    text = text[:most]
    while text and (size := cost(text)) > most:
        text = text[: min(len(text) - 1, len(text) * most // size)]
    return text


def line(text: str) -> str:
    """A text that goes to every node."""
    return cut(text, LINE, 0.75)


def place(note: FailureNote, age: float, node: str = "") -> tuple[bool, float, str, int]:
    """Sorts failures by how likely each is the root cause: a lost connection never beats another kind of failure."""
    return note.secondary, -age, node, note.rank


def short(note: FailureNote) -> FailureNote:
    """What is told of a failure that is not the root cause."""
    return _with_texts(note, SHORT, SHORT)


def brief(final: Final) -> Final:
    """The same end, with a few lines of its root cause, of which there is no more."""
    return final if final.root is None else evolve(final, root=evolve(short(final.root), cut=False))


def refers(final: Final) -> Final:
    """The same end, in whose stead each node can be told it where the whole root cause lies in one place for all."""
    if final.root is None or final.root_node is None or _fits((final.root,), WHOLE):
        return final
    return evolve(final, root=evolve(short(final.root), cut=True))


def fitting(report: Report, most: int = ENVELOPE) -> Report:
    """The report such that a message with it has at most so many bytes, as far as leaving texts out makes it so."""
    match report:
        case Failed() | Stopped():
            return whole(report, most)
        case Leave() | Close():
            return evolve(report, why=cut(report.why, min(LINE, max(most - _ENVELOPE, SHORT)), 0.75))
    return report


def whole(report: Failed | Stopped, most: int = ENVELOPE) -> Failed | Stopped:
    """All that a message of at most so many bytes can say of failures."""
    left = most - _ENVELOPE - len(encode(evolve(report, failures=())))
    if len(report.failures) <= MOST_NOTES and _fits(report.failures, left):
        return report
    first, *rest = sorted(report.failures, key=lambda note: (not note.fatal, *place(note, note.age)))
    others: list[tuple[FailureNote, int]] = []
    room = left // 2
    for note in map(short, rest[: MOST_NOTES - 1]):
        if (room := room - (size := _size(note))) < 0:
            break
        others.append((note, size))
    left -= sum(size for _, size in others)
    root = _bounded(first, left)
    left -= _size(root)
    kept = [root]
    for note, (told, size) in zip(rest, others, strict=False):
        fits = _fits((note,), left + size)
        kept.append(note if fits else told)
        left -= _size(note) - size if fits else 0
    return evolve(report, failures=tuple(kept))


def early(report: Failed | Stopped, before: Failed | Stopped | None) -> Failed | Stopped:
    """What is said as long as nobody asks for more: without what was said *before* of the same round, and not much."""
    told: set[FailureNote] = set()
    if before is not None and before.round == report.round:
        told = {evolve(note, age=0.0) for note in before.failures}
    news = tuple(note for note in report.failures if evolve(note, age=0.0) not in told)
    report = evolve(report, failures=news)
    kept = whole(report, EARLY)
    return evolve(kept, failures=tuple(note if note in news else evolve(note, cut=True) for note in kept.failures))


def _fits(notes: Sequence[FailureNote], most: int) -> bool:
    # A text costs its length at least: most that are too long need not be looked at.
    return sum(len(text) for note in notes for text in _texts(note)) <= most and sum(map(_size, notes)) <= most


def _bounded(note: FailureNote, most: int) -> FailureNote:
    """As much of the failure as costs so many bytes."""
    if _fits((note,), most):
        return note
    message, traceback = cost(note.message), cost(note.traceback)
    room = max(0, most - _size(_with_texts(note, 0, 0)))
    traceback = min(traceback, max(room // 2, room - message))
    return _with_texts(note, min(message, room - traceback), traceback)


def _with_texts(note: FailureNote, message: int, traceback: int) -> FailureNote:
    return evolve(
        note,
        message=cut(note.message, message),
        traceback=cut(note.traceback, traceback),
        exception_type=cut(note.exception_type, SHORT),
        hint=cut(note.hint, SHORT),
    )


def _size(note: FailureNote) -> int:
    bare = evolve(note, message="", exception_type="", traceback="", hint="")
    return len(write(asdict(bare))) + sum(map(cost, _texts(note))) + 1


def _texts(note: FailureNote) -> tuple[str, ...]:
    return note.message, note.exception_type, note.traceback, note.hint
