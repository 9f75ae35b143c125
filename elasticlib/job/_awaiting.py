"""
The wait for the end of a job in an event loop, without blocking the loop or delaying interrupts.

Rules of this file: no thread waits for a coroutine. A wait that ends, for any reason, leaves no
callback or timer behind.
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
Seconds between two wake-ups of the loop while it waits.

A signal alone does not wake a sleeping loop. A notebook's kernel handles its stop button by
``loop.call_soon`` in a signal handler, which takes effect at the next wake-up.
"""


def end(
    name: str, when_done: Callable[[_Callback], None], forget: Callable[[_Callback], None]
) -> Generator[Any, None, None]:
    """Wait until the job calls the callback given to *when_done*; *forget* removes the callback."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    ticker: asyncio.TimerHandle | None = None

    def set_it() -> None:
        # A task that was cancelled has ended the future.
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        # RuntimeError: the loop was closed meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_it)

    def tick() -> None:
        nonlocal ticker
        ticker = loop.call_later(_TICK, tick)

    when_done(wake)
    try:
        # Python runs signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            tick()
        yield from future
    except asyncio.CancelledError as error:
        # `add_note` exists since Python 3.11.
        if hasattr(error, "add_note"):
            error.add_note(f"this does not stop job {name!r}: call its stop(), or leave its with block")
        raise
    finally:
        forget(wake)
        if ticker is not None:
            ticker.cancel()
