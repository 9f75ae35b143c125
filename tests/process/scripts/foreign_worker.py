"""Sums the ranks over gloo and notes its round: ``FOLDER FAILURES``; rank 1 fails in that many first attempts."""

import json
import os
import sys

import torch
import torch.distributed as dist

folder, failures = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
ranks = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(ranks)
facts = {
    name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
}
with open(f"{folder}/{attempt}-{dist.get_rank()}", "w") as file:
    json.dump({**facts, "sum": int(ranks)}, file)
dist.barrier()
if dist.get_rank() == 1 and attempt < int(failures):
    raise RuntimeError(f"attempt {attempt} was doomed")
if attempt < int(failures):
    dist.barrier()  # until the agents end it
dist.destroy_process_group()  # left to the interpreter's end, torch's threads abort the process now and then
