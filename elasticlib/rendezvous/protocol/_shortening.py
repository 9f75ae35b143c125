"""
Size limits of messages, and what is left out of longer ones. Pure.

Rules of this file: sizes are bytes on the wire, where a character costs one to twelve. A mark
stands wherever a text was cut. Of several failures the one that may be the root cause loses its
text last.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps

from attrs import asdict, evolve

from elasticlib.rendezvous.protocol._codec import write
from elasticlib.rendezvous.protocol._messages import Close, Failed, FailureNote, Final, Leave, Report, Stopped, encode

ENVELOPE = 64 * 1024
"""
Bytes of a node's message: one failure with two texts of 20,000 characters, and a few lines of each
other.
"""
EARLY = 8 * 1024
"""
Bytes of a message on failures before the root cause is known; its node is asked for all later.
"""
WHOLE = 2 * 1024
"""Bytes of a root cause in each node's notice; a longer one is stored once for all nodes."""
LINE = 1000
"""Bytes of a text that goes to every node of a job."""
SHORT = 200
"""Bytes of each text of a failure in its short form."""
MOST_NOTES = 32
"""Failures in one message."""
_ENVELOPE = 1024
"""Bytes of a message besides its report, or of a report besides texts: number, signature, names."""
_MARK = "[... {:,} characters were cut here ...]"
_MARK_COST = 60
_BEGINNING = 0.25
"""Share of a shortened text that is its beginning: the end of a traceback is more useful."""


def cost(text: str) -> int:
    """Return the bytes of a text on the wire."""
    return len(dumps(text)) - 2


def cut(text: str, most: int, beginning: float = _BEGINNING) -> str:
    """
    Return the text in at most *most* bytes: its beginning (a share of *beginning*), a mark, and its
    end.
    """
    # The length first: it saves counting the cost of a very long text.
    is_short = len(text) <= most and cost(text) <= most
    if is_short:
        return text

    room = most - _MARK_COST
    if room <= 0:
        return ""

    first = _first(text, int(room * beginning))

    # Backwards, so that the same cut keeps the end.
    last = _first(text[-room:][::-1], room - cost(first))[::-1]
    return f"{first}{_MARK.format(len(text) - len(first) - len(last))}{last}"


def _first(text: str, most: int) -> str:
    """Return the longest beginning of *text* that costs at most *most* bytes."""
    text = text[:most]  # a character costs a byte at least
    while text and (size := cost(text)) > most:
        text = text[: min(len(text) - 1, len(text) * most // size)]
    return text


def line(text: str) -> str:
    """Return a text for every node, cut if it is long."""
    return cut(text, LINE, 0.75)


def place(note: FailureNote, age: float, node: str = "") -> tuple[bool, float, str, int]:
    """
    Return a sort key, the likeliest root cause first: a lost connection never beats another kind of
    failure.
    """
    return note.secondary, -age, node, note.rank


def short(note: FailureNote) -> FailureNote:
    """Return the short form of a failure that is not the root cause."""
    return _with_texts(note, SHORT, SHORT)


def brief(final: Final) -> Final:
    """
    Return the same end, with a few lines of its root cause, for readers that cannot request more.
    """
    if final.root is None:
        return final
    return evolve(final, root=evolve(short(final.root), cut=False))


def refers(final: Final) -> Final:
    """
    Return the same end for each node's notice; its long root cause is stored once for all nodes.
    """
    # The root cause is stored as its node's message: without a node it is not stored.
    if final.root is None or final.root_node is None:
        return final
    if _fits((final.root,), WHOLE):
        return final
    return evolve(final, root=evolve(short(final.root), cut=True))


def fitting(report: Report, most: int = ENVELOPE) -> Report:
    """Return the report, with its texts shortened for a message of at most *most* bytes."""
    match report:
        case Failed() | Stopped():
            return whole(report, most)
        case Leave() | Close():
            room = max(most - _ENVELOPE, SHORT)
            return evolve(report, why=cut(report.why, min(LINE, room), 0.75))
    return report


def whole(report: Failed | Stopped, most: int = ENVELOPE) -> Failed | Stopped:
    """Return the failures with as much text as fits into a message of at most *most* bytes."""
    room = most - _ENVELOPE - len(encode(evolve(report, failures=())))
    are_few = len(report.failures) <= MOST_NOTES
    if are_few and _fits(report.failures, room):
        return report

    # A failure that a restart would only repeat ends the job: it must not lose its text.
    root, *others = sorted(report.failures, key=lambda note: (not note.fatal, *place(note, note.age)))

    # First a few words on each; then as much as possible of the likely root cause; then more of the
    # others.
    shortened = _shorten(others[: MOST_NOTES - 1], room // 2)
    room -= sum(map(_size, shortened))
    root = _bounded(root, room)
    room -= _size(root)
    return evolve(report, failures=(root, *_restore(others, shortened, room)))


def _shorten(notes: Sequence[FailureNote], room: int) -> list[FailureNote]:
    """Return as many of the first failures, in short form, as fit into *room* bytes."""
    kept = []
    for note in map(short, notes):
        room -= _size(note)
        if room < 0:
            break
        kept.append(note)
    return kept


def _restore(notes: Sequence[FailureNote], shortened: Sequence[FailureNote], room: int) -> list[FailureNote]:
    """Return the *shortened* failures, in full where *room* more bytes allow it."""
    kept = []
    for note, brief_note in zip(notes, shortened, strict=False):
        saved = _size(brief_note)
        if not _fits((note,), room + saved):
            kept.append(brief_note)
            continue
        kept.append(note)
        room -= _size(note) - saved
    return kept


def early(report: Failed | Stopped, before: Failed | Stopped | None) -> Failed | Stopped:
    """
    Return the first, short report on failures, without those that were reported *before* for the
    same round.
    """
    known: set[FailureNote] = set()
    if before is not None and before.round == report.round:
        known = {_ageless(note) for note in before.failures}
    news = tuple(note for note in report.failures if _ageless(note) not in known)
    report = evolve(report, failures=news)
    kept = whole(report, EARLY)
    return evolve(kept, failures=tuple(_marked(note, news) for note in kept.failures))


def _ageless(note: FailureNote) -> FailureNote:
    return evolve(note, age=0.0)


def _marked(note: FailureNote, wholes: Sequence[FailureNote]) -> FailureNote:
    """Return the failure, marked as cut unless it is one of *wholes*."""
    if note in wholes:
        return note
    return evolve(note, cut=True)


def _fits(notes: Sequence[FailureNote], most: int) -> bool:
    # A text costs its length at least: this sorts out most that are too long.
    least = sum(len(text) for note in notes for text in _texts(note))
    if least > most:
        return False
    return sum(map(_size, notes)) <= most


def _bounded(note: FailureNote, most: int) -> FailureNote:
    """Return the failure with texts of at most *most* bytes."""
    if _fits((note,), most):
        return note
    message, traceback = cost(note.message), cost(note.traceback)
    room = max(0, most - _size(_with_texts(note, 0, 0)))
    # Half of the room is the traceback's, and what the message leaves of the other half.
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
