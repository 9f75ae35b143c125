"""Limits of a node's messages, and the contents that are left out above them."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._messages import (
    Close,
    Envelope,
    Failed,
    FailureNote,
    Final,
    Leave,
    Report,
    Stopped,
    encode,
)
from elasticlib.rendezvous.protocol._shortening import (
    EARLY,
    ENVELOPE,
    LINE,
    SHORT,
    WHOLE,
    brief,
    cost,
    cut,
    early,
    fitting,
    line,
    refers,
    short,
)

LONG = "".join(f"line {number} of a long text\n" for number in range(1000))[:20_000]
NODE = "a-host-with-a-name-of-30-chars/123456-1a2b3c4d"
KEY = key_of("secret")

texts = st.one_of(st.just(""), st.just(LONG), st.text(max_size=40).map(lambda text: text * 500), st.text())
note_lists = st.lists(
    st.builds(
        FailureNote,
        st.integers(0, 10**6),
        st.integers(0, 63),
        st.just(1),
        st.just(1),
        texts,
        st.text(max_size=10),
        texts,
        texts,
        st.booleans(),
        st.floats(0, 100),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda note: note.rank,
)


def notes(count: int, text: str = LONG) -> tuple[FailureNote, ...]:
    """The last one failed first."""
    return tuple(FailureNote(rank, rank, 1, 1, text, "ValueError", text, age=float(rank)) for rank in range(count))


def size(report: Report) -> int:
    return len(encode(Envelope(10**6, report), KEY, "place"))


@given(note_lists, st.sampled_from([ENVELOPE, ENVELOPE // 4, ENVELOPE // 16]))
def test_no_message_is_longer_than_its_limit(found: list[FailureNote], most: int) -> None:
    kept = fitting(Stopped(NODE, 3, tuple(found)), most)

    assert isinstance(kept, Stopped)
    assert kept.failures
    assert size(kept) <= most


def test_report_that_fits_is_kept_whole() -> None:
    whole, usual = Stopped(NODE, 0, notes(1)), Failed(NODE, 0, notes(1, LONG[:3000]))

    assert whole == fitting(whole)
    assert usual == fitting(usual)


@given(note_lists)
def test_unrequested_report_is_short_enough_for_thousands_of_nodes(found: list[FailureNote]) -> None:
    report = early(Failed(NODE, 0, tuple(found)), None)

    assert size(report) <= EARLY
    assert report.failures


def test_unrequested_report_marks_failures_that_were_cut() -> None:
    (small,) = notes(1, "short")
    report = early(Failed(NODE, 0, (small, evolve(notes(1)[0], rank=1, age=3.0))), None)

    assert {0: False, 1: True} == {note.rank: note.cut for note in report.failures}
    assert small in report.failures


def test_failures_are_reported_again_only_if_better_known() -> None:
    before = Failed(NODE, 0, notes(3))
    later = tuple(evolve(note, age=note.age + 7.0) for note in before.failures)
    better = evolve(later[1], message="what the worker wrote itself")

    assert early(Stopped(NODE, 0, later), before).failures == ()
    assert [1] == [note.rank for note in early(Stopped(NODE, 0, (later[0], better, later[2])), before).failures]
    assert len(early(Stopped(NODE, 1, later), before).failures) == 3


def test_an_end_with_a_long_root_cause_refers_to_where_that_lies() -> None:
    final = Final(False, "why", "a", notes(1)[0])
    reference = refers(final)

    assert reference.root is not None
    assert reference.root.cut
    assert len(encode(reference)) < WHOLE
    assert refers(reference) == reference
    assert refers(small := Final(False, "why", "a", notes(1, "short")[0])) is small
    assert refers(well := Final(True, "well")) is well


def test_of_many_failures_the_first_keeps_its_texts() -> None:
    kept = fitting(Stopped(NODE, 0, notes(8)))

    assert isinstance(kept, Stopped)
    first, *others = sorted(kept.failures, key=lambda note: -note.age)
    assert first == notes(8)[7]
    assert len(others) == 7
    assert all(cost(note.message) <= SHORT >= cost(note.traceback) for note in others)


def test_lost_connection_loses_its_texts_before_other_failures() -> None:
    late, early = notes(2, LONG * 2)
    kept = fitting(Stopped(NODE, 0, (late, evolve(early, secondary=True))))

    assert isinstance(kept, Stopped)
    whole = {note.rank: cost(note.traceback) > SHORT for note in kept.failures}
    assert whole == {0: True, 1: False}


def test_permanent_failure_is_reported_behind_thousands_of_others() -> None:
    fatal = evolve(notes(1)[0], rank=5000, fatal=True)
    kept = fitting(Failed(NODE, 0, (*notes(3000), fatal)))

    assert isinstance(kept, Failed)
    assert any(note.fatal for note in kept.failures)


@pytest.mark.parametrize("text", [LONG, "\U0001f600" * 9000, "\0" * 9000, "\n" * 9000])
@pytest.mark.parametrize("most", [100, 1000, 5000])
def test_shortened_text_states_where_and_how_much_was_cut(text: str, most: int) -> None:
    kept = cut(text, most)

    first, mark, last = kept.partition("[... ")
    number, _, rest = last.partition(" characters were cut here ...]")
    assert mark
    assert text.startswith(first)
    assert text.endswith(rest)
    assert len(text) == len(first) + int(number.replace(",", "")) + len(rest)
    assert cost(kept) <= most


@given(texts, st.integers(0, 3000))
def test_a_text_costs_what_it_may_and_is_cut_only_where_it_must(text: str, most: int) -> None:
    kept = cut(text, most)

    assert cost(kept) <= most
    assert kept == text or cost(text) > most


def test_reason_why_node_leaves_is_cut_to_one_line() -> None:
    for report in (Leave(NODE, LONG), Close(NODE, LONG)):
        kept = fitting(report)
        assert isinstance(kept, (Leave, Close))
        assert cost(kept.why) <= LINE
    assert cost(line(LONG)) <= LINE


def test_brief_outcome_has_its_root_cause_in_a_few_lines() -> None:
    final = Final(False, "why", "a", notes(1)[0])

    assert evolve(final, root=short(notes(1)[0])) == brief(final)
    assert brief(Final(True, "well")) == Final(True, "well")
