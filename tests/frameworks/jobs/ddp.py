"""Plain DistributedDataParallel: a linear model learns y = 2x + 1; rank 1 dies once where it is told to."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(folder, dies_at=-1):
    """Train five steps; give what this rank saw and ended with."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(rank)  # DDP makes the weights of rank 0 everyone's
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    inputs = torch.linspace(-1, 1, 12).reshape(-1, 1)[rank::world]
    losses = []
    for step in range(5):
        if attempt == 0 and rank == 1 and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(model(inputs), 2 * inputs + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    weights = [value for tensor in model.parameters() for value in tensor.flatten().tolist()]
    dist.destroy_process_group()
    return {"rank": rank, "world": world, "attempt": attempt, "losses": losses, "weights": weights}


if __name__ == "__main__":
    seen = train(sys.argv[1], *map(int, sys.argv[2:]))
    Path(sys.argv[1], f"rank{seen['rank']}.json").write_text(json.dumps(seen))
    # DistributedDataParallel holds the destroyed group, whose threads abort an ending interpreter now and then.
    os._exit(0)
