"""Display of the failures of ranks, and the content of these errors for code that catches them."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

FAILURES = """
import ctypes, logging, os, signal, sys
import pytest, torch, torch.distributed as dist

on_ranks = pytest.mark.elastic

@on_ranks
def test_killed(rank):
    print("said by", rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@on_ranks
def test_exit_status(rank):
    if rank == 1:
        sys.exit(3)
    dist.barrier()

@on_ranks
def test_os_exit(rank):
    if rank == 0:
        os._exit(5)
    dist.barrier()

@on_ranks
def test_segfault(rank):
    if rank == 1:
        ctypes.string_at(0)
    dist.barrier()

@pytest.mark.elastic(nproc=4)
def test_secondary(rank):
    local = {"a": rank}
    if rank == 2:
        logging.error("logged by two")
        print("said by two")
        print("and err by two", file=sys.stderr)
        raise ValueError("bad value\\nsecond line")
    dist.all_reduce(torch.ones(1))

@pytest.mark.elastic(nproc=2, timeout=1)
def test_early(rank):
    if rank == 1:
        dist.barrier()

class Holder:
    def __init__(self, value):
        self.value = value

@on_ranks
def test_chain(rank):
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("second") from error

@on_ranks
def test_group(rank):
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

def deep(x):
    twice = x * 2
    raise RuntimeError(f"deep {twice}")

def test_called(elastic):
    mine = 3
    elastic(deep, mine)

def raises(kind, *args):
    if dist.get_rank() == 1:
        raise kind(*args)
    dist.barrier()

@pytest.mark.parametrize("kind, args, attributes", [
    (FileNotFoundError, (2, "none", "file"), {"errno": 2, "filename": "file"}),
    (KeyError, ("key",), {}),
    (ModuleNotFoundError, ("none",), {}),
    (AttributeError, ("none",), {}),
    (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "no"), {"start": 0, "reason": "no"}),
    (TimeoutError, ("late",), {}),
    (StopIteration, (), None),
])
def test_caught(elastic, kind, args, attributes):
    if attributes is None:  # such a class cannot be raised through pytest's generators
        with pytest.raises(Exception) as info:
            elastic(raises, kind, *args)
        assert type(info.value).__name__ == "RanksFailed"
        return
    with pytest.raises(kind, match="rank 1, line [0-9]+: .*" + kind.__name__) as info:
        elastic(raises, kind, *args)
    assert type(info.value.failures[1]) is kind and info.value.root == 1
    assert {name: getattr(info.value, name) for name in attributes} == attributes

@on_ranks
def test_works(rank):
    dist.barrier()
"""


def test_failures_of_all_kinds_name_their_rank_and_the_next_test_works(run: Run) -> None:
    result = run(FAILURES, "-l", "-vv")

    result.assert_outcomes(failed=9, passed=8)
    text = result.stdout.str()
    sections = dict(_sections(text))
    _lines(sections["test_killed"], "*rank 1 of 2 _*", "ended by SIGKILL*", "*stdout call of rank 0 -*", "said by 0")
    _lines(
        sections["test_exit_status"], "rank 0: RuntimeError: *(it lost a peer)", "*_ rank 1 of 2*", "E*SystemExit: 3"
    )
    _lines(sections["test_os_exit"], "*rank 0 of 2 _*", "exit status 5*")
    _lines(sections["test_segfault"], "*rank 1 of 2 _*", "ended by SIGSEGV (test_it.py:*)", "*in test_segfault")
    _lines(
        sections["test_secondary"],
        "ranks 0-1, 3: RuntimeError: *",
        "*_ rank 2 of 4 _*",
        ">           raise ValueError*",
        "E*ValueError: bad value",
        "E*second line",
        "local      = {'a': 2}",
        "rank       = 2",
        "*Captured output of rank 2*",
        "said by two",
        "and err by two",
        "*Captured log of rank 2*",
        "ERROR*logged by two",
    )
    # Its group stays until the next test: others may still receive what it has sent.
    _lines(sections["test_early"], "*within 1 s; rank 0 ended*", "rank 1: test_it.py:* in the collective barrier")
    _lines(
        sections["test_chain"],
        "*KeyError: 'key'",
        "The above exception was the direct cause*",
        "E*RuntimeError: second",
    )
    _lines(sections["test_group"], "*ExceptionGroup: several*", "*ValueError: one", "*TypeError: two")
    _lines(
        sections["test_called"], ">       elastic(deep, mine)", "mine       = 3", "*_ ranks 0-1 of 2*", "twice      = 6"
    )
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *test_killed - rank 1: ended by SIGKILL*",
            "FAILED *test_secondary - rank 2, line 39: ValueError: bad value",
            "FAILED *test_called - ranks 0-1, line *: RuntimeError: deep 6",
        ]
    )


def _sections(text: str) -> list[tuple[str, str]]:
    """Return the name of each failed test with the report of its failure."""
    parts = text.partition("= FAILURES =")[2].partition("= short test summary info =")[0].split("\n______")
    return [(part.partition("\n")[0].strip("_ "), part) for part in parts[1:]]


def _lines(text: str, *patterns: str) -> None:
    pytest.LineMatcher(text.splitlines()).fnmatch_lines(list(patterns))


STYLES = """
import pytest

