"""Tensors of CUDA devices in process groups, and backends such as NCCL beside ours.

`devices` is the seam to `torch.cuda` and what a process has of each device; `calls` carries calls out with
such tensors; `companions` keeps other backends' communicators in step with the membership. Imports `tensors`
and `work` of the package above it. Begin with `devices`, then `calls`.
"""
