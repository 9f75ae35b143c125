"""
One test under way: what its ranks have come to so far, and when it has to be over.

Rules of this file: nothing here waits, or knows a worker.
"""

from __future__ import annotations

from attrs import define, field

from elasticlib.processes import Message
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _collectives, _failed, _recorder
from elasticlib.testing.ranks._call import Outcome


@define
class Progress:
    """One test under way."""

    until: float
    """When it has to be over."""
    outcomes: dict[int, Outcome] = field(factory=dict)
    told: dict[int, _failed.Told] = field(factory=dict)
    notes: list[str] = field(factory=list)
    collectives: dict[int, dict[str, _collectives.At]] = field(factory=dict)
    """By rank and process group, at which collectives ranks were just before the limit."""

    def hear(self, rank: int, message: Message) -> None:
        """What *rank* says in the midst of the test."""
        if message.get("says") == _recorder.SAYS:
            self.collectives[rank] = _collectives.read(message.get("collectives"))

    def is_cut_short(self) -> bool:
        """Whether ranks failed for no other reason than that another one has skipped the test."""
        return all(each.is_secondary for each in self.told.values()) and any(
            each.kind in ("skipped", "xfailed") for each in self.outcomes.values()
        )

    def early(self) -> list[str]:
        """Where ranks have but lost a peer: who had ended by itself."""
        ended = [rank for rank, each in self.outcomes.items() if each.kind == "passed"]
        if not ended or not all(each.is_secondary for each in self.told.values()):
            return []
        return [f"{ranks_text(ended)}: ended without a failure"]

    def has_stopped(self) -> bool:
        """Whether some rank has ended in another way than well, so that others may wait for it in vain."""
        return bool(self.told) or any(each.kind != "passed" for each in self.outcomes.values())
