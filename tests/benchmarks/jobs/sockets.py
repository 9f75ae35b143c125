"""A gloo job that waits at the gate once its process group works."""

import torch
import torch.distributed as dist

from tests.benchmarks import journal

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
journal.mark("up")
with open(journal.folder() / "gate", "rb"):
    dist.destroy_process_group()
