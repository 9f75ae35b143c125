"""Sets its number of threads, and what torch logs, before it imports torch, as scripts do."""

import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_LOGS"] = "+dynamo"

import torch

print("threads", torch.get_num_threads(), "logs", logging.getLogger("torch._dynamo").level, flush=True)
