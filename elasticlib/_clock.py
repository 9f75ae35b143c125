"""
The one place where shells read the time; the pure core gets it as an argument.

A test may freeze the clock around a launch (freezegun, ``mock.patch("time.sleep")``), and deadlines would never come.
Rules of this file: each name is an object of its own, made at import, for such tools replace what *is* a function of
`time` in every module that is loaded.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns monotonic seconds; only differences mean something, and only on this host."""

monotonic: Clock = functools.partial(time.monotonic)
wall_time: Callable[[], float] = functools.partial(time.time)
"""Seconds since 1970."""
wall_time_ns: Callable[[], int] = functools.partial(time.time_ns)
sleep: Callable[[float], None] = functools.partial(time.sleep)
