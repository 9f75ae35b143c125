"""A training of two nodes that marks its first step in each process, and goes on until it is killed."""

import time

import torch
from torch import distributed

from tests.benchmarks import journal

distributed.init_process_group("gloo")
distributed.all_reduce(torch.ones(1))
journal.mark("stepped")
while True:
    distributed.all_reduce(torch.ones(1))
    time.sleep(0.02)  # of each step's work
