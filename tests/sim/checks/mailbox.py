"""
What must hold where a node reads its notices: each is read once and in its order, and then deleted.

What is left in a mailbox that was given up is deleted once a notice came in the next one, and nothing else is.
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
    """Where a notice lay that was read, which must be deleted now."""
    _deletes: int = 0

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

    def has_taken(self, key: str) -> None:
        """What lay there was read."""
        self._taken = (key,)

    def deletes(self, keys: tuple[str, ...]) -> None:
        """So much is deleted, before the next notice is waited for if there is one."""
        left = self._left if self.read else ()
        wanted = (*self._taken, *left)
        self.demand(keys == wanted, f"it deletes {keys}, and should {wanted}")
        self._taken, self._deletes = (), len(left)

    def rests(self) -> None:
        """Nothing more is asked in this step."""
        self.demand(not self._taken, f"{self._taken} was read, and is not deleted")

    def deleted(self) -> None:
        """That is done."""
        self._left = self._left[self._deletes :]
