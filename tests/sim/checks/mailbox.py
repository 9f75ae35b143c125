"""
Rules of a node's notices: each is read once, in order, and deleted once there are ranks.

Entries that remain in an abandoned mailbox are deleted after a notice has arrived in the next one.
Nothing else is deleted.
"""

from __future__ import annotations

from attrs import define

from elasticlib.rendezvous.protocol._exchange import heartbeat_key, mailbox_key
from tests.sim.checks.demand import Demand


@define(eq=False, repr=False)
class Mailbox:
    """The mailboxes of one node, of which it reads the last."""

    demand: Demand
    name: str = ""
    read: int = 0
    """Notices that were read in this one."""
    _left: tuple[str, ...] = ()
    """Keys that may remain of earlier mailboxes."""
    _taken: tuple[str, ...] = ()
    """Keys of entries that were read and must be deleted."""
    has_ranks: bool = False
    """True if the last notice read was an assignment of ranks."""

    @property
    def is_to_delete(self) -> bool:
        """Return whether entries that were read must be deleted before the wait for the next notice."""
        return self.has_ranks or self.next_key in self._taken

    def opened(self, name: str, taken_over: bool) -> None:
        """A seat is asked for."""
        if self.name:
            # Whoever took the coordination over may have written again what was read before.
            first = 0 if taken_over else self.read
            keys = (mailbox_key(self.name, index) for index in range(first, self.read + 1))
            self._left = (*self._left, heartbeat_key(self.name), *keys)
        self.name, self.read = name, 0

    @property
    def next_key(self) -> str:
        """Key of the next notice."""
        return mailbox_key(self.name, self.read)

    def has_taken(self, key: str, ranks: bool) -> None:
        """Record that the entry at *key* was read; *ranks*: the entry was an assignment of ranks."""
        self._taken, self.has_ranks = (*self._taken, key), ranks

    @property
    def _useless(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._taken, *(self._left if self.read else ()))))

    def may_wait(self, key: str) -> None:
        """The next notice is waited for."""
        self.demand(key == self.next_key, f"{key} is waited for, {self.next_key} comes next")
        self.demand(key not in self._taken, f"{key} is waited for, and what was read there is not deleted")
        self.demand(not (self.has_ranks and self._useless), f"{self._useless} is not deleted, and nobody is in a hurry")

    def deletes(self, keys: tuple[str, ...]) -> None:
        """There is time for it."""
        self.demand(keys == self._useless, f"it deletes {keys}, and should {self._useless}")

    def rests(self) -> None:
        """Nothing comes any more, and nothing more is asked in this step."""
        self.demand(not self._useless, f"{self._useless} is of no use, and is not deleted")

    def deleted(self, keys: tuple[str, ...]) -> None:
        """Record that *keys* were deleted."""
        self._taken = tuple(key for key in self._taken if key not in keys)
        self._left = tuple(key for key in self._left if key not in keys)
