"""
What must hold where a node reads its notices: each is read once and in its order, and deleted once there are ranks.

What is left in a mailbox that was given up is deleted too, once a notice came in the next one, and nothing else is.
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
    """What may be left of those before."""
    _taken: tuple[str, ...] = ()
    """Where something lay that was read, which must be deleted."""
    has_ranks: bool = False
    """Whether the last that was read were ranks."""

    @property
    def is_to_delete(self) -> bool:
        """Whether what was read is to be deleted before the next notice is waited for."""
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
        """Where the next notice will lie."""
        return mailbox_key(self.name, self.read)

    def has_taken(self, key: str, ranks: bool) -> None:
        """What lay there was read; *ranks*: it was an assignment of these."""
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
        """That is done."""
        self._taken = tuple(key for key in self._taken if key not in keys)
        self._left = tuple(key for key in self._left if key not in keys)
