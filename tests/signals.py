"""A signal whose delivery does not wake the main thread, as when the kernel hands it to another thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.waiting import wait_until


@contextlib.contextmanager
def sent_by_another_thread(signum: signal.Signals, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """
    Let another thread receive *signum* once *when* holds and the main thread, which runs the block, sleeps.

    Python runs the handler in the main thread, but nothing wakes that thread up.
    """
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")

    def is_asleep() -> bool:
        return stat.read_text().rpartition(")")[2].split()[0] == "S"

    def send() -> None:
        wait_until(lambda: when() and is_asleep())
        signal.pthread_kill(threading.get_ident(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()
