"""
FSDP2 with torch.distributed.checkpoint: sharded weights and optimizer, saved after each step, loaded at the start.

The global batch is the same whatever the world size (it must divide 12): any number of workers gives the same weights.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def whole(model):
    """All weights, gathered from all ranks."""
    return [value for tensor in model.parameters() for value in tensor.full_tensor().flatten().tolist()]


def train(folder, until=4, dies_at=-1, lingers_at=-1):
    """Go on from the last checkpoint in *folder* to step *until*; give what this rank saw and ended with."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    mesh = init_device_mesh("cpu", (world,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint, first = Path(folder, "checkpoint"), 0
    steps = sorted(int(path.parent.name) for path in checkpoint.glob("*/.metadata"))  # it is written last
    if steps:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=checkpoint / str(steps[-1]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
    loaded = whole(model)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 4, generator=generator)[rank::world]
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for step in range(first, until):
        if attempt == 0 and rank == 1 and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == lingers_at and world > 1:
            Path(folder, f"lingers{rank}").touch()
            signal.pause()  # until a node leaves and the round ends
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step + 1}, checkpoint_id=checkpoint / str(step + 1))
    shards = [tensor.to_local().shape[0] for tensor in model.parameters() if isinstance(tensor, DTensor)]
    seen = {"rank": rank, "world": world, "attempt": attempt, "first": first, "losses": losses, "shards": shards}
    seen |= {"loaded": loaded, "weights": whole(model)}
    dist.destroy_process_group()  # left to the interpreter's end, torch's threads abort the process now and then
    return seen


if __name__ == "__main__":
    seen = train(sys.argv[1], *map(int, sys.argv[2:]))
    Path(sys.argv[1], f"rank{seen['rank']}.json").write_text(json.dumps(seen))
