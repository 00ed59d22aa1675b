"""All that a resilient loop goes on from on this rank, but for the machine of its transactions.

A step that is repeated goes on from it (`go_back`), a replacement from that of a survivor (`give`, `take`),
and a new run from that in a checkpoint (`saved`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.training.torch import batches as loading
from zbmd.training.torch import votes
from zbmd.training.torch.ddp import KeptBuckets, ReplicatedShares
from zbmd.training.torch.durable.devices import LoopDevice
from zbmd.training.torch.fsdp.gradients import ShardedShares
from zbmd.training.torch.fsdp.mirror import require_captured
from zbmd.training.torch.fsdp.modules import has_shards, local_of
from zbmd.training.torch.fsdp.shards import Shards
from zbmd.training.torch.rollback import Boundary
from zbmd.training.torch.shares import Shares
from zbmd.training.torch.transfer import Carried, Position, give, own_tensors, take
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")


class LoopState:
    """The state of a loop over `models`, `optimizers`, and `others` with a `state_dict`, on one of `ranks`.

    seed: of all random numbers in steps. mirror: see `Shards`.
    Raises `UserError` for what cannot be continued.
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        others: Sequence[Any],
        *,
        rank: int,
        ranks: int,
        seed: int,
        mirror: bool = False,
    ) -> None:
        for each in optimizers:
            if type(each).__name__ == "ZeroRedundancyOptimizer":
                raise UserError(
                    "ZeroRedundancyOptimizer keeps a part of the moments on each rank, of which no other "
                    "has a copy: shard the model by fully_shard, whose shards a buddy keeps as well"
                )
        self.device = device_of(models, optimizers)
        """Of what is not in host memory; None: all is."""
        if self.device is not None and (mirror or has_shards(models)):
            raise UserError(
                "a model on a GPU that is sharded by fully_shard, or trained with mirror=True, is not "
                "continued: its buddies would keep copies on their devices, which is not built; wrap it in "
                "DistributedDataParallel, or leave the model on the CPU"
            )
        self.models, self.optimizers = models, optimizers
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.boundary = Boundary(models, optimizers, others)
        self.shards: Shards | None = None
        if mirror or has_shards(models):
            self.shards = Shards(models, optimizers, rank, ranks, mirror=mirror)
        else:
            for each in optimizers:
                require_captured(each)
        self.buckets = KeptBuckets([*models], optimizers)
        self.position = Position()
        self.rows: tuple[bytes, ...] = ()
        """The votes of the last commit."""
        self.loader: Any = None
        """That of the pass under way, if it has a state."""
        self.loader_state: Any = None
        self.has_stepped = self.rehearses = False
        self._voted_state: Any = None
        """Of the loader, behind the batch of the step under way."""

    # A transaction.

    def keep(self) -> None:
        """Keep what the transaction that begins may change."""
        self.boundary.keep()
        self.buckets.keep()
        if self.shards is not None:
            self.shards.modules.keep()

    def open(self, step: int, *, leaves: bool) -> None:
        """The gradients of a step are made from now on. leaves: see `Shards.open`."""
        if self.shards is not None:
            self.shards.open(step, leaves=leaves)

    def go_back(self, flags: Sequence[bool] = ()) -> None:
        """Be where the transaction under way began. flags: of survivors, see `KeptBuckets`."""
        self.boundary.go_back()
        self.buckets.reset(flags)
        if self.shards is not None:
            self.shards.go_back()
        # A model that has not made a whole step would make other calls than the others in its first one.
        self.rehearses = self.buckets.learn and not self.has_stepped

    def settle(self) -> None:
        """Before a vote: wait until the device has made the step. Raises what an operation failed with."""
        if self.device is not None:
            self.device.settle()

    def close(self) -> None:
        """Keep no copy of another rank's shard any more. Idempotent."""
        if self.shards is not None:
            self.shards.close()

    def find_changed(self, exact: bool | int) -> None:
        """Before a vote: note which buffers the step has changed. Raises `UserError` if none may be."""
        self.boundary.find_changed()
        if exact and self.boundary.changing:
            raise UserError(
                f"exact={exact}, and a step changes the buffer {self.boundary.changing[0]}: which share does "
                "so last depends on the number of ranks; use a norm without statistics"
            )

    def own(self) -> dict[str, Any]:
        """Return this rank's own part, for its vote: what no other rank has."""
        if self.loader is not None:
            self._voted_state = loading.state_of(self.loader)
        return {
            "buffers": {n: b for n, b in self.boundary.buffers() if n in self.boundary.changing},
            "loader": None if self.loader is None else self._voted_state,
            "others": [each.own_state() for each in self._with_own_state],
        }

    @property
    def _with_own_state(self) -> list[Any]:
        """Those of `others` that have a part which is this rank's own."""
        return [each for each in self.boundary.others if hasattr(each, "own_state")]

    def committed(self, then: Position) -> None:
        """Be behind the transaction under way, at `then`."""
        self.has_stepped = self.has_stepped or then.step > self.position.step
        self.position, self.loader_state = then, self._voted_state
        if self.shards is not None:
            self.shards.commit()

    def end_pass(self) -> None:
        """Forget the loader of a pass that has ended."""
        self.loader = self.loader_state = self._voted_state = None

    def digests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return those of the state that is compared with others', and of the copy of the ward's shard."""
        return (self.buckets.digests(), ()) if self.shards is None else self.shards.digests()

    def name_of(self, number: int) -> str:
        """Return the name of what is compared, by its number in `digests`."""
        return self.buckets.name_of(number) if self.shards is None else self.shards.name_of(number)

    # A replacement, and a run that goes on from a checkpoint.

    @property
    def tensors(self) -> list[tuple[str, Any]]:
        """The tensors of the models that no shard has, by name."""
        return own_tensors(self.models, parameters=self.shards is None)

    def carried(self, version: int) -> Carried:
        """Return the rest of the state. version: of the machine."""
        return Carried(
            version=version,
            seed=self.seed,
            position=self.position,
            rows=self.rows,
            flags=tuple(self.buckets.flags),
        )

    def give(self, group: Group, places: Sequence[int], version: int) -> None:
        """Send the state, but for shards, to these ranks. Raises as `Group.send` does."""
        moments, carried = self.shards is None, self.carried(version)
        for place in places:
            give(group, place, self.tensors, self.optimizers, self.boundary, carried, moments=moments)

    def take(self, group: Group, source: int) -> int:
        """Receive the state, but for shards; return its version. Raises as `Group.recv` does."""
        carried = take(group, source, self.tensors, self.optimizers, self.boundary)
        self.adopt(carried)
        return carried.version

    def adopt(self, carried: Carried) -> None:
        """Go on with the rest of a state, whose tensors and small states are loaded."""
        self.seed, self.position, self.rows = carried.seed, carried.position, carried.rows
        if len(carried.rows) == self.ranks:
            own = votes.own_of(carried.rows[self.rank])
            found = dict(self.boundary.buffers())
            with torch.inference_mode():
                for name, value in own["buffers"].items():
                    found[name].detach().copy_(value)
            self.loader_state = self._voted_state = own["loader"]
            for each, value in zip(self._with_own_state, own.get("others", ()), strict=False):
                each.load_own(value)
        self.keep()
        self.go_back(carried.flags)
        self.keep()


def device_of(models: Sequence[Any], optimizers: Sequence[Any]) -> LoopDevice | None:
    """Return the device of a loop's tensors; None if all are in host memory. Raises `UserError`."""
    updated = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    return LoopDevice.of(local_of(each) for each in [*(one for _, one in own_tensors(models)), *updated])


