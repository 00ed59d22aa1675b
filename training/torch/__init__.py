"""Loops of PyTorch that survive losses: `zbmd.torch.resilient`. See docs/GUIDE_TORCH.md.

`run` has the loop; `transaction` the protocol of its steps, sans-I/O; `meetings` performs it where all meet;
`shares` and `ddp` divide a batch; `fsdp` has the shards of FSDP2, their copies and divisions; `rollback`,
`transfer`, `batches`, `checkpoints` and `saved` what a step, a repetition and a new run need of PyTorch.
"""
