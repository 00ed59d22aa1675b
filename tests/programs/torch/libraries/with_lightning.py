# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`Trainer.fit` of Lightning with DDP, over the backend that it is given; rank 0 prints what came of it."""

import os
import signal
import sys
import tempfile
from typing import Any

import lightning  # type: ignore[import-not-found,unused-ignore]
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Line(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    """A layer that learns to add."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> Any:
        if number == 2 and os.environ.get("VICTIM") == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(self.line(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("count", torch.tensor(3), sync_dist=True, reduce_fx="mean")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


lightning.seed_everything(0, verbose=False)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
with tempfile.TemporaryDirectory() as directory:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=sys.argv[1]),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Line(), DataLoader(data, batch_size=4))
    found = [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "count")]
if trainer.global_rank == 0:
    print(f"{dist.get_backend()} {trainer.world_size} {found}", flush=True)
