"""Loops of PyTorch that survive losses: `zbmd.torch.resilient`. See docs/GUIDE_TORCH.md.

`run` has the loop; `transaction` the protocol of its steps, sans-I/O; `meetings` performs it where all meet;
`shares` and `ddp` divide a batch; `fsdp` has the shards of FSDP2, their copies and divisions; `rollback`,
`transfer` and `batches` what a step and a repetition need of PyTorch; `durable` what a new run goes on from.
"""
