"""Hugging Face's `Trainer`, which survives the loss of ranks. Needs PyTorch, transformers and accelerate.

    zbmd-node run -n 3 --preload torch --preload transformers.trainer examples/torch_trainer.py

Kill a rank while it runs (`kill -9`): the others repeat the step with its replacement, and the last line
stays the same. The numbered lines are all that zbmd asks for.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import zbmd.torch.transformers  # 1


def main() -> None:
    """Train a small GPT-2 to count."""
    dist.init_process_group("zbmd")  # 2
    torch.manual_seed(0)
    rows = [(torch.arange(16) + begin) % 64 for begin in range(64)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            max_steps=30,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trained = zbmd.torch.transformers.resilient(trainer).train()  # 3
    if dist.get_rank() == 0:
        print(f"the run has ended after {trained.global_step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
