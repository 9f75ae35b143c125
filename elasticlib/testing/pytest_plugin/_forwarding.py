"""
The traces that a test leaves in its ranks, for pytest's process: output, warnings, log records, properties, coverage.

Rules of this file: rank 0 counts as pytest's own process would; of the others only output and logs are shown.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib.testing.pytest_plugin._measuring import Measuring
from elasticlib.testing.ranks import _told
from elasticlib.testing.ranks._call import Call, Outcome

TOLD = pytest.StashKey[list[tuple[str, str]]]()
"""Sections of a test's report."""


def forward(item: Any, call: Call, told: _told.Told, measuring: Measuring) -> None:
    """Give pytest's process the warnings and log records of rank 0, and a warning of state that was left behind."""
    first = told.outcomes.get(0)
    if first is not None:
        _log(first)
    for outcome in told.outcomes.values():
        measuring.add(outcome.coverage)
    if first is not None:
        item.user_properties += first.properties
        for message, category, file, line in first.warnings:
            with _noted(told):
                warnings.warn_explicit(message, category, file, line)
    if told.leaks:
        with _noted(told):
            told.warn_of_leaks(call)


def _log(outcome: Outcome) -> None:
    for record in outcome.records:
        logger = logging.getLogger(record["name"])
        if logger.isEnabledFor(record["levelno"]):
            logger.handle(logging.makeLogRecord(record))


@contextlib.contextmanager
def _noted(told: _told.Told) -> Iterator[None]:
    """Add a warning that is an error to the failure of the test, if there is one, rather than raise it instead."""
    try:
        yield
    except Warning as warning:
        if told.error is None:
            raise
        told.error.notes = [*told.error.notes, f"{type(warning).__name__}: {warning}"]


def note(item: Any, told: _told.Told) -> None:
    """Keep for the report the output and the logs of ranks, and their seeds."""
    sections = []
    for rank, text in sorted(told.output.items()):
        if rank > 0 and text.strip():  # that of rank 0 is pytest's own
            sections.append((f"Captured output of rank {rank}", text))
    for rank, outcome in sorted(told.outcomes.items()):
        if rank > 0 and outcome.log.strip():
            sections.append((f"Captured log of rank {rank}", outcome.log))
    sections.append(("Seeds of the ranks", f"rank 0: {told.seed}, and each further rank the next number"))
    item.stash[TOLD] = [*item.stash.get(TOLD, []), *sections]
