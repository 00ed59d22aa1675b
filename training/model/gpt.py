"""A decoder-only transformer (GPT) as a pure function of flat parameters.

Pre-norm blocks: x += proj(attention(norm(x))); x += out(activation(in(norm(x)))). A layer is `x @ weight`:
matrices are (inputs, outputs). There are two families:

- `zbmd`: RMS norms, no biases, an untied output head. Positions are relative, given by a constant bias on the
  attention scores; learned positions made it worse (0.09 nats a byte after 600,000 bytes).
- `gpt2`: layer norms, biases, learned positions, and the embedding table as the head (A. Radford and others,
  "Language models are unsupervised multitask learners", 2019). Its layers have the names of `zbmd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zbmd.training import ops
from zbmd.training.autograd.array_module import Array, computing_dtype
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot
from zbmd.training.autograd.rng import Noise, Purpose, stream
from zbmd.training.autograd.tape import GradReady, Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.transport.errors import UserError

Tokens = npt.NDArray[np.integer]

EMBEDDING_STD = 0.5
GPT2_STD = 0.02
MLP_RATIO = 4
PARAMETERS_PER_BLOCK = 6


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in the order in which the forward pass uses them."""
    if config.family == "gpt2":
        return _gpt2_shapes(config)
    width, hidden = config.width, MLP_RATIO * config.width
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocabulary, width)}
    for block in range(config.layers):
        shapes |= {
            f"blocks.{block}.attn.norm.weight": (width,),
            f"blocks.{block}.attn.qkv.weight": (width, 3 * width),
            f"blocks.{block}.attn.proj.weight": (width, width),
            f"blocks.{block}.mlp.norm.weight": (width,),
            f"blocks.{block}.mlp.in.weight": (width, hidden),
            f"blocks.{block}.mlp.out.weight": (hidden, width),
        }
    return shapes | {"head.norm.weight": (width,), "head.weight": (width, config.vocabulary)}


def _gpt2_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    width, hidden = config.width, MLP_RATIO * config.width
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocabulary, width),
        "positions.weight": (config.context, width),
    }
    for block in range(config.layers):
        for name, shape in (
            ("attn.norm", (width,)),
            ("attn.qkv", (width, 3 * width)),
            ("attn.proj", (width, width)),
            ("mlp.norm", (width,)),
            ("mlp.in", (width, hidden)),
            ("mlp.out", (hidden, width)),
        ):
            shapes |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[-1:]}
    return shapes | {"head.norm.weight": (width,), "head.norm.bias": (width,)}


Operator = Callable[..., Tensor]
"""An op like those of `zbmd.training.ops`: it does not change its inputs, and records exactly one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The ops that units compute with; each is called like the op of its name."""

    embedding: Operator = ops.embedding
    rms_norm: Operator = ops.rms_norm
    linear: Operator = ops.linear
    causal_attention: Operator = ops.causal_attention
    activation: Operator = ops.squared_relu
    dropout: Operator = ops.dropout
    add: Operator = ops.add
    cross_entropy: Operator = ops.cross_entropy

    @classmethod
    def of(cls, source: Any, config: GPTConfig) -> Operators:
        """Return those of `source`, a module or an object with the functions of `zbmd.training.ops`."""
        activation = {"relu2": "squared_relu", "gelu": "gelu"}[config.activation]
        names = {one.name: one.name for one in fields(cls)} | {"activation": activation}
        return cls(**{name: getattr(source, found) for name, found in names.items()})


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs, (samples, T) tokens, and what a loss needs: targets, (samples * T,), and the weight of each."""

    inputs: Array
    targets: Array | None = None
    weight: float = 1.0
    noise: Noise | None = None
    offset: int = 0
    """The position of the first of `inputs`."""


UnitRunner = Callable[[Tape, int, Tensor, list[Parameter], Batch], Tensor]
"""Computes a unit as `GPT.unit` does."""


class WholeStep(Protocol):
    """Computes a forward and a backward pass of all units at once, in the place of a tape."""

    def __call__(
        self, params: Array, grads: Array, batch: Batch, on_grad_ready: GradReady | None, /
    ) -> tuple[Array, Callable[[], None]]:
        """Return the loss, and what computes it and the gradient once it is called.

        See `GPT.loss_and_grads` for the arguments.
        """
        ...


class UnitPass(Protocol):
    """The passes of a run of units over one batch, in the place of a tape. Activations are a device's."""

    @property
    def holds(self) -> Sequence[Array]:
        """Return the memory that it keeps between its passes."""
        ...

    def forward(self, batch: Batch, weights: Sequence[Array], x: Array | None) -> Array:
        """Return the output, which stays until `leave`; a loss is known after the backward pass."""
        ...

    def backward(
        self,
        weights: Sequence[Array],
        grads: Sequence[Array],
        slope: Array,
        on_grad_ready: GradReady | None = None,
        ends: Sequence[slice] = (),
    ) -> Array | None:
        """Write the gradients of weights and return that of the input, which stays until the next pass.

        `on_grad_ready(index)`: see `GPT.loss_and_grads`. It is early where those in one of `ends` are final.
        """
        ...

    def weight_gradient(self, on_grad_ready: GradReady | None = None, ends: Sequence[slice] = ()) -> None:
        """Write the gradients of weights, if it was begun with `splits`; `backward` then does not."""
        ...

    def leave(self) -> None:
        """Let the next pass use its memory. Idempotent."""
        ...


