"""The one place where shells read the time; the pure core gets it as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns monotonic seconds; only differences mean something, and only on this host."""

monotonic: Clock = time.monotonic
