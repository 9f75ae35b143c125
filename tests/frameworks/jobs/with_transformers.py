"""Transformers: `Trainer` on a tiny language model made from its configuration; rank 1 dies once where told to."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Counting(torch.utils.data.Dataset):
    """Sequences that count up: the next token follows from the last."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


class Dies(TrainerCallback):
    """Kills rank 1 of the first attempt at the start of a step."""

    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, **_):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and args.process_index == 1 and state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, dies_at=-1):
    """Train eight steps, saving each fourth; give what this rank saw and ended with."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    args = TrainingArguments(
        output_dir=str(Path(folder, "trained")),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        learning_rate=0.02,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer = Trainer(model=model, args=args, train_dataset=Counting(), callbacks=[Dies(dies_at)])
    trainer.train(resume_from_checkpoint=last)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    seen = {
        "rank": args.process_index,
        "local_rank": args.local_process_index,
        "world": args.world_size,
        "mode": args.parallel_mode.value,
        "wrapped": type(trainer.model_wrapped).__name__,
        "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "resumed": os.path.basename(last or ""),
        "steps": trainer.state.global_step,
        "losses": [losses[step] for step in sorted(losses)],
        "weights": [value for tensor in trainer.model.parameters() for value in tensor.flatten().tolist()],
    }
    return seen


if __name__ == "__main__":
    seen = train(sys.argv[1], *map(int, sys.argv[2:]))
    Path(sys.argv[1], f"rank{seen['rank']}.json").write_text(json.dumps(seen))
