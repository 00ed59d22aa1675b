# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Hugging Face's `Trainer`, over the backend that it is given; rank 0 prints what came of it."""

import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Victim(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Kills the rank that VICTIM names, in its third step."""

    def on_step_begin(self, arguments: object, state: object, control: object, **_: object) -> None:
        if state.global_step == 2 and os.environ.get("VICTIM") == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
rows = [torch.randint(0, 64, (16,)) for _ in range(32)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trained = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Victim()]).train()
    dist.barrier()
if dist.get_rank() == 0:
    print(f"{dist.get_backend()} {dist.get_world_size()} {trained.training_loss}", flush=True)
dist.destroy_process_group()
