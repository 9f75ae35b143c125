"""
Messages that their nodes saw in the store, and that never came to the coordinator. Pure.

Rules of this file: a message may still be on its way; one that has not come within the heartbeat time was removed by
somebody. Times are the coordinator's seconds.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import Factory, define
from typing_extensions import Self


@define
class Missing:
    """The number of a message that was said and not heard, by node, and since when that is known."""

    _since: dict[str, tuple[int, float]] = Factory(dict)

    def copy(self) -> Self:
        """The same, to be changed apart."""
        return type(self)(dict(self._since))

    def look(self, node: str, said: int, heard: int, now: float, patience: float) -> int | None:
        """The number of the message that was removed; None where none was."""
        if said <= heard:
            self._since.pop(node, None)
            return None
        number, since = self._since.setdefault(node, (said, now))
        if number <= heard:
            del self._since[node]
            return None
        return number if now > since + patience else None

    def retain(self, nodes: Collection[str]) -> None:
        """Forget all others."""
        self._since = {node: it for node, it in self._since.items() if node in nodes}
