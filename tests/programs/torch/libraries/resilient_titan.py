# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""A loop as torchtitan's: decoder blocks in FSDP2 with mixed precision, a loader with a state, DCP saves.

MODE: how it is saved, `sync` or `async`. OUT: a directory that all ranks share. DIES: the step behind which
rank 1 is killed while a thread writes its part of the checkpoint; rank 0's goes on once that is replaced.

Ranks print each step, and in the end the bits of their shards once the last checkpoint has them, too.
"""

import hashlib
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,unused-ignore]
from torchdata.stateful_dataloader.sampler import (  # type: ignore[import-not-found,unused-ignore]
    StatefulDistributedSampler,
)

import zbmd.torch
from zbmd.transport import kill_points

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 64, 32, 4, 2, 16
SAVE_EVERY = 3
POLL_S = 0.05
WRITING, REPLACED = (Path(os.environ["OUT"], name) for name in ("writing", "replaced"))


class Text(Dataset):  # type: ignore[type-arg]
    """Sequences of tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(CONTEXT + 1) * (1 + index % 5) + index) % VOCABULARY


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = (rotated(each, turns) for each in (q, k))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Block(nn.Module):
    """Attention, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(WIDTH, 80, bias=False), nn.Linear(WIDTH, 80, bias=False)
        self.down, self.drop = nn.Linear(80, WIDTH, bias=False), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), turns)
        y = self.between(x)
        return x + self.drop(self.down(silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([checkpoint_wrapper(Block()) for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        turns = torch.empty(CONTEXT, WIDTH // HEADS // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))

    def begin(self) -> None:
        """Set parameters and buffers, once their memory is there."""
        modules: Any = self.modules()
        for each in modules:
            if hasattr(each, "reset_parameters"):
                each.reset_parameters()
        rates = 100.0 ** -torch.arange(0, 1, 2 * HEADS / WIDTH)
        angles = torch.outer(torch.arange(CONTEXT).float(), rates)
        turns: Any = self.turns
        turns.copy_(torch.polar(torch.ones_like(angles), angles))


def sharded() -> Any:
    """Return a decoder that is made on the meta device, and has memory for this rank's part alone."""
    with torch.device("meta"):
        model = Decoder()
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for number, block in enumerate(model.blocks):
        fully_shard(block, **options, reshard_after_forward=number < LAYERS - 1)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    model.begin()
    return model


def wait_for(path: Path) -> None:
    while not path.exists():
        threading.Event().wait(POLL_S)


class Interrupted(dcp.FileSystemWriter):
    """Writes a rank's part of a checkpoint, in which rank 1 is killed and rank 0 sees its replacement."""

    def write_data(self, *given: Any) -> Any:
        if dist.get_rank() == 1:
            wait_for(WRITING)
            kill_points.die()
        WRITING.touch()
        wait_for(REPLACED)
        return super().write_data(*given)


class Saves:
    """The checkpoints of a loop."""

    def __init__(self, run: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.run, self.model, self.optimizer, self.scheduler = run, model, optimizer, scheduler
        self.pending: Any = None

    def save(self) -> None:
        """Save the last committed step; the one before is over, or was lost with a rank."""
        self.wait()
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": self.scheduler.state_dict()}
        is_interrupted = os.environ.get("DIES") == str(self.run.steps) and not REPLACED.exists()
        writer = (Interrupted if is_interrupted else dcp.FileSystemWriter)(self.path(self.run.steps))
        if os.environ["MODE"] == "sync":
            dcp.save(state, storage_writer=writer)
            return
        self.pending = dcp.async_save(state, storage_writer=writer, process_group=BESIDE)

    def wait(self) -> None:
        """Wait for the save under way."""
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except RuntimeError as error:
            print(f"a save beside the loop is lost: {error}", flush=True)

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is."""
        return str(Path(os.environ["OUT"], f"step-{step}"))


def digest(*values: Any) -> str:
    """Return a digest of the bits of tensors, of DTensors those of their shards."""
    found = hashlib.sha256()
    for value in values:
        local = getattr(value, "_local_tensor", value)
        found.update(bytes(local.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def held(model: Any, optimizer: Any) -> list[Any]:
    """Return the parameters and their moments."""
    moments = [each for one in model.parameters() for _, each in sorted(optimizer.state[one].items())]
    return [*model.parameters(), *moments]


def check_saved(path: str, model: Any, optimizer: Any) -> None:
    """Check that the checkpoint has the bits of the model and its moments."""
    other = sharded()
    its = torch.optim.AdamW(other.parameters(), lr=1.0, fused=True)
    weights, moments = get_state_dict(other, its)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert digest(*held(other, its)) == digest(*held(model, optimizer)), path


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
dist.init_process_group("zbmd")
BESIDE: Any = dist.new_group(backend="zbmd")
torch.manual_seed(1)


def main() -> None:
    """Train."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    text = Text()
    loader = StatefulDataLoader(text, 4, sampler=StatefulDistributedSampler(text, shuffle=True))
    run = zbmd.torch.resilient(model, optimizer, scheduler)
    if os.environ["ZBMD_INCARNATION"] != "1":
        REPLACED.touch()
    saves = Saves(run, model, optimizer, scheduler)
    run.every(SAVE_EVERY, saves.save)
    for tokens in run.batches(loader, epochs=1):
        with run.step():
            optimizer.zero_grad()
            parts = tokens.chunk(2)
            total = torch.zeros(())
            for number, part in enumerate(parts):
                model.set_requires_gradient_sync(number == len(parts) - 1)
                found = model(part[:, :-1]).flatten(0, 1).float()
                loss = cross_entropy(found, part[:, 1:].flatten()) / len(parts)
                loss.backward()
                total += loss.detach()
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters()]).full_tensor()
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            dist.all_reduce(total, dist.ReduceOp.AVG)
            run.mean(loss=total, norm=norm)
            optimizer.step()
            scheduler.step()
            bits, rate = digest(*held(model, optimizer)), scheduler.get_last_lr()[0]
            print(f"step {run.steps} rank {dist.get_rank()}: {bits} {run.metrics} {rate!r}", flush=True)
    saves.save()
    saves.wait()
    check_saved(saves.path(run.steps), model, optimizer)
    print(f"final rank {dist.get_rank()}: {digest(*held(model, optimizer))}", flush=True)
    dist.destroy_process_group()


main()
