"""The shards of a resilient loop over FSDP2: this rank's own, and the copy that it keeps of its ward's.

See `transaction` for the protocol. Before a vote each rank sends its gradients to its buddy, the next rank,
which holds them until it has made the ward's update on its copy; or, if no other rank can make that update,
what it has become by it (`mirror`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import structlog

from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.tensors import Array
from zbmd.training.torch.encoding import from_blob, to_blob
from zbmd.training.torch.fsdp.division import (
    Division,
    Held,
    Holder,
    What,
    buddy_of,
    ward_of,
)
from zbmd.training.torch.fsdp.letters import Layout, LeftLetters, Letter, place
from zbmd.training.torch.fsdp.mirror import Mirror, MirroredShard
from zbmd.training.torch.fsdp.modules import ShardedModules, local_of
from zbmd.training.torch.fsdp.redivision import Redivision
from zbmd.training.torch.fsdp.replica import (
    Replica,
    Settings,
    Shard,
    digests_of,
    settings_of,
    why_mirrored,
    writes_gradients,
)
from zbmd.training.torch.transfer import receive_tree, send_tree
from zbmd.transport.errors import LocalProtocolError, UserError

torch: Any = importlib.import_module("torch")

log: Final = structlog.stdlib.get_logger("zbmd.torch")


_DIVIDED: Final = ("names", "parameters", "moments")
"""Of what `Shard.state` returns; the rest, of a mirrored shard, is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class _Received:
    """This rank's part of the next division, and its ward's: as `Shard.state` returns them."""

    division: Division
    own: Any
    ward: Any