class FusedUnits(Protocol):
    """Computes passes of runs of units, several at once, in the place of tapes."""

    def begin(self, units: range, batch: Batch, *, splits: bool = False) -> UnitPass:
        """Return room for the passes of `units` over a batch like this one."""
        ...


class GPT:
    """The model of one configuration. It holds no weights: they are arguments."""

    def __init__(self, config: GPTConfig, *, xp: ModuleType = np, recompute: bool = False) -> None:
        """With `recompute`, blocks keep only their input and are computed again during the backward pass.

        This costs about a third more time, and changes no bit.
        """
        self.config = config
        self.recompute = recompute
        self.xp = xp
        self.layout = ParameterLayout.of(parameter_shapes(config))
        self._ops: Any = vars(xp).get("operators_of_device", ops)
        """The ops by their names in `zbmd.training.ops`; a device has its own."""
        self.operators = Operators.of(self._ops, config)
        self.distance_bias = self._distance_bias(np.float32)
        """The relative positions, (heads, context): see `ops.causal_distance_bias`."""
        self.computed_by: UnitRunner | None = None
        """Computes units in the place of `unit`, if something else is to do it."""
        self.whole_step: WholeStep | None = None
        """Computes loss and gradients in the place of a tape, with a loss scale of 1, if it is set."""
        self.fused_units: FusedUnits | None = None
        """Computes runs of units of a step in the place of tapes, with a loss scale of 1, if it is set."""

    @property
    def is_tied(self) -> bool:
        """Whether the head uses the table of the embedding."""
        return self.config.family == "gpt2"

    @property
    def units(self) -> tuple[slice, ...]:
        """Return the parameters, by index, of each unit in order: embedding, each block, head.

        Raises `UserError` for a tied head: such a model cannot be divided between its units.
        """
        if self.is_tied:
            raise UserError(
                "the head of a gpt2 model is its embedding, so it cannot be divided into parts without "
                "shared parameters, as pipelines, ZeRO and actors need: use a model of the family "
                '"zbmd".'
            )
        starts = [1 + PARAMETERS_PER_BLOCK * number for number in range(self.config.layers + 1)]
        blocks = [slice(start, start + PARAMETERS_PER_BLOCK) for start in starts[:-1]]
        return slice(0, 1), *blocks, slice(starts[-1], starts[-1] + 2)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Return the names of the units: embed, blocks.0, …, head."""
        return "embed", *(f"blocks.{number}" for number in range(self.config.layers)), "head"

    def unit_parameters(self, number: int) -> tuple[int, ...]:
        """Return the indices of the parameters that unit `number` uses."""
        if not self.is_tied:
            return tuple(range(len(self.layout.slots)))[self.units[number]]
        if number == 0:
            return (0, 1)
        start, stop = (2 + 2 * PARAMETERS_PER_BLOCK * n for n in (number - 1, number))
        return tuple(range(start, stop)) if number <= self.config.layers else (start, start + 1, 0)

    def init(self, seed: int) -> npt.NDArray[np.float32]:
        """Return new flat parameters, (layout.size,) float32 in host memory; the same for the same seed.

        Matrices are normal with deviation 1/sqrt(inputs); those that write to the residual stream are also
        divided by sqrt(2 * layers) (GPT-2). The embedding has deviation 0.5, gains are 1, and the head is 0,
        so that the first loss is exactly log 256. In a gpt2 model all deviations are 0.02 (those that write
        to the residual stream divided as above), and biases are 0.
        """
        flat = np.zeros(self.layout.size, dtype=np.float32)
        residual_scale = 1.0 / math.sqrt(2 * self.config.layers)
        for index, slot in enumerate(self.layout.slots):
            if slot.name == "head.weight":
                continue
            if not slot.decayed:
                flat[slot.span] = 0.0 if slot.name.endswith(".bias") else 1.0
                continue
            std = self._std(slot)
            if slot.name.endswith(("attn.proj.weight", "mlp.out.weight")):
                std *= residual_scale
            normal = stream(seed, Purpose.INIT, index).standard_normal(slot.size, dtype=np.float32)
            flat[slot.span] = normal * np.float32(std)
        return flat

    def _std(self, slot: ParameterSlot) -> float:
        if self.config.family == "gpt2":
            return GPT2_STD
        return EMBEDDING_STD if slot.name == "embed.weight" else 1.0 / math.sqrt(slot.shape[0])

    def loss_and_grads(
        self,
        params: Array,
        grads: Array,
        tokens: Tokens,
        *,
        global_batch: int,
        on_grad_ready: GradReady | None = None,
        noise: Noise | None = None,
        loss_scale: float = 1.0,
    ) -> float:
        """Return the loss of `tokens` and write its gradient to `grads`; equal inputs give equal bits.

        params, grads: (layout.size,), one float dtype; all of `grads` but its padding is overwritten. 16-bit
        floats are widened to float32, layer by layer, and gradients are rounded. tokens: (samples, T + 1)
        integers below the vocabulary, T at most the context; T + 1 tokens hold T predictions. The loss (nats
        per token) is the sum over the samples of their mean loss, divided by `global_batch`: the losses and
        gradients of a batch's shards add up to those of the batch. `on_grad_ready(index)` is called as soon
        as parameter `index` has its final gradient in `grads`, from the last parameters to the first. Without
        `noise`, there is no dropout. Gradients, but not the loss, are multiplied by `loss_scale`.
        """
        batch = self.batch(tokens, global_batch=global_batch, noise=noise)
        if self.whole_step is not None:
            loss, play = self.whole_step(params, grads, batch, on_grad_ready)
            play()
            return float(loss)
        parameters = self.parameters(params, grads, on_grad_ready)
        return self.differentiate(Tape(self.xp), parameters, batch, loss_scale=loss_scale)

    def parameters(self, params: Array, grads: Array, on_grad_ready: GradReady | None) -> list[Parameter]:
        """Return the leaves of a forward and backward pass; see `loss_and_grads`."""
        return self.parameters_in(self.layout, params, grads, on_grad_ready)

    def parameters_in(
        self, layout: ParameterLayout, params: Array, grads: Array | None, on_grad_ready: GradReady | None
    ) -> list[Parameter]:
        """Return the leaves of the parameters in `layout`: some of the model's, in flat arrays of their own.

        Without `grads` they are for a forward pass only.
        """
        views = layout.views(params)
        into = [None] * len(views) if grads is None else layout.views(grads)
        return [
            self.leaf(slot.name, Parameter(data, grad, index, on_grad_ready))
            for index, (slot, data, grad) in enumerate(zip(layout.slots, views, into, strict=True))
        ]

    def leaf(self, name: str, parameter: Parameter) -> Parameter:
        """Return `parameter`, named `name`, as the leaf of a forward and backward pass."""
        return parameter

    def differentiate(
        self, tape: Tape, parameters: list[Parameter], batch: Batch, *, loss_scale: float
    ) -> float:
        """Run forwards and backwards on an empty `tape`; return the loss."""
        loss = self.run(tape, parameters, batch)
        value = float(loss.data)
        tape.backward(loss, scale=loss_scale)
        return value

    def loss(self, params: Array, tokens: Tokens) -> float:
        """Return the mean loss of `tokens`, (samples, T + 1), in nats per token."""
        batch = self.batch(tokens, global_batch=len(tokens))
        return float(self.evaluate(params, batch).data)

    def logits(self, params: Array, tokens: Tokens) -> Array:
        """Return the logits, (samples, T, vocabulary), of the token after each of `tokens`, (samples, T)."""
        batch = Batch(self._checked(self.xp.asarray(tokens)))
        logits = self.evaluate(params, batch)
        return logits.data.reshape(*tokens.shape, self.config.vocabulary)

    def batch(self, tokens: Tokens, *, global_batch: int, noise: Noise | None = None) -> Batch:
        """Return the batch of `tokens`, (samples, T + 1): see `loss_and_grads`."""
        device_tokens = self.xp.asarray(tokens)
        inputs, targets = self._checked(device_tokens[:, :-1]), device_tokens[:, 1:].reshape(-1)
        weight = 1.0 / (global_batch * (tokens.shape[1] - 1))
        return Batch(inputs, targets=targets, weight=weight, noise=noise)

    def unit(self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """Compute unit `number` (see `units`) from the output of the one before; the first unit ignores `x`.

        The last unit returns the loss, or logits if the batch has no targets.
        """
        if number == 0:
            return self._dropout(tape, self._embed(tape, batch, *parameters), batch, 0)
        if number <= self.config.layers:
            return self._block(tape, x, parameters=parameters, number=number - 1, batch=batch)
        *norm, table = parameters
        logits = self._head(tape, self._norm(tape, x, norm), table)
        return logits if batch.targets is None else self._loss(tape, logits, batch)

    def evaluate(self, params: Array, batch: Batch) -> Tensor:
        """Run forwards only: return the loss, or logits if the batch has no targets."""
        return self.run(Tape(self.xp, recording=False), self.leaves(params), batch)

    def leaves(self, params: Array) -> list[Parameter]:
        """Return the parameters for a forward pass only."""
        return self.parameters_in(self.layout, params, None, None)

    def _checked(self, inputs: Array) -> Array:
        if not 0 < inputs.shape[1] <= self.config.context:
            raise ValueError(f"sequences have 1 to {self.config.context} positions, not {inputs.shape[1]}")
        return inputs

    def run(self, tape: Tape, parameters: list[Parameter], batch: Batch) -> Tensor:
        """Run all units forwards on an empty `tape`; return the output of the last one."""
        everything = range(self.config.layers + 2)
        return self.run_units(tape, everything, Tensor(self.xp.zeros(0)), parameters, batch)

    def run_units(
        self, tape: Tape, numbers: range, x: Tensor, parameters: list[Parameter], batch: Batch
    ) -> Tensor:
        """Run the units `numbers` forwards from `x`, the output of the unit before them.

        `parameters` are those of these units, in order.
        """
        first = self.unit_parameters(numbers[0])[0]
        for number in numbers:
            own = [parameters[index - first] for index in self.unit_parameters(number)]
            x = self.run_unit(tape, number, x, own, batch)
        return x

    def run_unit(
        self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch
    ) -> Tensor:
        """Run one unit forwards from `x`, with its own parameters, as a unit of the tape.

        With `recompute`, only the input of a block is kept.
        """

        compute = self.computed_by or self.unit

        def run(tape: Tape, source: Tensor) -> Tensor:
            return compute(tape, number, source, parameters, batch)

        with tape.unit(number):
            if self.recompute and 0 < number <= self.config.layers:
                return tape.checkpoint(run, x, parameters)
            return run(tape, x)

    def _block(
        self,
        tape: Tape,
        x: Tensor,
        *,
        parameters: list[Parameter],
        number: int,
        batch: Batch,
    ) -> Tensor:
        each = len(parameters) // PARAMETERS_PER_BLOCK  # a weight, or a weight and a bias
        layers = [parameters[start : start + each] for start in range(0, len(parameters), each)]
        attn_norm, qkv, proj, mlp_norm, mlp_in, mlp_out = layers
        packed = self._into(tape, self._norm(tape, x, attn_norm), qkv)
        mixed = self._attention(tape, packed, batch, number)
        x = self._onto(tape, x, mixed, proj, batch, 1 + 2 * number)
        hidden = self.operators.activation(tape, self._into(tape, self._norm(tape, x, mlp_norm), mlp_in))
        return self._onto(tape, x, hidden, mlp_out, batch, 2 + 2 * number)

    def _embed(self, tape: Tape, batch: Batch, *tables: Parameter) -> Tensor:
        """Return the rows of the token table, plus those of the position table if there is one."""
        embedded = self.operators.embedding(tape, batch.inputs.reshape(-1), tables[0])
        if len(tables) == 1:
            return embedded
        samples, length = batch.inputs.shape
        added: Operator = self._ops.add
        embedding: Operator = self._ops.embedding
        places = self.xp.tile(self.xp.arange(batch.offset, batch.offset + length), samples)
        return added(tape, embedded, embedding(tape, places, tables[1]))

    def _norm(self, tape: Tape, x: Tensor, layer: Sequence[Parameter]) -> Tensor:
        norm: Operator = self.operators.rms_norm if len(layer) == 1 else self._ops.layer_norm
        return norm(tape, x, *layer)

    def _into(self, tape: Tape, x: Tensor, layer: Sequence[Parameter]) -> Tensor:
        """A linear layer that reads the residual stream."""
        weight, *bias = layer
        y = self.operators.linear(tape, x, weight)
        return self._biased(tape, y, bias)

    def _biased(self, tape: Tape, x: Tensor, bias: Sequence[Parameter]) -> Tensor:
        added: Operator = self._ops.add_bias
        return added(tape, x, bias[0]) if bias else x

    def _attention(self, tape: Tape, packed: Tensor, batch: Batch, number: int) -> Tensor:
        samples, bias = len(batch.inputs), self._bias(packed.data.dtype)
        return self.operators.causal_attention(tape, packed, bias, batch=samples, heads=self.config.heads)

    def _onto(
        self, tape: Tape, x: Tensor, inner: Tensor, layer: Sequence[Parameter], batch: Batch, site: int
    ) -> Tensor:
        """Add the output of a linear layer, after dropout, to the residual stream."""
        weight, *bias = layer
        if not bias and not self._drops_out(batch):
            return self.operators.linear(tape, inner, weight, residual=x)
        y = self._biased(tape, self.operators.linear(tape, inner, weight), bias)
        return self.operators.add(tape, x, self._dropout(tape, y, batch, site))

    def _head(self, tape: Tape, x: Tensor, table: Parameter) -> Tensor:
        if self.is_tied:
            product: Operator = self._ops.tied_linear
        else:  # some operators compute logits in another precision than layers
            product = getattr(self._ops, "head_linear", self.operators.linear)
        return product(tape, x, table)

    def _loss(self, tape: Tape, logits: Tensor, batch: Batch) -> Tensor:
        return self.operators.cross_entropy(tape, logits, batch.targets, weight=batch.weight)

    def _drops_out(self, batch: Batch) -> bool:
        return batch.noise is not None and self.config.dropout > 0.0

    def _dropout(self, tape: Tape, x: Tensor, batch: Batch, site: int) -> Tensor:
        if batch.noise is None or self.config.dropout == 0.0:
            return x
        return self.operators.dropout(tape, x, rate=self.config.dropout, noise=batch.noise, site=site)

    def _bias(self, dtype: np.dtype[np.floating]) -> Array:
        dtype = computing_dtype(dtype)
        if self.distance_bias.dtype != dtype:
            self.distance_bias = self._distance_bias(dtype)
        return self.distance_bias

    def _distance_bias(self, dtype: npt.DTypeLike) -> Array:
        heads, context = self.config.heads, self.config.context
        if self.config.family == "gpt2":  # positions are learned
            nothing: Array = self.xp.zeros((heads, context), dtype=dtype)
            return nothing
        return ops.causal_distance_bias(self.xp, heads, context, dtype)
