"""A training on many nodes, which marks each part of the way to its first step, and ends after it."""

from tests.benchmarks import journal

journal.mark("started")
import torch  # noqa: E402  (its import is part of what is timed)
from torch import distributed  # noqa: E402

journal.mark("imported")
distributed.init_process_group("gloo")
journal.mark("grouped")
distributed.all_reduce(torch.ones(1))
journal.mark("stepped")
distributed.destroy_process_group()
