"""Calculation of figures from turns, and the counts in them."""

from __future__ import annotations

from attrs import frozen

from tests.benchmarks.figures import Figure, Goal, Of, compare
from tests.benchmarks.lines import Count, count, parts
from tests.benchmarks.sockets import Listener, parse


@frozen
class _Result:
    seconds: float | None


def _console(workers: int, lines: int) -> list[bytes]:
    written = ((rank, "".join(parts(rank, number))) for number in range(lines) for rank in range(workers))
    return [f"[default{rank}]:{line}".encode() for rank, line in written]


def test_the_ratio_is_the_median_of_the_ratios_of_the_turns() -> None:
    figure = Figure(2, "restart", "s", "seconds", (Goal(0.5, Of.RATIO),))

    line = compare(figure, [_Result(1.0), _Result(4.0), _Result(1.0)], [_Result(10.0), _Result(10.0), _Result(2.0)])

    assert 0.4 == line.ratio
    assert 1.0 == line.our_value
    assert line.reached


def test_missed_goal_is_reported_even_if_another_was_not_measured() -> None:
    figure = Figure(2, "restart", "s", "seconds", (Goal(0.5, Of.RATIO), Goal(0.1)))

    line = compare(figure, [_Result(1.0)], [_Result(None)])

    assert line.reached is False


def test_a_goal_without_a_value_is_neither_reached_nor_missed() -> None:
    figure = Figure(2, "restart", "s", "seconds", (Goal(0.5, Of.RATIO),))

    line = compare(figure, [_Result(1.0)], [_Result(None)])

    assert line.reached is None


def test_count_is_summed_over_the_turns_and_has_no_ratio() -> None:
    figure = Figure(7, "rounds with survivors", "", "seconds", (Goal(0),), fold=sum)

    line = compare(figure, [_Result(0), _Result(1)], [_Result(2), _Result(2)])

    assert (1, 4, None) == (line.our_value, line.their_value, line.ratio)
    assert line.reached is False


def test_a_strict_goal_is_missed_at_its_bound() -> None:
    assert Goal(1.0).reached(1.0, None)
    assert not Goal(1.0, strict=True).reached(1.0, None)


def test_a_console_that_holds_every_line_once_counts_as_clean() -> None:
    assert Count(torn=0, lost=0, repeated=0) == count(_console(3, 20), 3, 20)


def test_a_line_that_another_worker_cut_in_two_is_torn_and_lost() -> None:
    console = _console(2, 2)
    first, second = parts(0, 0)
    console[0] = f"[default0]:{first}[default1]:{second}".encode()

    assert Count(torn=1, lost=1, repeated=0) == count(console, 2, 2)


def test_a_line_under_another_workers_prefix_is_torn() -> None:
    console = _console(2, 2)
    console[0] = console[0].replace(b"[default0]", b"[default1]")

    assert Count(torn=1, lost=1, repeated=0) == count(console, 2, 2)


def test_line_printed_twice_counts_as_repeated() -> None:
    console = _console(2, 2)

    assert Count(torn=0, lost=0, repeated=1) == count([*console, console[0]], 2, 2)


def test_only_listening_sockets_are_found_in_both_families() -> None:
    tail = "00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0000000000000000 100 0 0 10 0"
    lines = [
        f"   0: 0100007F:1F90 {tail.format('0A', 11)}",
        f"   1: 00000000:1F91 {tail.format('0A', 12)}",
        f"   2: 0100007F:1F92 {tail.format('01', 13)}",
        f"   3: 00000000000000000000000001000000:1F93 {tail.format('0A', 14)}",
        f"   4: 0000000000000000FFFF00000100007F:1F94 {tail.format('0A', 15)}",
        f"   5: 00000000000000000000000000000000:1F95 {tail.format('0A', 16)}",
    ]

    assert [
        Listener("127.0.0.1", 8080, 11, loopback=True),
        Listener("0.0.0.0", 8081, 12, loopback=False),
        Listener("::1", 8083, 14, loopback=True),
        Listener("127.0.0.1", 8084, 15, loopback=True),
        Listener("::", 8085, 16, loopback=False),
    ] == list(parse(lines))
