"""Reductions with a factor, of narrow dtypes, of booleans and of complex numbers."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import dist, fails, torch
from programs.torch.backend.operations.common import me, mine, n, same, total

scaled = dist._make_nccl_premul_sum(2.0)
for dtype in (torch.float32, torch.float16, torch.float64):
    x = mine(5, dtype=dtype)
    dist.all_reduce(x, op=scaled)
    same(x, 2 * total)
x = mine(5)
dist.all_reduce(x, op=dist._make_nccl_premul_sum(torch.tensor([2.0])))
same(x, 2 * total)
x = mine(5)
dist.reduce(x, 1, op=scaled)
same(x, 2 * total if me == 1 else me)
x, out = mine(2 * n), torch.empty(2)
dist.reduce_scatter_tensor(out, x, op=scaled)
same(out, 2 * total)
same(x, me)  # the input is not multiplied
dist.reduce_scatter(out, [mine(2) for _ in range(n)], op=scaled)
same(out, 2 * total)

for op, value in (("SUM", 1), ("MAX", 1), ("MIN", 0), ("PRODUCT", 0), ("BAND", 0), ("BOR", 1), ("BXOR", 1)):
    x = torch.tensor([me == 0] * 3)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    same(x, value)
for name in ("uint16", "uint32", "uint64", "int8", "int16", "bfloat16", "float16"):
    x = mine(5, dtype=getattr(torch, name))
    dist.all_reduce(x)
    same(x, total)
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    dtype = getattr(torch, name)
    for op, value in (("SUM", total), ("MAX", n - 1), ("AVG", total / n)):
        x = mine(5, dtype=dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        same(x, value)
    out = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(out, mine(2 * n, dtype=dtype))
    same(out, total)
    out = torch.empty(2 * n, dtype=dtype)
    dist.all_gather_into_tensor(out, mine(2, dtype=dtype))
    same(out.view(n, 2)[:, 0], torch.arange(n))
for dtype in (torch.complex32, torch.complex64, torch.complex128):
    x = torch.full((4,), me + 1j).to(dtype)
    dist.all_reduce(x)
    same(torch.view_as_real(x)[:, 0], total)
    same(torch.view_as_real(x)[:, 1], n)
x = torch.full((4,), 2 * me + 2j)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert (x == n - 1 + 2j).all(), x
x = torch.tensor([me, -me - 1, 7])  # cut off towards zero, as NCCL has it
dist.all_reduce(x, op=dist.ReduceOp.AVG)
total = n * (n - 1) // 2
assert x.tolist() == [total // n, -((total + n) // n), 7], x
x = torch.ones(2, dtype=torch.bool)
fails(lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), "no reduction 'avg' for dtype bool")

print("good")
dist.destroy_process_group()
