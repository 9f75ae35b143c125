"""Sets its number of threads before it imports torch, as scripts do."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_LOGS"] = "+dynamo"

import torch

print("threads", torch.get_num_threads(), flush=True)