@pytest.fixture(params=["auto", "long", "short", "line", "native", "no"], autouse=True)
def style(request):
    former = request.config.option.tbstyle
    request.config.option.tbstyle = request.param
    yield request.param
    request.config.option.tbstyle = former

def inner(rank):
    assert [1, rank] == [1, 2]

@pytest.mark.elastic
def test_fails(rank):
    inner(rank)
"""


def test_each_traceback_style_has_the_rank_and_the_place(run: Run) -> None:
    result = run(STYLES)

    result.assert_outcomes(failed=6)
    sections = dict(_sections(result.stdout.str()))
    for style in ("auto", "long", "short"):
        for rank in (1, 0):
            shown = [f"E*assert ?1, {rank}? == ?1, 2?", "test_it.py:11: *"]
            # The short style begins with the place.
            lines = [f"*_ rank {rank} of 2 _*", "test_it.py:15: *", *(shown[::-1] if style == "short" else shown)]
            _lines(sections[f"test_fails[{style}]"], *lines)
    _lines(
        sections["test_fails[native]"],
        "*_ rank 0 of 2*",
        '  File "*test_it.py", line 15, in test_fails',
        "*AssertionError*",
    )
    result.stdout.fnmatch_lines(["FAILED *test_fails?no? - rank 0, line 11: AssertionError*"])


BESIDE_A = """
import pytest
from .helpers import double
from conftest import Holder

@pytest.mark.elastic
def test_same_name(holder, double_of, rank):
    assert type(holder) is Holder and holder.value == 3 and double_of(2) == 4 and double(2) == 4
    assert __name__.endswith("test_same"), __name__

@pytest.mark.elastic
def test_explained(rank):
    assert Holder(1) == Holder(2 + rank)

@pytest.mark.elastic
def test_helper_is_explained():
    from .helpers import checks
    checks(3)  # whose assertions pytest does not rewrite: it names no module to be registered for that
"""
CONFTEST = """
import pytest

class Holder:
    def __init__(self, value):
        self.value = value
    def __eq__(self, other):
        return self.value == other.value

def double_of_helper(value):
    return value * 2

@pytest.fixture
def holder():
    return Holder(3)

@pytest.fixture
def double_of():
    return double_of_helper

def pytest_assertrepr_compare(op, left, right):
    if isinstance(left, Holder):
        return ["holders differ:", f"{left.value} != {right.value}"]
"""
HELPERS = """
def double(value):
    return value * 2

def checks(value):
    assert value == 4
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_modules_are_found_where_pytest_found_them(run: Run, pytester: pytest.Pytester, mode: str) -> None:
    for folder in ("a", "b"):
        package = pytester.mkpydir(folder)
        package.joinpath("test_same.py").write_text(BESIDE_A)
        package.joinpath("helpers.py").write_text(HELPERS)
    pytester.makeconftest(CONFTEST)

    result = run(
        "import pytest\n@pytest.mark.elastic\ndef test_it(rank): assert rank < 2\n",
        f"--import-mode={mode}",
        "-o",
        "pythonpath=.",
    )

    result.assert_outcomes(passed=3, failed=4)
    result.stdout.fnmatch_lines(["E*assert holders differ:", "E*1 != 3", "E*1 != 2", ">*assert value == 4"])


def test_output_of_ranks_imports_is_captured_and_shown_once(run: Run) -> None:
    code = """
import noisy, pytest

@pytest.mark.elastic
@pytest.mark.parametrize("fails", [False, True])
def test_it(fails): assert not fails
"""
    noisy = "import os\nprint('imported by', os.environ.get('RANK'))"

    passed, failed = (run(code, "-k", name, noisy=noisy) for name in ("False", "True"))

    assert "imported by" not in passed.stdout.str() + passed.stderr.str()
    assert failed.stdout.str().count("imported by 0") == 1
    failed.stdout.fnmatch_lines(["*Captured stdout setup*", "imported by 0"], consecutive=False)
