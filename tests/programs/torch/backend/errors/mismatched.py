"""Two ranks whose calls differ: the error of both has both calls."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import begin, dist, fails, functional, torch

me, n = begin(timeout=timedelta(minutes=5))


op = (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(2.0))[me]
narrow = (torch.float16, torch.bfloat16)[me]
narrower = (torch.float32, torch.float8_e5m2)[me]
as_bytes = (torch.float8_e4m3fn, torch.float8_e5m2)[me]
a, b = torch.full((4,), 1.5), torch.tensor([3, 4])  # 16 bytes each
mine = (a, b)[me]


def again():
    dist.destroy_process_group()
    dist.init_process_group("zbmd", timeout=timedelta(minutes=5))


def gather():
    dist.gather(mine, [torch.empty_like(a)] * 2 if me == 0 else None)


def all_gather():
    dist.all_gather([torch.empty(3, 4 - 3 * me)] * 2, torch.ones(3, 4 - 3 * me))


def in_another_order():
    dist.broadcast(a, 0) if me else dist.reduce(a, 0)


def splits():
    # The second rank takes less than the first sends.
    out, given, mine = torch.empty(4), torch.ones(4), [[1, 3], [2, 2]][me]
    dist.all_to_all_single(out, given, mine, mine)


def together():
    dist.all_reduce_coalesced([a, a[:2].clone()][:: 1 - 2 * me])


def gathered_together():
    for out in functional.all_gather_into_tensor_coalesced([torch.ones(1)] * (2 - me), dist.group.WORLD):
        functional.wait_tensor(out)


def all_to_all():
    dist.all_to_all([torch.empty_like(mine)] * 2, [mine] * 2)


for call, there, here in (
    (lambda: dist.broadcast(mine, 0), "broadcast(float32[4], src=0)", "broadcast(int64[2], src=0)"),
    (all_gather, "all_gather(float32[3, 4])", "all_gather(float32[3, 1])"),
    (in_another_order, "reduce(float32[4], dst=0, SUM)", "broadcast(float32[4], src=0)"),
    (lambda: dist.all_reduce(a.to(narrow)), "(float16[4], SUM)", "(bfloat16[4], SUM)"),
    (lambda: dist.all_reduce(a.to(narrower)), "(float32[4], SUM)", "(float8_e5m2[4], SUM)"),
    (lambda: dist.broadcast(a.to(as_bytes), 0), "(float8_e4m3fn[4], src=0)", "(float8_e5m2[4], src=0)"),
    (lambda: dist.all_reduce(a, op), "(float32[4], SUM)", "(float32[4], PREMUL_SUM)"),
    (lambda: dist.all_gather_into_tensor(torch.cat([mine] * 2), mine), "(float32[4])", "(int64[2])"),
    (gather, "gather(float32[4], dst=0)", "gather(int64[2], dst=0)"),
    (lambda: dist.scatter(mine, None if me else [a, a]), "scatter(float32[4], src=0)", "(int64[2], src=0)"),
    (lambda: dist.all_to_all_single(torch.empty_like(mine), mine), "(float32[4])", "(int64[2])"),
    (all_to_all, "all_to_all([float32[4], float32[4]])", "all_to_all([int64[2], int64[2]])"),
    (lambda: dist.all_reduce(torch.ones(2 + me, 3)), "(float32[2, 3], SUM)", "(float32[3, 3], SUM)"),
    (splits, "split_sizes=[1, 3])", "split_sizes=[2, 2])"),
    (together, "all_reduce([float32[4], float32[2]], SUM)", "all_reduce([float32[2], float32[4]], SUM)"),
    (gathered_together, "_tensor([float32[1], float32[1]])", "all_gather_into_tensor(float32[1])"),
):
    texts = f"{there} on rank 0", f"{here} on rank 1"
    fails(lambda call=call: (call(), dist.barrier()), "Desynchronised: call #1 of default_pg", *texts)
    fails(dist.barrier, there, here)
    again()
for sent, taken in (
    (a, torch.ones(2)),
    (a, b),
    (a.bool(), torch.ones(4, dtype=torch.int8)),
    (a.to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8)),
    (torch.ones(1 << 20), torch.ones(1 << 19)),
    (torch.ones(1 << 20), torch.ones(1 << 20, dtype=torch.int32)),
):
    sends, receives = (f"{str(x.dtype)[6:]}[{x.numel()}], " for x in (sent, taken))
    texts = f"send({sends}dst=1, tag=0) on rank 0", f"recv({receives}src=0, tag=0) on rank 1"
    if me:
        fails(lambda taken=taken: dist.recv(taken, 0), "Desynchronised", *texts)
    elif sent.numel() > 4:  # it waits for its receiver
        fails(lambda sent=sent: dist.send(sent, 1), "Desynchronised", *texts)
    else:
        dist.send(sent, 1)
        fails(dist.barrier, "Desynchronised", *texts)
    fails(dist.barrier, *texts)
    again()
dist.all_reduce(a)
dist.barrier()
print("good")
