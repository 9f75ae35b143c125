"""``breakpoint()`` in a rank, and ``--pdb`` on the rank that failed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]
LIMIT = 60

BREAKPOINTS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.elastic(timeout=20)
def test_all_stop(rank):
    before = rank * 10 + 7
    breakpoint()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("after", before)

@pytest.mark.elastic
def test_one_stops(rank):
    if rank == 1:
        local = "on rank one"
        breakpoint()
    dist.barrier()

def test_plain():
    pass
"""

TRACED = """
import pytest, torch.distributed as dist

@pytest.mark.elastic
def test_first(rank):
    before = 3
    dist.barrier()

def on_rank(number):
    return 7 + number

def test_second(elastic):
    assert elastic(on_rank, 1) == {0: 8, 1: 8}
"""

FAILURES = """
import os
import pytest, torch.distributed as dist

def inner(rank):
    secret = 40 + rank
    if rank >= 1:
        raise ValueError("from inner")

@pytest.mark.elastic(nproc=3)
def test_several(rank):
    inner(rank)
    dist.barrier()

def on_rank():
    where = dist.get_rank()
    assert where == 0, "in elastic"

def test_expected(elastic):
    with pytest.raises(AssertionError):
        elastic(on_rank)

@pytest.mark.xfail
@pytest.mark.elastic
def test_xfails():
    assert 0

def test_called(elastic):
    elastic(on_rank)

def test_plain():
    mine = 7
    assert mine == 8

@pytest.mark.elastic
def test_dies(rank):
    if rank == 0:
        os._exit(3)
    dist.barrier()

@pytest.mark.elastic
def test_works():
    pass
"""


def _spawn(pytester: pytest.Pytester, run: Run, code: str, *args: str) -> Any:
    run("", "--version")  # which sets the environment
    pytester.makepyfile(test_it=code)
    return pytester.spawn_pytest(" ".join(["-p elasticlib.testing.pytest_plugin -p no:cacheprovider", *args]), LIMIT)


def _say(child: Any, prompt: str, words: str, answer: str) -> None:
    child.expect(prompt)
    child.sendline(words)
    child.expect(answer)


def test_breakpoint_stops_a_rank_at_the_terminal(pytester: pytest.Pytester, run: Run) -> None:
    import pexpect

    child = _spawn(pytester, run, BREAKPOINTS)
    child.expect("rank ([01]) is at a breakpoint")
    prompt = rf"\(Pdb rank {child.match.group(1).decode()}\) "
    _say(child, prompt, "p before", "7\r\n")
    _say(child, prompt, "n", "all_reduce")
    _say(child, prompt, "n", "print")  # past the collective, which the other rank is in
    _say(child, prompt, "c", "rank 1 is at a breakpoint")
    _say(child, r"\(Pdb rank 1\) ", "p local", "'on rank one'")
    _say(child, r"\(Pdb rank 1\) ", "c", "3 passed")
    child.expect(pexpect.EOF)


def test_pdb_enters_the_rank_that_failed_and_never_our_frames(pytester: pytest.Pytester, run: Run) -> None:
    import pexpect

    child = _spawn(pytester, run, FAILURES, "--pdb")
    child.expect("entering PDB on rank 1")
    prompt = r"\(Pdb rank 1\) "
    _say(child, prompt, "p secret, rank", r"\(41, 1\)")
    _say(child, prompt, "up", "test_several")
    # What is expected, by pytest.raises or a marker, is not stopped at.
    _say(child, prompt, "c", "entering PDB on rank 1")
    _say(child, prompt, "p where + 100", "101")
    _say(child, prompt, "c", "entering PDB")
    _say(child, r"\(Pdb\) ", "p mine + 100", "107")
    _say(child, r"\(Pdb\) ", "c", "entering PDB on rank 0")
    child.expect("rank 0 has exited: there is nothing to debug")
    child.expect("4 failed.*2 passed.*1 xfailed")
    child.expect(pexpect.EOF)


def test_trace_enters_rank_0_before_its_first_line(pytester: pytest.Pytester, run: Run) -> None:
    child = _spawn(pytester, run, TRACED, "--trace")
    prompt = r"\(Pdb rank 0\) "
    _say(child, prompt, "p rank, 40 + 2", r"\(0, 42\)")
    _say(child, prompt, "n", "dist.barrier")
    _say(child, prompt, "c", "test_second")  # which is pytest's own, in its process
    _say(child, r"\(Pdb\) ", "c", "2 passed")


def test_quitting_the_debugger_ends_the_session(pytester: pytest.Pytester, run: Run) -> None:
    child = _spawn(pytester, run, FAILURES, "--pdb")
    _say(child, r"\(Pdb rank 1\) ", "q", "Quitting debugger")
    child.expect("1 failed")
