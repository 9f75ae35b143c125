"""Lightning: a `Trainer` with the strategy "ddp" finds its place by itself; rank 1 dies once where it is told to."""

import json
import os
import signal
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Line(lightning.LightningModule):
    """Learns y = 2x + 1."""

    def __init__(self, dies_at):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.dies_at = dies_at
        self.losses = []

    def training_step(self, batch, _):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and self.global_rank == 1 and self.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        (inputs,) = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), 2 * inputs + 1)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def train(folder, dies_at=-1):
    """Train three epochs of two steps, saving each; give what this rank saw and ended with."""
    lightning.seed_everything(0, verbose=False)
    inputs = torch.linspace(-1, 1, 12).reshape(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=3)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=3,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(Path(folder, "saved"), save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line(dies_at)
    last = Path(folder, "saved", "last.ckpt")
    resumed = last.exists()
    trainer.fit(model, loader, ckpt_path=str(last) if resumed else None)
    seen = {
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "world": trainer.world_size,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "started": len(trainer.strategy.launcher.procs),
        "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "resumed": resumed,
        "steps": trainer.global_step,
        "losses": model.losses,
        "weights": [value for tensor in model.parameters() for value in tensor.flatten().tolist()],
    }
    return seen


if __name__ == "__main__":
    seen = train(sys.argv[1], *map(int, sys.argv[2:]))
    Path(sys.argv[1], f"rank{seen['rank']}.json").write_text(json.dumps(seen))
