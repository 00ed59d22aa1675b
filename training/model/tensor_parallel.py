"""A GPT that is divided over the ranks of a group: its parameters, and each rank's part of the passes.

Layers that read the residual stream are divided by columns (by heads for attention), those that write to it
by rows, token tables by the vocabulary. Norms, positions, and biases that are added to the residual stream
are whole on all ranks. M. Shoeybi and others, "Megatron-LM", 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.training import ops
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, is_on_host, maker_of
from zbmd.training.autograd.non_finite_probe import probe_received, probe_sent
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch, Operator, Tokens, parameter_shapes
from zbmd.transport.errors import UserError


class TensorCollectives(Protocol):
    """The collectives of units, for a thread that may wait; see `zbmd.Group`."""

    def all_gather(self, x: Any, /) -> Any:
        """Return all members' arrays, in rank order."""
        ...

    def reduce_scatter(self, x: Any, /) -> Any:
        """Return this member's part of the sum."""
        ...

    def all_reduce(self, x: Any, /, *, op: str = "sum") -> Any:
        """Reduce in place, and return the array."""
        ...


class TensorGroup(Protocol):
    """The group along `tp`."""

    @property
    def rank(self) -> int:
        """Return this member's place."""
        ...

    @property
    def size(self) -> int:
        """Return the number of members."""
        ...

    @property
    def blocking(self) -> TensorCollectives:
        """Return the collectives."""
        ...

    def deadline_ns(self) -> int:
        """Return when an operation that begins now is to be over."""
        ...

    def submit(self, operation: Callable[[Communicator], Any], /) -> Future[Any]:
        """Run `operation` on the group's thread."""
        ...


# By the end of a parameter's name: the axis that is cut, and how many matrices lie side by side along it.
_CUTS = {
    "embed.weight": (0, 1),
    "attn.qkv.weight": (1, 3),
    "attn.qkv.bias": (0, 3),
    "attn.proj.weight": (0, 1),
    "mlp.in.weight": (1, 1),
    "mlp.in.bias": (0, 1),
    "mlp.out.weight": (0, 1),
    "head.weight": (1, 1),
}


@dataclass(frozen=True, slots=True)
class TensorShards:
    """The slices of a model's parameters that `parts` ranks hold.

    Raises `UserError` if heads, positions or tokens cannot be divided over so many ranks.
    """

    config: GPTConfig
    parts: int

    def __post_init__(self) -> None:
        for what, count in (("heads", self.config.heads), ("positions", self.config.context)):
            if count % self.parts:
                raise UserError(
                    f"the model's {count} {what} cannot be divided over {self.parts} tensor-parallel ranks: "
                    f"choose a number of {what} that {self.parts} divides, or another tp in the mesh."
                )
        if self.config.vocabulary < self.parts:
            raise UserError(
                f"a vocabulary of {self.config.vocabulary} tokens cannot be divided over {self.parts} ranks."
            )

    @property
    def whole(self) -> ParameterLayout:
        """Return the layout of the whole model."""
        return ParameterLayout.of(parameter_shapes(self.config))

    def layout(self, part: int) -> ParameterLayout:
        """Return the layout of what rank `part` holds."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in parameter_shapes(self.config).items():
            axis, beside = cut_of(name)
            cut = list(shape)
            if beside:
                start, stop = span_of(shape[axis] // beside, part, self.parts)
                cut[axis] = beside * (stop - start)
            shapes[name] = tuple(cut)
        return ParameterLayout.of(shapes)

    def tokens(self, part: int) -> tuple[int, int]:
        """Return the range of tokens whose rows of the tables rank `part` holds."""
        return span_of(self.config.vocabulary, part, self.parts)

    def piece(self, slot: ParameterSlot, part: int) -> ParameterSlice:
        """Return the slice of the whole parameter `slot` that rank `part` holds."""
        axis, beside = cut_of(slot.name)
        if not beside:
            return flat_slice(slot.size, 0, slot.size)
        each = slot.shape[axis] // beside
        outer, inner = beside * prod(slot.shape[:axis]), prod(slot.shape[axis + 1 :])
        return ParameterSlice(outer, each, inner, *span_of(each, part, self.parts))

    def cut(self, flat: Array, part: int) -> Array:
        """Return what rank `part` holds of a whole flat array, (whole.size,): (layout(part).size,), a
        copy."""
        layout = self.layout(part)
        made: Array = np.zeros(layout.size, dtype=flat.dtype)
        for slot, view, whole in zip(layout.slots, layout.views(made), self.whole.views(flat), strict=True):
            view[...] = self._part_of(slot.name, whole, part).reshape(view.shape)
        return made

    def joined(self, flats: Sequence[Array]) -> Array:
        """Return the whole flat array, given what all ranks hold, in order; shared parameters are the first
        one's.
        """
        whole = self.whole
        made: Array = np.zeros(whole.size, dtype=flats[0].dtype)
        views = whole.views(made)
        for part in reversed(range(self.parts)):
            for slot, view, own in zip(whole.slots, views, self.layout(part).views(flats[part]), strict=True):
                target = self._part_of(slot.name, view, part)
                target[...] = own.reshape(target.shape)
        return made

    def _part_of(self, name: str, whole: Array, part: int) -> Array:
        """Return the view of a whole parameter that rank `part` holds, with an extra axis for adjacent
        matrices.
        """
        axis, beside = cut_of(name)
        if not beside:
            return whole
        each = whole.shape[axis] // beside
        apart = whole.reshape(*whole.shape[:axis], beside, each, *whole.shape[axis + 1 :])
        view: Array = apart[(slice(None),) * (axis + 1) + (slice(*span_of(each, part, self.parts)),)]
        return view


def cut_of(name: str) -> tuple[int, int]:
    """Return the axis along which parameter `name` is divided, and the adjacent matrices there; 0: it is
    whole.
    """
    found = (cut for ending, cut in _CUTS.items() if name == ending or name.endswith(f".{ending}"))
    return next(found, (0, 0))


def span_of(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range of `count` items that part `part` has. Ranges differ by one at most."""
    return part * count // parts, (part + 1) * count // parts


