"""
Pytest's report of a test on ranks: warnings, log records, output and failures.

Rules of this file: rank 0 is reported like pytest's own process; for the other ranks only output
and logs are shown. Equal failures are shown once. The root cause stands last, because pytest's
short summary uses the last one. A rank that only lost its peer gets one line. Reports consist of
pytest's own classes, so that xdist can send them between processes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from elasticlib.stacks import ranks_text
from elasticlib.testing.pytest_plugin import _markers
from elasticlib.testing.ranks._coverage import Measuring
from elasticlib.testing.ranks._failed import RankFailure, RanksFailed, folded, summary
from elasticlib.testing.ranks._rank_call import RankCall, RankOutcome
from elasticlib.testing.ranks._test_report import TestReport

_SECTIONS = pytest.StashKey[list[tuple[str, str]]]()
"""Sections to add to a test's report."""
_OF_RANK_0 = {
    name: f"{name} of rank 0" for name in ("Captured stdout call", "Captured stderr call", "Captured log call")
}
"""
Pytest's sections for the output of a test's body, whose only rank in pytest's view is rank 0, and
their names here. Pytest finds them by the beginning of a name.
"""
_OF_THREAD = "threadexception", pytest.PytestUnhandledThreadExceptionWarning
_OF_FINALIZER = "unraisableexception", pytest.PytestUnraisableExceptionWarning
"""Pytest's plugin for such exceptions, and its warning."""
SKIPPED = pytest.StashKey[tuple[str, int, str]]()
"""File, line and text of a skip on a rank."""


def forward(item: Any, call: RankCall, result: TestReport, measuring: Measuring) -> None:
    """
    Repeat the warnings and log records of rank 0 in pytest's process.

    Warn of exceptions that no code has handled on any rank, and of leaks. A warning that filters
    turn into an error is added to the test's failure, and raised if there is none.
    """
    __tracebackhide__ = True
    first = result.outcomes.get(0)
    if first is not None:
        _log(first)
    for outcome in result.outcomes.values():
        measuring.add(outcome.coverage)
    if first is not None:
        item.user_properties += first.properties
        for warned in first.warnings:
            _warn(call, result, *warned)

    for category, text in _unhandled(item.config, result.outcomes):
        _warn(call, result, category(text), None, call.file, call.line)
    if (leaks := result.leaks_warning(call)) is not None:
        _warn(call, result, leaks, None, call.file, call.line)


def _log(outcome: RankOutcome) -> None:
    for record in outcome.records:
        logger = logging.getLogger(record["name"])
        # `Logger.handle` itself does not look at the level.
        if logger.isEnabledFor(record["levelno"]):
            logger.handle(logging.makeLogRecord(record))


def _warn(call: RankCall, result: TestReport, message: Any, category: Any, file: str, line: int) -> None:
    __tracebackhide__ = True
    try:
        warnings.warn_explicit(message, category, file, line)
    except Warning as warning:
        text = f"{type(warning).__name__}: {warning}"
        if result.error is not None:
            result.error.notes = [*result.error.notes, text]
        elif call.is_body:
            # No line of the test runs in this process.
            raise pytest.fail.Exception(text, pytrace=False) from None
        else:
            raise


def _unhandled(config: pytest.Config, outcomes: Mapping[int, RankOutcome]) -> Iterator[tuple[type[Warning], str]]:
    """Yield pytest's warning and its text for each unhandled exception; equal ones of ranks count once."""
    ranks_of: dict[tuple[bool, str], list[int]] = {}
    places: dict[tuple[bool, str], str] = {}
    for rank, outcome in sorted(outcomes.items()):
        for each in outcome.unhandled:
            alike = each.is_of_thread, each.trace
            places.setdefault(alike, each.where)
            if rank not in ranks_of.setdefault(alike, []):
                ranks_of[alike].append(rank)

    for (is_of_thread, trace), ranks in ranks_of.items():
        plugin, category = _OF_THREAD if is_of_thread else _OF_FINALIZER
        if config.pluginmanager.hasplugin(plugin):
            yield category, f"{ranks_text(ranks)}: {places[is_of_thread, trace]}\n\n{trace}"


