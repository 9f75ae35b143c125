"""
Where a node reads its answers, and what it leaves behind where it read them before. Pure.

Rules of this file: each request to join opens a new mailbox. What may be left in an old one is deleted once a notice
came in the new one: then nobody of this node looks into the old one, nor writes there.
"""

from __future__ import annotations

from attrs import evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._exchange import heartbeat_key, mailbox_key

WAKE = b""
"""What a node writes for itself where its next notice would lie, to wait there no more."""


@frozen
class Mailbox:
    """By default there is none."""

    name: str = ""
    read: int = 0
    """Notices that were read."""
    litter: tuple[str, ...] = ()
    """Keys of older mailboxes."""

    @property
    def next_key(self) -> str | None:
        """Where the next notice will lie."""
        return mailbox_key(self.name, self.read) if self.name else None

    def opened(self, name: str, epoch: int) -> Self:
        """A new one, under the coordinator of that epoch."""
        if not self.name:
            return evolve(self, name=name)
        # A coordinator that took over may have written again what was read before, and did not know of it.
        first = 0 if epoch else self.read
        left = (heartbeat_key(self.name), *(mailbox_key(self.name, index) for index in range(first, self.read + 1)))
        return evolve(self, name=name, read=0, litter=(*self.litter, *left))

    def further(self) -> Self:
        """After one more notice."""
        return evolve(self, read=self.read + 1)

    def deletable(self) -> tuple[str, ...]:
        """What nobody needs any more besides what was read."""
        return self.litter if self.read else ()

    def cleared(self, count: int) -> Self:
        """Without the first so many keys of what was left, which are deleted."""
        return evolve(self, litter=self.litter[count:])
