"""Skips, expected failures, warnings, and pytest's own fixtures, in tests whose body runs on ranks."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(1.0)]

CODE = """
import logging, os, sys, warnings
from unittest import mock
import pytest, torch.distributed as dist

on_ranks = pytest.mark.elastic

@on_ranks
def test_skips():
    pytest.skip("all skip")

@on_ranks
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("one skips")
    dist.barrier()

@on_ranks
def test_importorskip(): pytest.importorskip("no_such_module")

@on_ranks
def test_xfails(): pytest.xfail("known")

@on_ranks
@pytest.mark.xfail
def test_xfail_mark(): assert 0

@on_ranks
@pytest.mark.xfail(strict=True, reason="strictly")
def test_strict(): pass

@on_ranks
@pytest.mark.xfail(strict=False)
def test_not_strict(): pass

@on_ranks
@pytest.mark.xfail(raises=ValueError)
def test_raises(rank):
    if rank == 1:
        raise ValueError("x")

@on_ranks
@pytest.mark.xfail(raises=KeyError)
def test_raises_another(): raise ValueError("wrong")

@on_ranks
@pytest.mark.skipif("sys.platform == 'linux'", reason="here")
def test_skipif(): pass

@on_ranks
def test_fails(): pytest.fail("said so", pytrace=False)

@on_ranks
def test_warns(): warnings.warn("from a rank")

@on_ranks
@pytest.mark.filterwarnings("error")
def test_error_by_mark(): warnings.warn("as an error")

@on_ranks
def test_error_by_setting(): warnings.warn("old", DeprecationWarning)

@on_ranks
def test_pytest_warns():
    with pytest.warns(UserWarning, match="hello"):
        warnings.warn("hello")
    with pytest.deprecated_call():
        warnings.warn("old", DeprecationWarning)

@on_ranks
def test_recwarn(recwarn):
    warnings.warn("one")
    assert [str(each.message) for each in recwarn] == ["one"]

@on_ranks
def test_capsys(capsys, rank):
    print("out", rank)
    print("err", file=sys.stderr)
    assert capsys.readouterr() == (f"out {rank}\\n", "err\\n")
    with capsys.disabled():
        print("shown although", rank)

@on_ranks
def test_capfd(capfd, rank):
    os.system("echo fd")
    assert capfd.readouterr().out == "fd\\n"

@on_ranks
def test_binary(capfdbinary):
    os.write(1, b"\\xff")
    assert capfdbinary.readouterr().out == b"\\xff"

@on_ranks
def test_caplog(caplog, rank):
    logger = logging.getLogger("a.b")
    logger.warning("warned %s", rank)
    logger.info("not seen")
    assert caplog.messages == [f"warned {rank}"]
    caplog.set_level(logging.DEBUG, logger="a.b")
    logger.debug("now")
    assert caplog.record_tuples[-1] == ("a.b", 10, "now")
    with caplog.at_level(logging.INFO):
        logging.info("root")
    assert "root" in caplog.text
    caplog.clear()
    assert not caplog.records

@on_ranks
def test_caplog_next(caplog):
    logging.getLogger("a.b").info("level is as before")
    assert not caplog.records

def say():
    logging.getLogger("x").info("info %s", dist.get_rank())
    warnings.warn("in the call")
    print("said by", dist.get_rank())

def test_around(elastic, caplog, capsys):
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="in the call"):
        elastic(say)
    assert caplog.messages == ["info 0"]
    assert capsys.readouterr().out == "said by 0\\n"

def test_around_fd(elastic, capfd, recwarn):
    elastic(say)
    assert capfd.readouterr().out == "said by 0\\n"
    assert [str(each.message) for each in recwarn] == ["in the call"]

@on_ranks
def test_folders(tmp_path, tmp_path_factory, tmpdir, rank):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    assert tmpdir.check(dir=True)

@on_ranks
def test_property(record_property, rank):
    print("printed by", rank)
    record_property("key", rank)

@on_ranks
@mock.patch("os.getlogin", lambda: "me")
def test_mock(rank): assert os.getlogin() == "me"

@on_ranks
def test_request(request): pass

def exits():
    if os.environ["RANK"] == "1":
        sys.exit(0)

def test_exit(elastic): elastic(exits)  # as a program that ends well
"""


def test_outcomes_of_ranks_are_those_of_the_test(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        CODE,
        "-rA",
        "-o",
        "filterwarnings=error::DeprecationWarning",
        "--junitxml=it.xml",
        "-o",
        "junit_logging=all",
        "-o",
        "junit_family=xunit1",
    )

    result.assert_outcomes(passed=14, skipped=4, xfailed=3, xpassed=1, failed=6, warnings=1)
    result.stdout.fnmatch_lines_random(
        [
            "*XPASS(strict)* strictly",
            "SKIPPED ?1? test_it.py:9: all skip",
            "SKIPPED ?1? test_it.py:14: rank 1: one skips",
            "SKIPPED ?1? test_it.py:*: could not import 'no_such_module'*",
            "SKIPPED ?1? test_it.py:*: here",
            "XFAIL *test_xfails - *known",
            "XFAIL *test_xfail_mark*",
            "XFAIL *test_raises*",
            "XPASS *test_not_strict*",
            "FAILED *test_strict*",
            "FAILED *test_raises_another - ranks 0-1, line *: ValueError*",
            "FAILED *test_fails - ranks 0-1, line *: Failed: said so*",
            "FAILED *test_error_by_mark - ranks 0-1, line *: UserWarning*",
            "FAILED *test_error_by_setting - ranks 0-1, line *: Deprecation*",
            "*'request' of *test_request, a TopRequest, cannot be sent to the ranks: *; it exists only in pytest*",
            "shown although 0",
            "*test_it.py:*: UserWarning: from a rank",
            "    def test_warns(): warnings.warn(*",
        ]
    )
    report = ElementTree.parse(pytester.path / "it.xml")
    cases = {case.get("name"): case for case in report.iter("testcase")}
    assert [(each.get("name"), each.get("value")) for each in cases["test_property"].iter("property")] == [("key", "0")]
    assert "ValueError: wrong" in (cases["test_raises_another"].findtext("failure") or "")
    assert "printed by 0" in (cases["test_property"].findtext("system-out") or "")