class Shards:
    """The part of one rank of `size`. Raises `UserError` for what cannot be kept.

    mirror: whether updates are mirrored, even if a buddy could repeat them.
    """

    def __init__(
        self, models: Sequence[Any], optimizers: Sequence[Any], rank: int, size: int, *, mirror: bool
    ) -> None:
        self.modules = ShardedModules(models)
        self._rank, self._size = rank, size
        why = "mirror=True" if mirror else why_mirrored(optimizers)
        self._own: Shard
        self.mirror: Mirror | None = None
        """Of a state that is updated before the vote; None: a buddy repeats updates."""
        if why:
            self._own = mirrored = MirroredShard(models, optimizers)
            self.mirror = Mirror(mirrored)
            mirrored.state()  # raises for what cannot be kept
            log.info("updates are sent to a buddy, and voted on once they are made", why=why)
        else:
            self._own = Shard(models, optimizers)
        self._placed = place(self.modules.groups) if self.mirror is None and size > 1 else []
        self._out = self._new_letter()
        self._in: Letter | None = None
        self._replica: Replica | None = None
        self._replayed: Future[None] | None = None
        """The ward's update under way: on a thread, beside the next forward and backward pass."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-ward")
        self._holds = False
        self._left: LeftLetters | None = None
        self._leaves = self._lends = self._has_left = False
        """leaves: the gradients of the last step were left; lends: they can be made where they are left."""
        self.divides_for = ""
        """The option that asks for a state which any number of ranks can divide; "": there is none."""
        self._received: _Received | None = None
        self._adopted: _Received | None = None
        """A division that counts, and that is not one of the ranks that there are now."""

    # Memory that outlives this rank, in which its buddy has no part.

    @property
    def left_bytes(self) -> int:
        """The bytes of the memory in which gradients can be left; 0: a buddy has to have copies."""
        if self.mirror is not None or self._size == 1 or self.distinct or self.divides_for:
            return 0
        return LeftLetters.nbytes_of(self._out.layout)

    def leave_in(self, memory: Array, identity: bytes) -> LeftLetters:
        """Leave gradients in this memory, if that is asked for; it may have those of the rank before."""
        updated = [local_of(each) for each in self._own.updated]
        self._left = LeftLetters(memory, updated, self._out.layout, identity)
        self._lends = not writes_gradients(*self._own.optimizers)
        return self._left

    def open(self, step: int, *, leaves: bool) -> None:
        """The gradients of a step are made from now on. leaves: they are to be left in memory."""
        letter: Letter | None = self._out
        if leaves and self._left is not None:
            letter = self._left.open(step % 2)
            letter = letter if self._lends and self._has_left else None
        for each in self._placed:
            each.letter = letter

    def leave(self, step: int, version: int) -> None:
        """Leave the gradients of an update in memory, before the vote for `version`."""
        assert self._left is not None, "there is memory in which gradients are to be left"
        self._settle_copy()
        self._replica = self._in = self._received = None
        parity, settings = step % 2, settings_of(*self._own.optimizers)
        self._left.letters[parity].fill([self._gradient(each) for each in self._own.updated])
        told = [settings.groups, settings.scaled, settings.flushes]
        self._left.close(parity, version, to_blob(told, "hyperparameters"))
        # A fused update unscales gradients in their place, and what the first step leaves shows how many.
        self._lends = self._lends and not settings.scaled
        self._holds = self._leaves = self._has_left = True

    def recall_left(self, state: Any, version: int | None) -> None:
        """Have the shard that the rank before has left. version: that its update is still to lead to."""
        self._own.load(state)
        if version is None:
            return
        assert self._left is not None, "gradients were left"
        parity = next(each for each in range(2) if self._left.version_in(each) == version)
        settings = Settings(*from_blob(self._left.settings_in(parity), "hyperparameters that were left"))
        replica = Replica(self._own, self._own.state())  # over the same memory
        replica.replay(self._left.letters[parity].read(), settings)
        self._own.load(replica.state())

    def deliver(self, group: Group, end_ns: int) -> None:
        """Send gradients, or what was updated, to the buddy, and receive the ward's.

        Raises as operations of `group` do.
        """
        self._settle_copy()  # whose gradients are where the next ones come
        self._holds, self._leaves, self._received = False, False, None
        self._require_divisible()
        if self._size == 1:
            return
        if self.mirror is not None:
            self.mirror.deliver(group, end_ns, self._rank, self._size)
            return
        if self._in is None:
            raise LocalProtocolError("gradients are delivered before there is a copy of the ward's shard")
        self._out.fill([self._gradient(each) for each in self._own.updated])
        sends, receives = [0] * self._size, [0] * self._size
        sends[buddy_of(self._rank, self._size)] = self._out.data.size
        receives[ward_of(self._rank, self._size)] = self._in.data.size
        outbox, inbox = self._out.data, self._in.data
        group.submit(lambda c: c.all_to_all_v(outbox, sends, receives, inbox, deadline_ns=end_ns)).result()
        self._holds = True

    def _require_divisible(self) -> None:
        """Raise `UserError` for an optimizer's state that cannot be divided again, if that is asked for."""
        if self.divides_for and isinstance(self._own, MirroredShard) and (what := self._own.undivided):
            raise UserError(
                f"{self.divides_for} divides what optimizers keep of a parameter by its rows, and an "
                f"optimizer's {what} has others: the part of a lost rank could not be divided; keep states "
                "of the shape of the parameter's shard, DTensors that are whole on each rank, and numbers"
            )

    def _gradient(self, parameter: Any) -> Any:
        if parameter.grad is None:
            return None
        gradient, own = local_of(parameter.grad), local_of(parameter)
        if gradient.layout is not torch.strided or (gradient.dtype, gradient.shape) != (own.dtype, own.shape):
            name = self._own.names[
                next(i for i, each in enumerate(self._own.parameters) if each is parameter)
            ]
            raise UserError(
                f"the gradient of {name} is {gradient.dtype}{[*gradient.shape]}, not as its parameter: its "
                "update cannot be repeated by a buddy"
            )
        return gradient.detach()

    def replay(self) -> None:
        """Begin to make the ward's update. Raises `UserError` for a second update in one step."""
        if self._size == 1:
            return
        if self._leaves and self._holds:
            self._holds = False
            for each in self._placed:  # until the next step begins, what was left must not be written
                each.letter = None
            return
        if not self._holds or self._in is None or self._replica is None:
            raise UserError("a second optimizer.step() in one run.step(): one step over FSDP2 has one update")
        self._holds = False
        replica, gradients, settings = self._replica, self._in.read(), self._replica.settings()
        self._replayed = self._pool.submit(replica.replay, gradients, settings)

    def _settle_copy(self) -> Replica | None:
        """Return the copy of the ward's shard, if there is one, once its last update is made."""
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.result()
        return self._replica

    def close(self) -> None:
        """Make no more updates of the ward. Idempotent."""
        self._pool.shutdown()

    @property
    def distinct(self) -> int:
        """The number of shards after which they repeat, in a hybrid mesh; 0: ranks may have others."""
        return 0 if self.mirror is not None else self.modules.distinct(self._own.parameters)

    def follow_ranks(self, why: str) -> list[Any]:
        """Have the loop go on with whole replicas of a hybrid mesh; return its process groups.

        Raises `UserError` if the ranks of a column of the mesh may have other states. why: see `Shares`.
        """
        replica = self.modules.distinct(self._own.parameters)
        if replica and self.mirror is not None:
            raise UserError(
                f"{why} takes optimizers that communicate in step() over meshes of one dimension: in a "
                "hybrid mesh each replica may keep another state of them"
            )
        CONTINUITY.replica = replica
        return self.modules.follow(replica) if replica else []

    def commit(self) -> None:
        """The transaction under way is committed."""
        if self.mirror is not None:
            self.mirror.commit()

    def go_back(self) -> None:
        """Be where the transaction under way began."""
        self.modules.reset()
        if self.mirror is not None:
            self.mirror.go_back()

    def require_savable(self) -> None:
        """Raise `UserError` for what checkpoints have no place for."""
        if isinstance(self._own, MirroredShard) and (more := self._own.has_more):
            raise UserError(
                f"an optimizer's {more} is each rank's own, and not a moment that is sharded as its "
                "parameter: checkpoints of resilient loops do not have that; save it by run.every()"
            )

    def state(self) -> Any:
        """Return this rank's shard, as `recall` takes it."""
        return self._own.state()

    def ward_state(self) -> Any:
        """Return the copy of the ward's shard, as `recall` takes it; None: there is none of this version."""
        replica = self._settle_copy()
        return None if replica is None or self._holds else replica.state()

    def recall(self, held: Held, state: Any, ward: Any) -> None:
        """Have a part that memory has held, which may be of another number of ranks.

        ward: the copy of the ward's; None: it has held none.
        """
        if (held.place, held.size) == (self._rank, self._size):
            self._own.load(state)
            if ward is not None:
                self._keep_copy(ward)
        else:  # it is divided again, with the others', in the next meeting
            self._adopted = _Received(Division(number=0, size=held.size, place=held.place), state, ward)

    def digests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the digests of this rank's shard, and of the copy that it keeps, by parameter."""
        if self.mirror is not None:
            return self.mirror.digests()
        replica = self._settle_copy()
        kept = () if replica is None else digests_of(self._own, replica.state())
        return digests_of(self._own, self._own.state()), kept

    def name_of(self, parameter: int) -> str:
        """Return the name of a parameter, by its number in `digests`."""
        return self._own.names[parameter]

    def send(self, group: Group, what: What, to: int) -> None:
        """Send a shard, or a copy of one. Raises as `Group.send` does."""
        holder = self._own if what is not What.SHARD else self._settle_copy() or self.mirror
        assert holder is not None, "a rank without a copy is to give it"
        send_tree(group, to, holder.state(), "the shard of a rank")

    def receive(self, group: Group, what: What, source: int) -> None:
        """Receive this rank's shard, or the copy that it is to keep. Raises as `Group.recv` does."""
        # A fresh rank's parameters count for nothing: they are received where they are computed with.
        into = [local_of(each).detach() for each in self._own.parameters] if what is not What.COPY else []
        state = receive_tree(group, source, into=into)
        if what is not What.COPY:
            self._own.load(state)
            if self.mirror is not None:
                self.mirror.slots.replace()
            return
        self._keep_copy(state)

    def _keep_copy(self, state: Any) -> None:
        if self.mirror is not None:
            self.mirror.slots.keep(state)
            return
        self._settle_copy()
        self._replica = Replica(self._own, state)
        self._in = Letter([each.detach() for each in self._replica.updated], self._out.layout)

    def _new_letter(self) -> Letter:
        """Return one for this rank's gradients, which are reduced there from now on."""
        updated = [] if self.mirror is not None else self._own.updated
        letter = Letter([local_of(each) for each in updated], Layout(updated, self.modules.groups))
        for each in self._placed:
            each.letter = letter
        return letter

    # Another division.

    def contents(self) -> Any:
        """Return what is not divided of each updated parameter, the dtypes of its moments, and the rest."""
        state = self._own.state() if self._adopted is None else self._adopted.own
        found, places = [], [at for group in self._own.places for at in group]
        kinds = state.get("kinds") or [{} for _ in places]
        for at, moments, kind in zip(places, state["moments"], kinds, strict=True):
            shape = state["parameters"][at].shape
            arrays = {
                name: value.dtype
                for name, value in moments.items()
                if isinstance(value, torch.Tensor)
                and value.dim() > 0
                and value.shape == shape
                and kind.get(name, [""])[0] != "dtensor"  # whole on each rank, whatever its shape
            }
            found.append([arrays, {name: value for name, value in moments.items() if name not in arrays}])
        return [found, {name: value for name, value in state.items() if name not in _DIVIDED}]

    def divide(
        self, group: Group, end_ns: int, division: Division, holders: Sequence[Holder], contents: Any
    ) -> None:
        """Receive this rank's part of the next division, and its ward's, and keep the old ones beside them.

        holders: of the parts of the old division. contents: as `contents` of a rank with a part returns it.
        Raises as operations of `group` do.
        """
        kinds, more = contents
        updated = [at for places in self._own.places for at in places]
        held = self._held(holders, group.rank)
        windows: list[Any] = [[], []]
        moments: list[list[Any]] = [[{} for _ in updated], [{} for _ in updated]]
        for at, parameter in enumerate(self._own.parameters):
            number = updated.index(at) if at in updated else None
            dtypes, others = ({}, {}) if number is None else kinds[number]
            arrays = {
                part: [state["parameters"][at], *(state["moments"][number][name] for name in dtypes)]
                for part, state in held.items()
            }
            exchange = Redivision(parameter.shape, division, holders)
            parts = exchange.run(group, end_ns, arrays, [parameter.dtype, *dtypes.values()])
            for window, (first, *rest) in enumerate(parts):
                windows[window].append(first)
                if number is not None:
                    own = {name: copy.deepcopy(value) for name, value in others.items()}
                    moments[window][number] = {**dict(zip(dtypes, rest, strict=True)), **own}
        own, ward = (
            {
                "names": self._own.names,
                "parameters": windows[of],
                "moments": moments[of],
                **copy.deepcopy(more),
            }
            for of in (0, 1)
        )
        self._received = None if division.is_left_over else _Received(division, own, ward)

    def _held(self, holders: Sequence[Holder], rank: int) -> dict[int, Any]:
        """Return the parts of the old division that others are to have from this rank."""
        parts = {part: holder for part, holder in enumerate(holders) if holder.rank == rank}
        own, kept = None, None
        if self._adopted is not None:
            own, kept = self._adopted.own, self._adopted.ward
        elif parts:
            own = self._own.state()
            kept = self._kept_copy()
        return {part: kept if holder.copy else own for part, holder in parts.items()}

    def _kept_copy(self) -> Any:
        if self.mirror is not None:
            return self.mirror.state()
        replica = self._settle_copy()
        return None if replica is None else replica.state()

    def adopt(self, division: Division) -> None:
        """Have what was received for this division count."""
        received, self._received = self._received, None
        if received is None or received.division != division:
            raise LocalProtocolError(f"{division} is to be adopted, and has not been received")
        self._adopted = received

    def settle(self, rank: int, ranks: int) -> None:
        """Have the models be divided as was adopted, if that is for this rank of as many."""
        received = self._adopted
        if received is None or (received.division.place, received.division.size) != (rank, ranks):
            return
        self._be_at(rank, ranks)
        self._own.load(received.own)
        if self.mirror is not None:
            self.mirror.divided(received.ward if ranks > 1 else None)
            return
        self._out = self._new_letter()
        if self._size > 1 and received.ward is not None:
            self._keep_copy(received.ward)

    def come_back(self, rank: int, ranks: int) -> None:
        """Have room for another part, which is to come from others: this rank has had none for a while."""
        self._be_at(rank, ranks)
        self._out = self._new_letter()

    def _be_at(self, rank: int, ranks: int) -> None:
        self._adopted, self._rank, self._size = None, rank, ranks
        self._settle_copy()
        self._replica = self._in = None
        self.modules.divide()