def shares_of(state: LoopState, shares: int, *, exact: bool | int, shrinks: bool) -> Shares:
    """Return the `shares` of a batch of a loop. exact: as of `resilient`.

    shrinks: whether it goes on with fewer ranks. Raises `UserError` for what cannot be divided so.
    """
    why = f"exact={exact}" if exact else "--on-loss shrink"
    is_sharded = has_shards(state.models)
    if is_sharded and state.shards is not None:
        made: Shares = ShardedShares(state.models, state.shards.modules, shares, why)
    else:
        made = ReplicatedShares(state.models, state.optimizers, shares, why)
    if not exact and not shrinks:
        return made
    if exact and is_sharded:
        raise UserError(
            f"{why} is for DistributedDataParallel: over FSDP2 the bits depend on the number of ranks"
        )
    if shrinks and not is_sharded and state.shards is not None:
        raise UserError(
            "--on-loss shrink takes mirror=True over FSDP2 alone: under DistributedDataParallel each rank "
            "may keep other states in its optimizers, and those of a lost rank belong to no other; run it "
            "with --on-loss replace"
        )
    made.check()
    follow: list[Any] = []
    if shrinks and state.shards is not None:
        state.shards.divides_for = why
        follow = state.shards.follow_ranks(why)
    if shrinks and any(each not in follow for each in CONTINUITY.groups[1:]):
        raise UserError(
            f"{why} takes the default process group, and those of a hybrid mesh: others would miss ranks"
        )
    return made
