"""The process above a spawner: when it is gone the spawner goes on under the reaper, or ends."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from elasticlib.processes import living_parent, new_parent


def watch_parent(selector: selectors.BaseSelector, parent: int, guardian: int, leave: Callable[[], object]) -> None:
    """
    Have *leave* called when nobody is left above this process who would end it with the launcher.

    When *parent*, a fork server, ends, the *guardian* takes its place: a launch that has begun does not need it. 0 for
    a *guardian* where the parent guards it.
    """
    handle = living_parent(parent)

    def lose_parent() -> None:
        selector.unregister(handle)
        handle.close()
        if (found := new_parent(guardian)) is None:
            leave()
        else:
            selector.register(found, selectors.EVENT_READ, leave)

    selector.register(handle, selectors.EVENT_READ, lose_parent)
