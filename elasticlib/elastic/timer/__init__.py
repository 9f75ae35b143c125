"""Re-export: ``torch.distributed.elastic.timer``."""

from __future__ import annotations

from elasticlib.timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
    expires,
)

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
