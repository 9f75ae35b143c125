"""
The few things that a store must do to carry a job, and where messages lie in it.

    inbox             counter of reports
    inbox/<n>         report n to the coordinator, n = 1, 2, ...
    box/<n>/<k>       notice k = 0, 1, ... to the node whose latest Join was report n

Rules of this file: nothing here but the contract and the key names. A key has one writer and one
reader, who deletes it once read; so any reader can be woken by a value put into its own key.
"""

from __future__ import annotations

from typing import Protocol

_INBOX = "inbox"


class Exchange(Protocol):
    """
    A store that nodes share. Safe for use by several threads at once.

    A key is either a counter (only `add`) or a value (never `add`). A value that was set is seen by
    every `get` and `wait` that begins after `set` returned.
    """

    def add(self, key: str, n: int) -> int:
        """Add *n* to a counter that starts at 0, as one step, and return the sum."""

    def set(self, key: str, value: bytes) -> None:
        """Write the value, wake all who wait for it."""

    def get(self, key: str) -> bytes | None:
        """The value; None for a key that was never written, or deleted since."""

    def wait(self, key: str, timeout: float | None) -> bool:
        """Block until the key is there, at most *timeout* seconds (None: for ever); whether it was."""

    def delete(self, key: str) -> None:
        """Forget the key; a key that is not there is forgotten already."""


def inbox_key(number: int) -> str:
    """Where report *number* lies."""
    return f"{_INBOX}/{number}"


def box_key(box: int, index: int) -> str:
    """Where notice *index* of a box lies."""
    return f"box/{box}/{index}"


def post(exchange: Exchange, data: bytes) -> int:
    """Put a report into the coordinator's inbox; its number, never given twice."""
    number = exchange.add(_INBOX, 1)
    exchange.set(inbox_key(number), data)
    return number
