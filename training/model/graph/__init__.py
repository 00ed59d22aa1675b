"""A step as a graph of ops with shapes: traced from the tape, fused, its memory planned, run.

`ir` is the graph, pure data; `trace` records a model's forward and backward pass; `fusion` finds sequences
that one kernel can compute and says why or why not; `memory` lays all values out in one arena;
`numpy_executor` runs a graph, fused or not, and `cuda_executor` a fused one on a device. `segments` captures
what lies between exchanges as CUDA graphs: `steps` whole steps, `passes` those of runs of units. Imports
`model`, `ops` and `autograd`. Begin with `ir`.
"""
