"""Accelerate: `Accelerator` prepares model, optimizer and loader; rank 1 dies once where it is told to."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def train(folder, dies_at=-1):
    """Train one epoch of six steps, resuming from what was saved; give what this rank saw and ended with."""
    accelerator = Accelerator(cpu=True)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    set_seed(0)
    inputs = torch.rand(24, 1, generator=torch.Generator().manual_seed(1)) * 2 - 1
    loader = DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved, first = Path(folder, "saved"), 0
    if saved.is_dir():
        newest = max(saved.iterdir(), key=lambda path: int(path.name))
        accelerator.load_state(str(newest))
        first = int(newest.name)
    losses = []
    for step, (x, y) in enumerate(accelerator.skip_first_batches(loader, first), start=first):
        if attempt == 0 and accelerator.process_index == 1 and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if step == 2:
            accelerator.save_state(str(saved / "3"))
            accelerator.wait_for_everyone()
    state = PartialState()
    weights = [value for tensor in model.parameters() for value in tensor.flatten().tolist()]
    seen = {
        "rank": state.process_index,
        "local_rank": state.local_process_index,
        "world": state.num_processes,
        "kind": str(state.distributed_type),
        "wrapped": type(model).__name__,
        "attempt": attempt,
        "first": first,
        "losses": losses,
        "weights": weights,
    }
    return seen


if __name__ == "__main__":
    seen = train(sys.argv[1], *map(int, sys.argv[2:]))
    Path(sys.argv[1], f"rank{seen['rank']}.json").write_text(json.dumps(seen))
