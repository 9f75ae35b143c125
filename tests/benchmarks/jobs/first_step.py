"""Worker function of ``jobs/calls.py`` for calls that train: this module imports as users do."""

import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def first_step() -> float:
    """Monotonic seconds after the first of a few steps of DDP with AdamW."""
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    at = 0.0
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).sum().backward()
        optimizer.step()
        at = at or time.monotonic()
    del model  # first: else torch 2.13 may hang at its end
    distributed.destroy_process_group()
    return at
