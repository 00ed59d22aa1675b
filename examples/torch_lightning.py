"""Lightning's `Trainer.fit`, which survives the loss of ranks. Needs PyTorch and lightning.

    zbmd-node run -n 3 --preload torch --preload lightning examples/torch_lightning.py

Kill a rank while it runs (`kill -9`): the others repeat the step with its replacement, and the last line
stays the same. The numbered lines are all that zbmd asks for.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import lightning  # type: ignore[import-not-found,unused-ignore]
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import zbmd.torch.lightning  # 1


class Line(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    """A layer that learns to add."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = mse_loss(self.line(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main() -> None:
    """Train for 3 epochs."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(96, 8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=zbmd.torch.lightning.Resilient(),  # 2
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True))
    if trainer.global_rank == 0:
        print(f"the run has ended after {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
