"""
The clock of elasticlib: the only place that reads the time; pure modules get it as an argument.

A test may freeze the clock around a launch (freezegun, ``mock.patch("time.sleep")``). Deadlines
would then never pass. Such tools replace the functions of `time` in every loaded module.

Rules of this file: each name is a separate object, made at import, which such tools do not replace.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns monotonic seconds. Only differences have a meaning, and only on this host."""

monotonic: Clock = functools.partial(time.monotonic)
wall_time: Callable[[], float] = functools.partial(time.time)
"""Seconds since 1970."""
wall_time_ns: Callable[[], int] = functools.partial(time.time_ns)
sleep: Callable[[float], None] = functools.partial(time.sleep)
