"""A gloo job that waits at the gate once its process group works."""

import torch
import torch.distributed as dist

from tests.benchmarks import state_log

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
state_log.mark("up")
with open(state_log.folder() / "gate", "rb"):
    dist.destroy_process_group()
