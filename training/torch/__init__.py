"""Loops of PyTorch that survive losses: `zbmd.torch.resilient`. See docs/GUIDE_TORCH.md.

`run` has the loop; `transaction` the protocol of its steps, sans-I/O; `shards` and `replica` the copies of
FSDP2's shards; `ddp`, `fsdp`, `rollback`, `transfer` and `batches` what a step, a repetition and a
replacement need of PyTorch.
"""