def note(item: Any, result: TestReport) -> None:
    """Store the output, logs and seeds of the ranks for the report."""
    logs = {rank: outcome.log for rank, outcome in result.outcomes.items()}
    seeds = f"rank 0: {result.seed}, and each further rank the next number"
    sections = [*_of_further_ranks("output", result.output), *_of_further_ranks("log", logs)]
    sections.append(("Seeds of the ranks", seeds))
    item.stash[_SECTIONS] = [*item.stash.get(_SECTIONS, []), *sections]


def _of_further_ranks(kind: str, texts: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for rank, text in sorted(texts.items()):
        # pytest shows the output of rank 0 as its own.
        if rank > 0 and text.strip():
            yield f"Captured {kind} of rank {rank}", text


def add_kept(report: pytest.TestReport, item: pytest.Item) -> None:
    """Add the stored sections and the place of a skip to *report*."""
    skipped = item.stash.get(SKIPPED, None)
    if skipped is not None and isinstance(report.longrepr, tuple):
        report.longrepr = skipped
    sections = item.stash.get(_SECTIONS, None)
    if sections is not None:
        del item.stash[_SECTIONS]
        if _markers.runs_on_ranks(item):
            report.sections = [(_OF_RANK_0.get(name, name), text) for name, text in report.sections]
        report.sections += sections


def callers_of(item: Any, info: pytest.ExceptionInfo[BaseException]) -> Any:
    """
    Return the representation of the test's lines in pytest's process that called the ranks.

    None if the body of the test runs on ranks.
    """
    if _markers.runs_on_ranks(item):
        return None
    error = info.value
    assert isinstance(error, RanksFailed)
    plain = _CalledError(f"{len(error.failures)} of {error.size} ranks failed").with_traceback(info.tb)
    found = item.repr_failure(pytest.ExceptionInfo.from_exception(plain))
    return found if hasattr(found, "chain") else None


class _CalledError(Exception):
    pass


_CalledError.__name__ = _CalledError.__qualname__ = "RanksFailed"
_CalledError.__module__ = "elasticlib.testing"


def representation(error: RanksFailed, callers: Any = None) -> Any:
    """Return pytest's representation of *error*; *callers* is the result of `callers_of`."""
    from _pytest._code.code import ExceptionChainRepr, ReprFileLocation

    lines, shown = folded(error)
    root = error.reports[error.root]
    chain: list[Any] = list(getattr(callers, "chain", ()))
    if lines:
        chain.append((_text(lines), None, None))
    for ranks in shown:
        chain.append((_text([f"{'_ ' * 4}{ranks_text(ranks)} of {error.size}{' _' * 4}", ""]), None, None))
        chain += _chain_of(error.reports[ranks[0]])

    # For example, Hypothesis adds the failing example as a note.
    if notes := getattr(error, "__notes__", ()):
        chain.append((_text([f"E   {line}" for note in notes for line in str(note).splitlines()]), None, None))
    last = chain[-1]
    crash = ReprFileLocation(root.file, root.line, summary(error.reports, error.root))
    chain[-1] = (last[0], crash, None)
    return ExceptionChainRepr(chain)


def _text(lines: Sequence[str]) -> Any:
    from _pytest._code.code import ReprEntryNative, ReprTraceback

    return ReprTraceback([ReprEntryNative([f"{line}\n" for line in lines])], None, "native")


def _chain_of(report: RankFailure) -> list[Any]:
    chain = getattr(report.representation, "chain", None)
    if chain:
        return list(chain)
    trace = getattr(report.representation, "reprtraceback", None)
    if trace is not None:
        return [(trace, report.representation.reprcrash, None)]
    return [(_text(str(report.representation).splitlines()), None, None)]
