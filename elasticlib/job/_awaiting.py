"""
The end of a job in an event loop: whoever waits there blocks nobody, and an interrupt finds the loop awake.

Rules of this file: no thread waits for a coroutine; one that waits no more, however that came, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

_Callback: TypeAlias = Callable[[], None]

_TICK = 0.1
"""
Seconds after which a handler of signals that calls ``loop.call_soon`` is heard, as a notebook's kernel has one for its
stop button: a signal alone does not wake a loop that sleeps.
"""


def end(
    name: str, when_done: Callable[[_Callback], None], forget: Callable[[_Callback], None]
) -> Generator[Any, None, None]:
    """Wait until the callback that *when_done* takes is called; *forget* takes it back."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    ticker: asyncio.TimerHandle | None = None

    def set_it() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        # The loop was closed meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_it)

    def tick() -> None:
        nonlocal ticker
        ticker = loop.call_later(_TICK, tick)

    when_done(wake)
    try:
        # No other one gets signals.
        if threading.current_thread() is threading.main_thread():
            tick()
        yield from future
    except asyncio.CancelledError as error:
        # Since Python 3.11.
        if hasattr(error, "add_note"):
            error.add_note(f"that does not stop job {name!r}: its stop() does, or the end of its with block")
        raise
    finally:
        forget(wake)
        if ticker is not None:
            ticker.cancel()
