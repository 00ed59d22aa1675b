"""Calls of `torch.distributed`, and steps of DDP and FSDP2, over zbmd beside gloo."""