# ---- operators
#
# Between the layers each rank holds a run of rows (sequence parallelism: V. Korthikanti and others,
# "Reducing activation recomputation in large transformer models", 2022, arXiv:2205.05198). All ranks record
# the same ops in the same order, so their collectives match, forwards and backwards.


class SharedParameter(Parameter):
    """A parameter that all ranks hold, each of which computes its gradient from some of the rows."""

    __slots__ = ("_group",)

    def __init__(self, parameter: Parameter, group: TensorGroup) -> None:
        super().__init__(parameter.stored, parameter.grad, parameter.index, parameter.on_ready)
        self._group = group

    def receive(self, write: Callable[[Array], object], *, lasting: bool = False) -> None:
        """See `Parameter`; the gradient is summed over the group, with the same bits on all ranks."""

        def reduced(out: Array) -> None:
            write(out)
            probe_sent(out)
            with spans.COMM:
                self._group.blocking.all_reduce(out)
            probe_received(out)

        super().receive(reduced, lasting=lasting)


def gather_rows(tape: Tape, x: Tensor, group: TensorGroup) -> Tensor:
    """Return all ranks' rows, in rank order. x: (rows / ranks, features); result: (rows, features)."""

    def backward(dy: Array) -> None:
        x.accumulate(_reduced(dy, group))

    return tape.record(_gathered(x.data, group), backward)


def scatter_rows(tape: Tape, x: Tensor, group: TensorGroup) -> Tensor:
    """Return this rank's rows of the sum over all ranks. x: (rows, features); result: (rows / ranks,
    features).
    """

    def backward(dy: Array) -> None:
        x.accumulate(_gathered(dy, group))

    return tape.record(_reduced(x.data, group), backward)


def _gathered(rows: Array, group: TensorGroup) -> Array:
    probe_sent(rows)
    blocking: Any = group.blocking
    with spans.COMM:
        if is_on_host(rows):
            every: Array = blocking.all_gather(np.ascontiguousarray(rows))
        else:  # the result is to be a device's own array, too
            every = maker_of(rows)((group.size, *rows.shape), rows.dtype)
            blocking.all_gather(rows, out=every)
    probe_received(every)
    return every.reshape(-1, rows.shape[1])


