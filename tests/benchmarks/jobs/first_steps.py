"""
A training that marks its first step, and goes on until it is killed:
``first_steps.py ddp|cuda|lightning|transformers``.

The number of each rank's process is in a file of its own.
"""

import os
import sys
import time

from tests.benchmarks import journal

marked = []


def stepped():
    """Called after each step of a rank."""
    if not marked:
        marked.append(True)
        (journal.folder() / f"pid{journal.attempt()}-{journal.rank()}").write_text(str(os.getpid()))
        journal.mark("step")
    time.sleep(0.02)  # of each step's work


def ddp(device="cpu"):
    """DistributedDataParallel with AdamW."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 10, device=device))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 10, device=device)).sum().backward()
        optimizer.step()
        stepped()


def cuda():
    """The same with the model on a GPU, which all ranks may share, and memory there that takes a while to be freed."""
    import torch

    memory = torch.ones(2**30, device="cuda:0")  # 4 GiB
    ddp("cuda:0")
    del memory


def lightning():
    """A Lightning Trainer with the strategy "ddp"."""
    import lightning as library
    import torch

    class Line(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_):
            stepped()

    data = torch.utils.data.TensorDataset(torch.ones(100_000, 1))
    trainer = library.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        default_root_dir=journal.folder(),
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(data))


def transformers():
    """The Trainer of Transformers on a tiny language model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))

    class StepMarker(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            stepped()

    arguments = TrainingArguments(
        output_dir=str(journal.folder() / "trained"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=100_000,
        save_strategy="no",
        per_device_train_batch_size=1,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 1000
    Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[StepMarker()]).train()


if __name__ == "__main__":
    {"ddp": ddp, "cuda": cuda, "lightning": lightning, "transformers": transformers}[sys.argv[1]]()
