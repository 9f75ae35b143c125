"""
The operations that a store must support to carry a job, and the keys of its messages.

    hello             `Announcement` of the coordinator
    pulse             `CoordinatorHeartbeat` of the coordinator
    inbox             `Envelope`s to the coordinator: posted by all, received by one
    cause             `Failed` with the root cause of the job's end, where it is long: notices have it in brief
    box/<mailbox>/<k> notice k = 0, 1, ... to the node whose latest Join named this mailbox
    beat/<mailbox>    `NodeHeartbeat` of the node

Rules of this file: only the contract and the key names. A key of a mailbox has one writer and one
reader, who deletes it once read. So any reader can be woken by a value put into its own key.
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
    """Raised when the store answers, and refuses a request for good."""

    def __init__(self, why: str, too_large: bool = False) -> None:
        super().__init__(why, too_large)
        self.too_large = too_large
        """True if a smaller value might be accepted."""

    def __str__(self) -> str:
        return str(self.args[0])


class Exchange(Protocol):
    """
    One connection to the store of one job; its keys are separate from those of every other job.

    One thread at a time uses a connection: `clone` it for another one. A call may block for as long
    as the store is silent. A store that cannot be reached, or that ended, raises
    `RendezvousConnectionError`; the connection cannot be used again. A store that answers and
    refuses raises `RequestRefusedError`, and the connection stays usable. Once `write`, `update` or
    `post` returned, every connection sees the data.
    """

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        """Append an entry to the inbox, and `write` the values. Entries of one connection keep their order."""

    def receive(self, timeout: float | None) -> Sequence[Posted]:
        """
        Return the entries that this connection has not received yet, oldest first.

        Blocks until there is one, for at most *timeout* seconds (None: no limit). For the
        coordinator only. Entries stay in the store until `discard`: the next coordinator receives
        them again. An entry whose poster died on the way is skipped after a second.
        """

    def discard(self, entries: Sequence[Posted]) -> None:
        """Delete entries that were received."""

    def write(self, values: Mapping[str, bytes]) -> None:
        """Write all values, and wake all that wait for their keys."""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key; None for a key that was never written, or deleted since."""

    def update(self, values: Mapping[str, bytes], keys: Sequence[str]) -> list[bytes | None]:
        """Do `write` and then `read`, in fewer requests where the store can."""
        self.write(values)
        return self.read(keys)

    def take(self, key: str, timeout: float) -> bytes | None:
        """
        Do `wait` and then `read`, in fewer requests where the store can; return None if the key
        does not appear.
        """
        if not self.wait(key, timeout):
            return None
        [data] = self.read((key,))
        return data

    def wait(self, key: str, timeout: float | None) -> bool:
        """
        Block until the key exists, for at most *timeout* seconds (None: no limit); return whether
        it does.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the keys; a missing key is not an error."""

    def clear_foreign(self) -> None:
        """Delete every key of the workers, where they share this store."""

    def clone(self) -> Exchange:
        """Return another connection to the same store, for use by another thread."""

    def close(self) -> None:
        """Give the connection up without blocking; may be called twice."""


def mailbox_name(node: str, seq: int) -> str:
    """
    Return the mailbox that a node's Join opens: *seq* is the number of the message that holds it.
    """
    return f"{node}/{seq}"


def mailbox_key(mailbox: str, index: int) -> str:
    """Return the key of notice *index* of a mailbox."""
    return f"box/{mailbox}/{index}"


def heartbeat_key(mailbox: str) -> str:
    """Return the key of the heartbeats of a mailbox."""
    return f"beat/{mailbox}"


def report_place(run_id: str, nonce: str, node: str, seq: int) -> str:
    """Return the text that the signature of a message covers besides its own."""
    return f"{run_id}/{nonce}/inbox/{node}/{seq}"


def key_place(run_id: str, nonce: str, key: str) -> str:
    """Return the text that the signature of a *key*'s value covers besides the value."""
    if key == ANNOUNCEMENT:
        nonce = ""  # unknown before this value is read
    return f"{run_id}/{nonce}/{key}"


def parts(values: Mapping[str, bytes], most: int, size: int) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the values in parts of at most *most* and, unless one alone is larger, of *size* bytes."""
    part: list[tuple[str, bytes]] = []
    total = 0
    for key, data in values.items():
        cost = len(key) + len(data)

        # A value that is larger than a part is sent alone: only the store can decide that it is too
        # large.
        is_full = len(part) == most or total + cost > size
        if part and is_full:
            yield part
            part = []
            total = 0

        part.append((key, data))
        total += cost

    if part:
        yield part
