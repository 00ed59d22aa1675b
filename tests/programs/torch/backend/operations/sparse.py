"""Sums of sparse tensors."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import dist, fails, torch
from programs.torch.backend.operations.common import me, n, same, total


def sparse(values, dtype=torch.float32):
    # One entry of this rank's own, and one at the end that all ranks have.
    values = torch.tensor(values).to(dtype)
    return torch.sparse_coo_tensor([[me, n]], values, (n + 1, *values.shape[1:]))


for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
    x = sparse([me + 1, me + 1], dtype)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.is_sparse and x.is_coalesced() and work.result()[0] is x, (x, work.result())
    assert torch.equal(x.to_dense(), torch.tensor([*range(1, n + 1), total + n]).to(dtype)), x.to_dense()
x = sparse([[1.0, 2.0], [3.0, 4.0]])
dist.all_reduce(x)
assert torch.equal(x.to_dense(), torch.tensor([[1.0, 2.0]] * n + [[3.0 * n, 4.0 * n]])), x.to_dense()
x = torch.sparse_coo_tensor(torch.zeros(2, me, dtype=torch.int64), torch.ones(me), (2, 3))  # rank 0 has none
dist.all_reduce(x)
same(x.to_dense()[0, 0], total)
x = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (4,))
dist.all_reduce(x)
assert x._nnz() == 0
fails(lambda: dist.all_reduce(sparse([1.0, 1.0]), op=dist.ReduceOp.MAX), "ReduceOp.SUM", ".to_dense()")
fails(lambda: dist.broadcast(sparse([1.0, 1.0]), 0), "layout torch.sparse_coo")
other = torch.sparse_coo_tensor([[0]], [1.0], (3 + me,))
fails(lambda: dist.all_reduce(other), "Desynchronised", "sparse float32[3] with", "sparse float32[5] with")

print("good")
dist.destroy_process_group()