def _reduced(rows: Array, group: TensorGroup) -> Array:
    probe_sent(rows)
    blocking: Any = group.blocking
    with spans.COMM:
        if is_on_host(rows):
            mine: Array = blocking.reduce_scatter(
                np.ascontiguousarray(rows).reshape(group.size, -1, rows.shape[1])
            )
        else:
            mine = maker_of(rows)((len(rows) // group.size, rows.shape[1]), rows.dtype)
            blocking.reduce_scatter(rows.reshape(group.size, *mine.shape), out=mine)
    probe_received(mine)
    return mine.reshape(-1, rows.shape[1])


def vocabulary_embedding(
    tape: Tape,
    tokens: Array,
    table: Parameter,
    own: tuple[int, int],
    group: TensorGroup,
    *,
    on_device: Any = None,
) -> Tensor:
    """Return this rank's rows of the result of `ops.embedding`, with a table divided by the vocabulary.

    tokens: (rows,), all of them, on all ranks; table: (own tokens, features), those in [own[0], own[1]). A
    row has one owner, so the sum over ranks adds zeros to it and has its bits. on_device: a device's ops.
    """
    if on_device is not None:
        return scatter_rows(tape, on_device.embedding_of_vocabulary(tape, tokens, table, own), group)
    first, stop = own
    mine = (tokens >= first) & (tokens < stop)
    places = np.where(mine, tokens.astype(np.int64) - first, 0)
    own_rows = ops.embedding(tape, places, table)
    return scatter_rows(tape, _kept(tape, own_rows, mine[:, None]), group)


def _kept(tape: Tape, x: Tensor, mask: Array) -> Tensor:
    """Return `x` where the mask is set, zero elsewhere."""
    return tape.record(x.data * mask, lambda dy: x.accumulate(dy * mask))


def vocabulary_cross_entropy(
    tape: Tape, logits: Tensor, targets: Array, own: tuple[int, int], group: TensorGroup, *, weight: float
) -> Tensor:
    """Return `ops.cross_entropy` of logits that are divided by the vocabulary; the same bits on all ranks.

    logits: (rows, own tokens), those in [own[0], own[1]); targets: (rows,) of the whole vocabulary. Ranks
    exchange three numbers a row, not the logits.
    """
    first, stop = own
    rows = np.flatnonzero((targets >= first) & (targets < stop))
    places = targets[rows].astype(np.int64) - first
    own_most = logits.data.max(axis=1)
    probe_sent(logits.data)
    with spans.COMM:
        most: Array = group.blocking.all_reduce(own_most, op="max")
    probe_received(most)
    odds = logits.data - most[:, None]
    sums: Array = np.zeros((2, len(targets)), dtype=odds.dtype)
    sums[1, rows] = odds[rows, places]
    np.exp(odds, out=odds)
    odds.sum(axis=1, out=sums[0])
    probe_sent(sums)
    with spans.COMM:
        group.blocking.all_reduce(sums)
    probe_received(sums)
    total, picked = sums
    loss = np.asarray((np.log(total) - picked).sum() * weight, dtype=odds.dtype)

    def backward(dy: Array) -> None:
        scale = dy * weight
        np.multiply(odds, (scale / total)[:, None], out=odds)
        odds[rows, places] -= scale
        logits.accumulate(odds)

    return tape.record(loss, backward)


def gathered_sums(group: TensorGroup, sums: Array) -> Array:
    """Return all ranks' sums of rows of logits, which a device has computed: two numbers a row."""
    with spans.COMM:
        every: Array = group.blocking.all_gather(sums)
    return every


class PartOfGPT(GPT):
    """Part `part` of `parts` of the model of `config`: its layout and its weights, without a group.

    Flat arrays are of `layout`. Raises `UserError` if the model cannot be divided into so many parts.
    """

    def __init__(
        self, config: GPTConfig, part: int, parts: int, *, xp: ModuleType = np, recompute: bool = False
    ) -> None:
        self.shards = TensorShards(config, parts)
        super().__init__(config, xp=xp, recompute=recompute)
        self._on_device: Any = vars(xp).get("operators_of_device")
        self.part = part
        self.layout = self.shards.layout(part)

    def init(self, seed: int) -> npt.NDArray[np.float32]:
        """Return this rank's slice of the result of `GPT.init`."""
        return self.shards.cut(GPT(self.config).init(seed), self.part)


class ParallelGPT(PartOfGPT):
    """This rank's part of the model of `config`, divided over `group`.

    All ranks call the same methods with the same tokens, on a thread that may block, and get the same loss.
    The length of sequences must be a multiple of the number of ranks. `group` may be set to that of another
    view.
    """

    def __init__(
        self, config: GPTConfig, group: TensorGroup, *, xp: ModuleType = np, recompute: bool = False
    ) -> None:
        super().__init__(config, group.rank, group.size, xp=xp, recompute=recompute)
        self.group = group

    def leaf(self, name: str, parameter: Parameter) -> Parameter:
        """See `GPT`."""
        return parameter if cut_of(name)[1] else SharedParameter(parameter, self.group)

    def logits(self, params: Array, tokens: Tokens) -> Array:
        """See `GPT`: the logits of all tokens of the vocabulary, on all ranks."""
        own = super().evaluate(params, Batch(self._checked(np.asarray(tokens)))).data
        end_ns = self.group.deadline_ns()
        columns = np.ascontiguousarray(own.T)
        every = self.group.submit(lambda c: c.all_gather_v(columns, deadline_ns=end_ns)).result()
        return np.ascontiguousarray(every.T).reshape(*tokens.shape, self.config.vocabulary)

    def _checked(self, inputs: Array) -> Array:
        if inputs.shape[1] % self.group.size:
            raise UserError(
                f"sequences of {inputs.shape[1]} tokens cannot be divided over {self.group.size} ranks: "
                f"choose a length that {self.group.size} divides."
            )
        return super()._checked(inputs)

    def _embed(self, tape: Tape, batch: Batch, *tables: Parameter) -> Tensor:
        tokens, own = batch.inputs.reshape(-1), self.shards.tokens(self.part)
        embedded = vocabulary_embedding(tape, tokens, tables[0], own, self.group, on_device=self._on_device)
        if len(tables) == 1:
            return embedded
        first, stop = span_of(len(tokens), self.part, self.group.size)
        places = batch.offset + np.arange(first, stop) % batch.inputs.shape[1]
        embedding: Operator = self._ops.embedding
        added: Operator = self._ops.add
        return added(tape, embedded, embedding(tape, places, tables[1]))

    def _into(self, tape: Tape, x: Tensor, layer: Sequence[Parameter]) -> Tensor:
        return super()._into(tape, gather_rows(tape, x, self.group), layer)

    def _attention(self, tape: Tape, packed: Tensor, batch: Batch, number: int) -> Tensor:
        first, stop = span_of(self.config.heads, self.part, self.group.size)
        bias = self._bias(packed.data.dtype)[first:stop]
        return self.operators.causal_attention(
            tape, packed, bias, batch=len(batch.inputs), heads=stop - first
        )

    def _onto(
        self, tape: Tape, x: Tensor, inner: Tensor, layer: Sequence[Parameter], batch: Batch, site: int
    ) -> Tensor:
        weight, *bias = layer
        added: Operator = self._ops.add
        y = scatter_rows(tape, self.operators.linear(tape, inner, weight), self.group)
        y = self._biased(tape, y, bias)
        return added(tape, x, self._dropout(tape, y, batch, site))

    def _dropout(self, tape: Tape, x: Tensor, batch: Batch, site: int) -> Tensor:
        """Apply dropout to this rank's rows, with the numbers of their positions in the whole batch."""
        if batch.noise is None or self.config.dropout == 0.0:
            return x
        rows = batch.inputs.size
        return self.operators.dropout(
            tape,
            x,
            rate=self.config.dropout,
            noise=batch.noise,
            site=site,
            first_row=span_of(rows, self.part, self.group.size)[0],
            rows=rows,
        )

    def _head(self, tape: Tape, x: Tensor, table: Parameter) -> Tensor:
        return super()._head(tape, gather_rows(tape, x, self.group), table)

    def _loss(self, tape: Tape, logits: Tensor, batch: Batch) -> Tensor:
        assert batch.targets is not None
        own, group, weight = self.shards.tokens(self.part), self.group, batch.weight
        if self._on_device is not None:
            found: Tensor = self._on_device.vocabulary_loss(
                tape,
                logits,
                batch.targets,
                own,
                partial(gathered_sums, group),
                weight=weight,
                vocabulary=self.config.vocabulary,
            )
            return found
        return vocabulary_cross_entropy(tape, logits, batch.targets, own, group, weight=weight)
