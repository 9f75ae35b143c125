"""Row 172: how much a launcher tells of itself."""

from __future__ import annotations

import re

import pytest

from tests.checklist._workers import QUICK
from tests.checklist.peers import Peer

pytestmark = pytest.mark.slow

IGNORED = ("--signals-to-handle", "SIGTERM,SIGNOSUCH")
"""Asks for a signal that there is not, which is worth a warning."""


def levels(peer: Peer, **environment: str) -> set[str]:
    """First letters of the levels at which the launcher told something."""
    done = peer.run(*IGNORED, "--no-python", "true", env={**QUICK, **environment})
    assert done.returncode == 0, done.err
    return set(re.findall(r"^([DIWEC]) ?\d{4}", done.err, re.MULTILINE))


@pytest.mark.row(172)
def test_warnings_are_shown_and_the_environment_may_ask_for_more(peer: Peer) -> None:
    assert levels(peer) == {"W"}
    assert levels(peer, LOGLEVEL="INFO") == {"I", "W"}
