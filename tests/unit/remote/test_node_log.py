"""The launcher's own messages on a machine of an engine."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator

import pytest

from elasticlib.remote._node_log import name_machine_in_log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("elasticlib")
    handlers, propagates = list(found.handlers), found.propagate
    yield found
    found.handlers[:], found.propagate = handlers, propagates


def test_warnings_name_their_machine_once(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    name_machine_in_log()
    # As a module of the user's function may do.
    own = logging.StreamHandler()
    logging.root.addHandler(own)
    try:
        logger.warning("the disk is full")
        logger.info("all is well")
    finally:
        logging.root.removeHandler(own)

    assert ("", f"{platform.node()}: the disk is full\n") == capsys.readouterr()
