"""Drawn sequences of calls over a group of either backend: equal results. Arguments: seed, how many."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import random
import sys
from datetime import timedelta

from programs.torch.backend.common import dist, torch

from zbmd.collectives.communicator.communicator import Communicator

SEED, SEQUENCES = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("zbmd", timeout=timedelta(minutes=2))
me, n = dist.get_rank(), dist.get_world_size()
subsets = [ranks for count in range(1, n + 1) for ranks in itertools.combinations(range(n), count)]
draw = random.Random(SEED)  # the same on all ranks
GROUPS = []
for ranks in [tuple(range(n)), *draw.sample(subsets, min(5, len(subsets)))]:
    pair = [dist.new_group(ranks, backend=backend) for backend in ("gloo", "zbmd")]
    GROUPS.append((ranks, pair))
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16)
begin, BEGUN = Communicator.begin, []


def counted(*given):
    BEGUN.append(begin(*given))
    return BEGUN[-1]


Communicator.begin = counted
OPS = ("SUM", "MAX", "MIN", "PRODUCT")


def values(seed, shape, dtype, strided=False, high=3):
    # Small integers, the same for both backends; a view with gaps now and then.
    drawn = torch.Generator().manual_seed(seed * n + me)
    whole = torch.randint(0, high, shape, generator=drawn).to(dtype)
    if not strided or not shape:
        return whole
    gaps = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    gaps.copy_(whole)
    return gaps


class Sequence:
    # Calls over one group of one backend. `outputs` are compared at the end, `names` say what they are of.
    def __init__(self, seed, ranks, group, gaps):
        self.gaps = gaps
        self.draw, self.ranks, self.group = random.Random(seed), ranks, group
        self.seed, self.size, self.place = seed * 1000, len(ranks), ranks.index(me)
        self.outputs, self.names, self.works = [], [], []

    def new(self, *shape, dtype, empty=False):
        self.seed += 1
        made = values(self.seed, shape, dtype, self.strided and self.gaps)
        return made.zero_() if empty else made

    def keep(self, name, *tensors):
        self.names += [name] * len(tensors)
        self.outputs += tensors

    def run(self):
        for _ in range(self.draw.randrange(4, 13)):
            name = self.draw.choice(CALLS)
            self.strided, self.later = self.draw.random() < 0.2, self.draw.random() < 0.5
            self.dtype = self.draw.choice(DTYPES)
            self.count = self.draw.choice((0, 1, 3, 17, 1000, 40_000))
            self.root = self.draw.choice(self.ranks)
            self.op = getattr(dist.ReduceOp, self.draw.choice(OPS))
            wait_first, pick = self.draw.random() < 0.3, self.draw.random()
            if wait_first and self.works:
                self.works.pop(int(pick * len(self.works))).wait()
            getattr(self, name)()
        for work in self.works:
            work.wait()
        return [tensor.clone() for tensor in self.outputs]

    def call(self, function, *args, **kwargs):
        work = function(*args, group=self.group, async_op=self.later, **kwargs)
        if self.later:
            self.works.append(work)

    def all_reduce(self):
        x = self.new(self.count, dtype=self.dtype)
        self.call(dist.all_reduce, x, self.op)
        self.keep("all_reduce", x)

    def broadcast(self):
        x = self.new(self.count, dtype=self.dtype)
        self.call(dist.broadcast, x, self.root)
        self.keep("broadcast", x)

    def reduce(self):
        x = self.new(self.count, dtype=self.dtype)
        self.call(dist.reduce, x, self.root, self.op)
        if me == self.root:  # gloo leaves anything elsewhere
            self.keep("reduce", x)

    def all_gather(self):
        outs = [self.new(self.count, dtype=self.dtype, empty=True) for _ in self.ranks]
        self.call(dist.all_gather, outs, self.new(self.count, dtype=self.dtype))
        self.keep("all_gather", *outs)

    def all_gather_into_tensor(self):
        self.strided = False
        out = self.new(self.size * self.count, dtype=self.dtype, empty=True)
        self.call(dist.all_gather_into_tensor, out, self.new(self.count, dtype=self.dtype))
        self.keep("all_gather_into_tensor", out)

    def gather(self):
        outs = [self.new(self.count, dtype=self.dtype, empty=True) for _ in self.ranks]
        x = self.new(self.count, dtype=self.dtype)
        self.call(dist.gather, x, outs if me == self.root else None, self.root)
        self.keep("gather", *outs)

    def scatter(self):
        xs = [self.new(self.count, dtype=self.dtype) for _ in self.ranks]
        out = self.new(self.count, dtype=self.dtype, empty=True)
        self.call(dist.scatter, out, xs if me == self.root else None, self.root)
        self.keep("scatter", out)

    def reduce_scatter_tensor(self):
        self.strided = False
        out = self.new(self.count, dtype=self.dtype, empty=True)
        x = self.new(self.size * self.count, dtype=self.dtype)
        self.call(dist.reduce_scatter_tensor, out, x, self.op)
        self.keep("reduce_scatter_tensor", out)

    def all_to_all_single(self):
        self.strided = False
        if self.draw.random() < 0.5:
            x = self.new(self.size * self.count, 2, dtype=self.dtype)
            out, splits = self.new(self.size * self.count, 2, dtype=self.dtype, empty=True), ()
        else:
            rows = [[self.draw.randrange(4) for _ in self.ranks] for _ in self.ranks]  # [from][to]
            sends, takes = rows[self.place], [each[self.place] for each in rows]
            x = self.new(sum(sends), 2, dtype=self.dtype)
            out, splits = self.new(sum(takes), 2, dtype=self.dtype, empty=True), (takes, sends)
        self.call(dist.all_to_all_single, out, x, *splits)
        self.keep("all_to_all_single", out)

    def ring(self):
        self.strided = False
        there, back = ((self.place + step) % self.size for step in (1, -1))
        if self.size == 1:
            return
        x, out = self.new(self.count, dtype=self.dtype), self.new(self.count, dtype=self.dtype, empty=True)
        works = [dist.isend(x, self.ranks[there], self.group, 7)]
        works.append(dist.irecv(out, self.ranks[back], self.group, 7))
        if self.later:
            self.works += works
        else:
            for work in works:
                work.wait()
        self.keep("ring", out)

    def barrier(self):
        self.call(dist.barrier)


CALLS = [name for name in vars(Sequence) if name not in ("__init__", "new", "keep", "run", "call")]
CALLS = [name for name in CALLS if not name.startswith("__")]
for number in range(SEQUENCES):
    ranks, groups = draw.choice(GROUPS)
    seed = draw.randrange(1 << 30)
    if me in ranks:
        both = [Sequence(seed, ranks, group, gaps) for group, gaps in zip(groups, (False, True), strict=True)]
        theirs, ours = (each.run() for each in both)
        for name, one, other in zip(both[0].names, theirs, ours, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), (
                f"sequence {number} of seed {SEED}, over {ranks}: {name} {one.dtype} {tuple(one.shape)}: "
                f"gloo {one[one != other][:8]}, zbmd {other[one != other][:8]} in {both[0].names}"
            )
dist.barrier()
assert n > 2 or any(BEGUN), "how many depends on the machine: a call that waits for another is queued"
print("good", flush=True)
KEPT = GROUPS  # the end of a gloo group may wait for a thread that waits for the GIL
dist.destroy_process_group()
