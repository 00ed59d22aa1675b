# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Hugging Face's `Trainer` as a resilient loop. MODE: a setting of the trainer that is tried beside it. OUT:
a directory that all ranks share.

Ranks print each step, and in the end the bits of the model, what was logged, and what was evaluated.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig  # type: ignore[import-not-found,unused-ignore]

import zbmd.torch.transformers

MODES = {
    "plain": {"max_steps": 10},
    "accelerate_shards": {"max_steps": 10, "fsdp": True},
    "sharded": {
        "max_steps": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        "save_steps": 3,
        "save_only_model": True,
    },
    "counted": {"max_steps": 10, "include_num_input_tokens_seen": "all"},
    "whole": {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        "save_steps": 3,
        "dataloader_num_workers": 1,
    },
}


class Steps(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Prints what ranks have at each step."""

    def on_step_end(self, arguments: object, state: object, control: object, **more: Any) -> None:
        bits = digest(more["model"])
        rate = more["lr_scheduler"].get_last_lr()[0]
        place = f"epoch {state.epoch:.3f} at {rate!r}"
        print(f"step {state.global_step} rank {dist.get_rank()}: {bits} {place}", flush=True)


def digest(model: torch.nn.Module) -> str:
    own = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    bits = [each.view(torch.int32).tolist() for each in own]
    return hashlib.sha256(repr(bits).encode()).hexdigest()[:16]


def sharded() -> Any:
    """Return a model that transformers shards by FSDP2 as it reads it."""
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    directory = Path(os.environ["OUT"], "whole")
    if dist.get_rank() == 0 and os.environ["ZBMD_INCARNATION"] == "1":
        config = LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes)
        LlamaForCausalLM(config).save_pretrained(directory)
    dist.barrier()
    over = DistributedConfig(fsdp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(directory, distributed_config=over)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(0)
    rows = [torch.randint(0, 64, (16,)) for _ in range(48)]
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    gpt = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = sharded() if os.environ["MODE"] == "sharded" else GPT2LMHeadModel(gpt)
    arguments = TrainingArguments(
        output_dir=os.environ["OUT"],
        use_cpu=True,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "steps", "logging_steps": 4, **MODES[os.environ["MODE"]]},
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Steps()]
    )
    trained = zbmd.torch.transformers.resilient(trainer).train()
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss")
    logged = [{name: each[name] for name in kept if name in each} for each in trainer.state.log_history]
    print(f"final rank {dist.get_rank()}: {digest(model)} {trained.training_loss} {logged}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
