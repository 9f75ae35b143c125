"""
Worker functions of the accelerator tests, on a given device: ``cuda``, or ``cpu`` to try them out.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import distributed

BLOCK = 2 << 30
"""Bytes that a worker takes of a device, so much that its own context cannot be mistaken for it."""


def rank() -> int:
    return int(os.environ["RANK"])


def clean_start() -> tuple[bool, bool]:
    """Return whether CUDA is in use at the worker's start, and whether torch refuses it after a fork."""
    return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()  # type: ignore[no-untyped-call]


def drawn(device: str) -> tuple[float, ...]:
    """The first numbers that a worker draws on *device*."""
    return tuple(torch.rand(4, device=device).tolist())


def sum_over_ranks(device: str, backend: str) -> float:
    """The sum of rank + 1, reduced on the device through a process group of *backend*."""
    distributed.init_process_group(backend)
    value = torch.full((4,), rank() + 1.0, device=device)
    distributed.all_reduce(value)
    total = float(value.mean())
    distributed.destroy_process_group()
    return total


def compiled_difference(device: str) -> float:
    """Return the largest difference between a compiled model and the uncompiled model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(device)
    data = torch.randn(32, 64, device=device)
    with torch.no_grad():
        return float((torch.compile(model)(data) - model(data)).abs().max())


def free_memory() -> int:
    """Bytes of the device that nobody uses."""
    return int(torch.cuda.mem_get_info()[0])


def take(device: str, size: int) -> torch.Tensor:
    """Memory of the device that is really there: it has been written to."""
    return torch.ones(size, dtype=torch.uint8, device=device)


def killed_with_memory(device: str, size: int) -> None:
    """Die by SIGKILL with *size* bytes of the device in use."""
    block = take(device, size)
    assert int(block[-1]) == 1
    os.kill(os.getpid(), signal.SIGKILL)


def killed_once_with_memory(device: str, size: int) -> str:
    """As `killed_with_memory`, in the first round; the number of restarts of the second, which takes as much."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        killed_with_memory(device, size)
    assert int(take(device, size)[-1]) == 1
    return attempt


def free_memory_reaches(least: int, limit: float = 10.0) -> int:
    """The device's free bytes once there are *least*, or after *limit* seconds: the driver clears up by itself."""
    deadline = time.monotonic() + limit
    while (free := free_memory()) < least and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def killed_once(device: str, size: int) -> dict[str, Any]:
    """In the first round rank 1 is killed between two reductions on the device; tell of the second round."""
    distributed.init_process_group("gloo")
    block = take(device, size)
    value = torch.ones(1, device=device)
    distributed.all_reduce(value)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(value)
    return {"round": os.environ["TORCHELASTIC_RESTART_COUNT"], "sum": float(value), "held": block.numel()}


def tensor(device: str) -> torch.Tensor:
    """A result that lives on the device."""
    return torch.arange(3, device=device)
