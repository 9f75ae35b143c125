"""Training whose steps are collectives: no rank can make one without the others, and each asks after it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import elasticlib

dist.init_process_group("gloo")
step, stop = 0, None
while stop is None:
    dist.all_reduce(torch.ones(1))
    step += 1
    if step == 5:
        print(f"rank {os.environ['RANK']} works as {os.getpid()}\n", end="", flush=True)
    stop = elasticlib.should_stop()
dist.barrier()
print(f"rank {os.environ['RANK']} stops at {step} by {stop.reason} {stop.ranks}\n", end="", flush=True)
