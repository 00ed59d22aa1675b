"""Drawn calls and drawn mistakes: each rank learns who called what. Arguments: seed, number of cases."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import sys
from datetime import timedelta

from programs.torch.backend.common import dist, torch

dist.init_process_group("zbmd", timeout=timedelta(minutes=10))  # longer than the test may take
me, n = dist.get_rank(), dist.get_world_size()

KINDS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter_tensor"),
    *("all_to_all_single", "all_reduce_coalesced", "barrier"),
)
SIZES = (1, 4, 300, 30_000)
DTYPES = (torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float8_e5m2)
FIELDS = ("kind", "size", "dtype", "op", "root", "is_async")


def draw(rng, ranks):
    return {
        "kind": rng.choice(KINDS),
        "size": rng.choice(SIZES),
        "dtype": rng.choice(DTYPES),
        "op": rng.choice(("SUM", "MAX", "MIN")),
        "root": rng.randrange(len(ranks)),
        "is_async": rng.random() < 0.5,
    }


def tensor_text(call, size):
    return f"{str(call['dtype'])[6:]}[{size}]"


def text(call, count):
    # The call as PyTorch's users know it.
    one, all_of_them = tensor_text(call, call["size"]), tensor_text(call, call["size"] * count)
    kind, root, op = call["kind"], call["root"], call["op"]
    arguments = {
        "all_reduce": f"{one}, {op}",
        "all_reduce_coalesced": f"[{one}, {tensor_text(call, 3)}], {op}",
        "broadcast": f"{one}, src={root}",
        "reduce": f"{one}, dst={root}, {op}",
        "all_gather": one,
        "gather": f"{one}, dst={root}",
        "scatter": f"{one}, src={root}",
        "reduce_scatter_tensor": f"{all_of_them}, {op}",
        "all_to_all_single": all_of_them,
        "barrier": "",
    }[kind]
    return f"{kind.removesuffix('_coalesced')}({arguments})"


def make(call, group, count, place):
    kind, root, op = call["kind"], call["root"], getattr(dist.ReduceOp, call["op"])
    x = torch.ones(call["size"]).to(call["dtype"])
    whole, at_root = torch.cat([x] * count), place == root
    more = {"group": group, "async_op": call["is_async"]}
    match kind:
        case "all_reduce":
            work = dist.all_reduce(x, op, **more)
        case "all_reduce_coalesced":
            work = dist.all_reduce_coalesced([x, torch.ones(3).to(x.dtype)], op, **more)
        case "broadcast":
            work = dist.broadcast(x, group_src=root, **more)
        case "reduce":
            work = dist.reduce(x, group_dst=root, op=op, **more)
        case "all_gather":
            work = dist.all_gather([torch.empty_like(x) for _ in range(count)], x, **more)
        case "gather":
            outputs = [torch.empty_like(x) for _ in range(count)] if at_root else None
            work = dist.gather(x, outputs, group_dst=root, **more)
        case "scatter":
            inputs = [x.clone() for _ in range(count)] if at_root else None
            work = dist.scatter(x, inputs, group_src=root, **more)
        case "reduce_scatter_tensor":
            work = dist.reduce_scatter_tensor(x, whole, op, **more)
        case "all_to_all_single":
            work = dist.all_to_all_single(torch.empty_like(whole), whole, **more)
        case "barrier":
            work = dist.barrier(**more)
    if call["is_async"]:
        work.wait()


def named(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def raised(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def calls_differ(rng, case):
    ranks = sorted(rng.sample(range(n), rng.choice((2, n))))
    group, count = dist.new_group(ranks), len(ranks)
    right = draw(rng, ranks)
    wrong = dict(right)
    while text(wrong, count) == text(right, count):
        field = rng.choice(FIELDS)
        wrong[field] = draw(rng, ranks)[field]
    mistaken = rng.sample(range(count), rng.randint(1, count - 1))
    before = rng.randrange(3)
    if me in ranks:
        place = ranks.index(me)
        for _ in range(before):
            make(right, group, count, place)
        mine = wrong if place in mistaken else right
        # Over TCP a rank whose part is over learns it in its next call.
        message = raised(lambda: (make(mine, group, count, place), dist.barrier(group)))
        others = [place for place in range(count) if place not in mistaken]
        for expected in (
            f"Desynchronised: call #{before + 1} of ",
            f"{text(right, count)} on {named(others)}",
            f"{text(wrong, count)} on {named(sorted(mistaken))}",
            "every rank of a group must make the same calls in the same order",
        ):
            assert expected in message, (case, expected, message)
        assert (f"the job's {ranks}" in message) == (ranks != [*range(count)]), (case, message)
        again = raised(lambda: dist.barrier(group))
        assert text(wrong, count) in again, (case, again)
        dist.destroy_process_group(group)


def messages_differ(rng, case):
    source, target = rng.sample(range(n), 2)
    group = dist.new_group()
    sent, taken = draw(rng, [0]), draw(rng, [0])
    taken["size"] = sent["size"]
    if rng.random() < 0.5 or taken["dtype"] == sent["dtype"]:
        taken = {**sent, "size": sent["size"] + 1}
    x, out = (torch.ones(each["size"]).to(each["dtype"]) for each in (sent, taken))
    expected = (
        f"send({tensor_text(sent, sent['size'])}, dst={target}, tag=7) on rank {source}",
        f"recv({tensor_text(taken, taken['size'])}, src={source}, tag=7) on rank {target}",
        "Desynchronised",
    )
    if me == source:
        message = raised(lambda: (dist.send(x, target, group, tag=7), dist.barrier(group)))
    elif me == target:
        message = raised(lambda: dist.recv(out, source, group, tag=7))
    else:
        message = raised(lambda: dist.barrier(group))
    for each in expected:
        assert each in message, (case, each, message)
    dist.destroy_process_group(group)


for case in range(int(sys.argv[2])):
    rng = random.Random(f"{sys.argv[1]} {case}")
    (messages_differ if rng.random() < 0.2 else calls_differ)(rng, case)
    dist.barrier()
print("good")
dist.destroy_process_group()
