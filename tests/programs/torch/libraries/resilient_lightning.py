# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`Trainer.fit` of Lightning as a resilient loop. MODE: a setting of the trainer that is tried beside it.
OUT: a directory that all ranks share.

Ranks print each step, and in the end the bits of the model and what was logged.
"""

import hashlib
import os
from typing import Any

import lightning  # type: ignore[import-not-found,unused-ignore]
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError  # type: ignore[import-not-found,unused-ignore]

import zbmd.torch.lightning

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "val_check_interval": 6},
    "sharded": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 4},
    "manual": {},
}


class Line(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    """A network that learns to add."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.error = MeanSquaredError()
        self.automatic_optimization = not manual

    def configure_model(self) -> None:
        if os.environ["MODE"] == "sharded":
            for module in (self.net[0], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> Any:
        found = self.net(batch[0])
        loss = nn.functional.mse_loss(found, batch[1])
        self.error(found, batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("off", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        place = f"batch {number} of pass {self.trainer.current_epoch} at {rate!r}"
        if self.trainer.fit_loop._should_accumulate():
            return  # a replacement makes all passes of a step
        print(f"step {self.trainer.global_step} rank {dist.get_rank()}: {digest(self)} {place}", flush=True)


def digest(model: nn.Module) -> str:
    own = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    bits = [each.view(torch.int32).tolist() for each in own]
    return hashlib.sha256(repr(bits).encode()).hexdigest()[:16]


def strategy() -> Any:
    if os.environ["MODE"] != "sharded":
        return zbmd.torch.lightning.Resilient()
    size = int(os.environ["WORLD_SIZE"])
    return zbmd.torch.lightning.ResilientModelParallel(data_parallel_size=size, tensor_parallel_size=1)


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(80, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy(),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ["OUT"],
        callbacks=[ModelCheckpoint(os.environ["OUT"], monitor="off", save_last=True)],
        **MODES[os.environ["MODE"]],
    )
    model = Line(manual=os.environ["MODE"] == "manual")
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
    logged = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    print(f"final rank {dist.get_rank()}: {digest(model)} {trainer.global_step} {logged}", flush=True)


if __name__ == "__main__":
    main()
