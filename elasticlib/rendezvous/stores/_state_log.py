"""
What the coordinator writes down before it acts, where another node may take the coordination over.

Rules of this file: the contract only. Whoever holds the state log coordinates; whatever it wrote is kept for its
successor, and from the moment that there is a successor it can write nothing more.
"""

from __future__ import annotations

from typing import Protocol

from elasticlib.errors import RendezvousError
from elasticlib.rendezvous.protocol._exchange import Exchange


class LeadershipLost(RendezvousError):  # noqa: N818 - an event of the cluster rather than a fault
    """You get it when you write as the coordinator, and another node coordinates by now, or may soon."""


class StateLog(Protocol):
    """The coordinator's memory in the store, for one term of office. For one thread."""

    def load(self) -> bytes | None:
        """
        What the last coordinator saved, None if there was none. To be called first: afterwards an earlier
        holder can save nothing more. Raises `LeadershipLost`, and `RendezvousStateError` if strangers destroyed
        what was there (`save` works all the same).
        """

    def save(self, data: bytes) -> None:
        """
        Replace what was saved; it is there once this returned. Outlasts short outages of the store. Raises
        `LeadershipLost`: then nothing was saved, and this term is over. Raises `RendezvousStateError` if a
        stranger changed what was there; the next `save` overwrites that.
        """

    def exchange(self) -> Exchange:
        """A new connection, whose writing and deleting raise `LeadershipLost` once the term is over."""

    def lose(self, why: str) -> None:
        """Whoever coordinates by it was turned down: the term of office is over, if it was not known to be."""

    def purge(self) -> None:
        """Delete everything that the job has in the store, so that its id can be used again."""

    def close(self) -> None:
        """Give the connection up; may come twice. The term of office goes on."""
