"""What the workers of a round have in common, and when it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticlib.workers.child._import_notes import Import, Notes
from elasticlib.workers.spawner._import_watch import ImportWatch, common


def of(name: str, *changed: str, origin: str = "") -> Import:
    return Import(name, origin or f"/lib/{name}.py", frozenset(changed))


A, B, C = map(of, "abc")


@pytest.fixture
def watch() -> Iterator[ImportWatch]:
    watch = ImportWatch()
    yield watch
    watch.begin()


def test_what_all_ranks_import_is_common_in_the_order_of_the_first() -> None:
    assert [B, A] == common([[B, A, C], [A, B]])


def test_a_name_from_another_file_is_not_common() -> None:
    assert [A] == common([[A, B], [A, of("b", origin="/project/b.py")]])


def test_a_variable_counts_as_changed_that_one_rank_changed() -> None:
    assert [of("a", "X", "Y")] == common([[of("a", "X")], [of("a", "Y")]])


def test_of_a_module_that_is_imported_twice_the_first_time_counts() -> None:
    assert [A, B] == common([[A, B, of("a", "X")], [B, A]])


def test_it_is_told_once_when_all_is_quiet(watch: ImportWatch) -> None:
    first, second = watch.open(0, 0.0), watch.open(1, 0.0)
    first.add(A)
    second.add(A)

    assert [None, [A], None] == [watch.look(1.0), watch.look(2.0), watch.look(3.0)]


def test_while_an_import_is_under_way_nothing_is_told(watch: ImportWatch) -> None:
    notes = watch.open(0, 0.0)
    notes.add(A)
    notes.set_busy(True)
    assert [None, None, None] == [watch.look(float(time)) for time in (1, 2, 3)]

    notes.set_busy(False)
    notes.add(B)

    assert [None, [A, B]] == [watch.look(4.0), watch.look(5.0)]


def test_looks_get_rarer_and_come_back_with_the_next_import(watch: ImportWatch) -> None:
    notes = watch.open(0, 0.0)
    assert 1.0 == watch.next_look
    waits, now = [], 1.0
    for _ in range(8):
        watch.look(now)
        assert watch.next_look is not None
        waits.append(watch.next_look - now)
        now = watch.next_look

    assert [2.0, 4.0, 8.0, 16.0, 30.0, 30.0] == waits[:6]
    notes.add(A)
    watch.look(now)
    assert now + 1.0 == watch.next_look
    assert [A] == watch.look(now + 1.0)


def test_a_worker_whose_notes_have_no_room_left_teaches_nothing(watch: ImportWatch) -> None:
    notes = watch.open(0, 0.0)
    watch.open(1, 0.0).add(A)
    while notes.read() is not None:
        notes.add(of("a" * 60_000))

    assert watch.found() is None


def test_an_import_that_is_noted_within_another_does_not_end_that_one() -> None:
    notes = Notes()
    notes.set_busy(True)

    notes.add(A)

    assert notes.busy()
    notes.close()


def test_lines_that_a_program_wrote_over_are_left_out() -> None:
    notes = Notes()
    notes.add(A)
    notes.add(B)
    notes._memory[12:15] = b"\xff{\n"

    assert [B] == notes.read()
    notes.close()


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        ["a"],
        ["a", "f", "x", 0],
        ["a", "f", [1], 0],
        ["a b", "f", [], 0],
        [1, "f", [], 0],
        ["a", "f", [], 0.5],
    ],
)
def test_what_names_no_import_is_refused(body: object) -> None:
    with pytest.raises(ValueError, match="names no import"):
        Import.of(body)


def test_an_import_comes_back_as_it_was() -> None:
    assert of("a.b", "X") == Import.of(of("a.b", "X").plain())
