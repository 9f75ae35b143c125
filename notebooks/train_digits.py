"""
Train a small network on the handwritten digits that ship with scikit-learn, on any number of workers.

The script is plain PyTorch and runs unchanged on its own and under a launcher:

    python train_digits.py
    elasticrun --nproc-per-node 2 --max-restarts 1 train_digits.py --fail-rank 1 --fail-epoch 3

The second command kills a worker on purpose. The launcher starts both workers again, they resume from
the newest checkpoint, and the run ends with the very weights that it would have had without the loss.
On several nodes the checkpoint folder must be on a disk that all of them share.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KEPT_CHECKPOINTS = 2


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 images in two parts, 80% to train on and 20% to test on; the same parts for the same seed."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    """A convolution and two dense layers: 8x8 images in, a score for each of the 10 digits out."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip


def own_device() -> torch.device:
    """A GPU of its own for each worker of this machine, or the CPU for all of them."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not torch.cuda.is_available() or torch.cuda.device_count() < local_world:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> None:
    """Join the process group that the launcher describes, or make one of a single worker."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of this worker's random generators: dropout draws from the one of its device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def save(folder: Path, epoch: int, state: dict[str, Any]) -> None:
    """Write the checkpoint of *epoch* whole or not at all, also when the machine dies meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{epoch:04d}.pt"
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    for old in sorted(folder.glob("epoch-*.pt"))[:-KEPT_CHECKPOINTS]:
        old.unlink()


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint in *folder* that can be read, or None."""
    for path in sorted(folder.glob("epoch-*.pt"), reverse=True):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            print(f"skipped {path}: {error}")
        else:
            return state
    return None


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """The share of test images that the model names rightly; each worker looks at its part of them."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in test.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train(
    checkpoint_dir: str | Path, epochs: int = 8, batch_size: int = 32, lr: float = 3e-3, seed: int = 0,
    fail_rank: int = -1, fail_epoch: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """
    Train up to *epochs*, from the newest checkpoint if there is one, and return what came of it.

    *batch_size* is counted over all workers, so their number changes the speed, not the training.
    Worker *fail_rank* kills itself as *fail_epoch* begins, unless the job was restarted before.
    """
    device, folder = own_device(), Path(checkpoint_dir)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    torch.manual_seed(seed)
    # Made before joining: a program's first optimizer imports parts of torch that would keep the group open.
    net = network().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}

    join(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits(seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, world_size, rank, seed=seed)
    loader = DataLoader(train_set, max(1, batch_size // world_size), sampler=sampler)
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)

    # One worker looks and tells the others: two that look for themselves may find different files.
    found = [newest(folder) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    checkpoint, done = found[0], 0
    torch.manual_seed(seed * 1000 + rank)  # each worker drops other neurons
    if checkpoint is not None:
        if checkpoint["seed"] != seed:
            raise ValueError(f"{folder} was trained with seed {checkpoint['seed']}, whose test images are others")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        if len(checkpoint["random"]) == world_size:  # another number of workers draws anew
            restore_random_state(checkpoint["random"][rank], device)
        done = checkpoint["epoch"]
        if rank == 0:
            print(f"resumed from epoch {done} in {folder} (restart {attempt})")
    resumed_from = done

    for epoch in range(done + 1, epochs + 1):
        if rank == fail_rank and epoch == fail_epoch and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sampler.set_epoch(epoch)
        net.train()
        total = torch.zeros((), device=device)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        done = epoch

        states: list[Any] | None = [None] * world_size if rank == 0 else None
        dist.gather_object(random_state(device), states, dst=0)
        if rank == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            save(folder, epoch, {"epoch": epoch, "seed": seed, "random": states, **state})
        # This waits for the checkpoint: no worker starts an epoch before the last one is safe.
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}/{epochs} loss {total.item() / len(loader) / world_size:.3f}")

    share = accuracy(net, test_set, device)
    if rank == 0:
        print(f"test accuracy {share:.3f} after {done} epochs (world size {world_size})")
    # A model that outlives its process group can hang or abort torch at the end, so the model goes first.
    del model
    dist.destroy_process_group()
    return {"accuracy": share, "epochs": done, "resumed_from": resumed_from, "rank": rank, "world_size": world_size}


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, on any number of workers.")
    parser.add_argument("--checkpoint-dir", default="digits-checkpoints", help="shared by all workers (%(default)s)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, over all workers (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fail-rank", type=int, default=-1, help="this worker kills itself once ...")
    parser.add_argument("--fail-epoch", type=int, default=-1, help="... as this epoch begins (from 1)")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
