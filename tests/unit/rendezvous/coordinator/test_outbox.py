"""A node is told in its latest mailbox, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.protocol._messages import RoundEnd

END = RoundEnd(0, "enough", True)


@pytest.mark.parametrize(
    "turn",
    [
        lambda outbox: outbox.add("a/2", "a", END, 1.0),
        lambda outbox: outbox.expect("a", "a/2"),
        lambda outbox: outbox.catch_up("a", "a/2", 1),
    ],
    ids=["add", "expect", "catch_up"],
)
def test_notices_in_an_abandoned_mailbox_are_not_written_again(turn: Callable[[Outbox], None]) -> None:
    outbox = Outbox()
    outbox.add("a/1", "a", END, 0.0)
    outbox.written(keep=True)

    turn(outbox)
    outbox.written(keep=True)
    outbox.remind(100.0, 10.0)

    assert not [key for key in outbox.due() if "a/1/" in key]
    assert "a/2" == outbox.mailbox_of("a")
