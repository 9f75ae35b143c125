"""A gloo job of which one rank (named on the command line) kills itself in the first attempt, amid its peers' work."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from tests.benchmarks import journal

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if journal.attempt() == 0:
    if journal.rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(total)
if int(total.item()) != dist.get_world_size():
    raise SystemExit(f"the sum over {dist.get_world_size()} ranks is {total.item()}")
dist.destroy_process_group()
journal.mark("finished")
