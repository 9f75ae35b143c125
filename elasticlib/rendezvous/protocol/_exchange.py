"""
The few things that a store must do to carry a job, and where messages lie in it.

    hello             `Announcement` of the coordinator
    pulse             `CoordinatorHeartbeat` of the coordinator
    inbox             `Envelope`s to the coordinator: posted by all, received by one
    cause             `Failed` with the root cause of the job's end, where it is long: notices have it in brief
    box/<mailbox>/<k> notice k = 0, 1, ... to the node whose latest Join named this mailbox
    beat/<mailbox>    `NodeHeartbeat` of that node

Rules of this file: nothing here but the contract and the key names. A key of a mailbox has one writer and one
reader, who deletes it once read; so any reader can be woken by a value put into its own key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from attrs import frozen

from elasticlib.errors import RendezvousError

NOTHING: Mapping[str, bytes] = MappingProxyType({})
ANNOUNCEMENT = "hello"
COORDINATOR_HEARTBEAT = "pulse"
CAUSE = "cause"


@frozen
class Posted:
    """An entry of the inbox."""

    number: int
    """Unique and growing in the order of posting."""
    data: bytes


class RequestRefusedError(RendezvousError):
    """You get it when the store answers, and says that it will not do what it was asked, however often that is."""

    def __init__(self, why: str, too_large: bool = False) -> None:
        super().__init__(why, too_large)
        self.too_large = too_large
        """Whether less might be taken."""

    def __str__(self) -> str:
        return str(self.args[0])


class Exchange(Protocol):
    """
    One connection to the store of one job; its keys are apart from those of every other job.

    One thread at a time uses a connection: `clone` it for another one. A call may block for as long as the
    store is silent. A store that cannot be reached, or that ended, raises `RendezvousConnectionError`; a
    connection that raised that is done with. A store that is there and refuses raises `RequestRefusedError`, and
    the connection goes on. What `write`, `update` or `post` wrote is there, for every connection, once
    it returned.
    """

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        """Append an entry to the inbox, and `write` the values. Entries of one connection keep their order."""

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        """
        Entries that this connection has not received yet, oldest first; blocks for at most *timeout* seconds
        (None: for ever) until there is one. For the coordinator only. Entries stay in the store until
        `discard`: whoever coordinates next receives them again. An entry whose poster died on the way is
        passed over after a second.
        """

    def discard(self, entries: Sequence[Posted]) -> None:
        """Forget entries that were received."""

    def write(self, values: Mapping[str, bytes]) -> None:
        """Write all values, wake all who wait for their keys."""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key; None for a key that was never written, or deleted since."""

    def update(self, values: Mapping[str, bytes], keys: Sequence[str]) -> list[bytes | None]:
        """As `write` and then `read`, in fewer requests where the store can."""
        self.write(values)
        return self.read(keys)

    def take(self, key: str, timeout: float) -> bytes | None:
        """As `wait` and then `read`, in fewer requests where the store can; None where the key does not come."""
        if not self.wait(key, timeout):
            return None
        [data] = self.read((key,))
        return data

    def wait(self, key: str, timeout: float | None) -> bool:
        """Block until the key is there, at most *timeout* seconds (None: for ever); whether it was."""

    def delete(self, keys: Sequence[str]) -> None:
        """Forget the keys; a key that is not there is forgotten already."""

    def clear_foreign(self) -> None:
        """Where workers share this store: delete every key of theirs. Elsewhere nothing."""

    def clone(self) -> Exchange:
        """Another connection to the same store, for use by another thread."""

    def close(self) -> None:
        """Give the connection up; never blocks; may come twice."""


def mailbox_name(node: str, seq: int) -> str:
    """The mailbox that a node's Join opens: *seq* is the number of the message that holds it."""
    return f"{node}/{seq}"


def mailbox_key(mailbox: str, index: int) -> str:
    """Where notice *index* of a mailbox lies."""
    return f"box/{mailbox}/{index}"


def heartbeat_key(mailbox: str) -> str:
    """Where the heartbeats of a mailbox lie."""
    return f"beat/{mailbox}"


def report_place(run_id: str, nonce: str, node: str, seq: int) -> str:
    """What the signature of a message covers besides its text."""
    return f"{run_id}/{nonce}/inbox/{node}/{seq}"


def key_place(run_id: str, nonce: str, key: str) -> str:
    """Return the text that the signature of a *key*'s value covers besides the value."""
    if key == ANNOUNCEMENT:
        nonce = ""  # nobody knows it before this value is read
    return f"{run_id}/{nonce}/{key}"


def parts(values: Mapping[str, bytes], most: int, size: int) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the values in parts of at most *most* and, unless one alone is larger, of *size* bytes."""
    part: list[tuple[str, bytes]] = []
    total = 0
    for key, data in values.items():
        cost = len(key) + len(data)
        # A value that is larger than a part goes alone: only the store can say that it is too large.
        is_full = len(part) == most or total + cost > size
        if part and is_full:
            yield part
            part = []
            total = 0
        part.append((key, data))
        total += cost
    if part:
        yield part
