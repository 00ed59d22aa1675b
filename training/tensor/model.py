"""A GPT that is divided over the ranks of a group: see `zbmd.training.tensor.shards`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zbmd.collectives.group.group import Group
from zbmd.training import ops
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch, Tokens
from zbmd.training.tensor.ops import (
    SharedParameter,
    gather_rows,
    scatter_rows,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from zbmd.training.tensor.shards import TensorShards, cut_of, span_of
from zbmd.transport.errors import UserError


class PartOfGPT(GPT):
    """Part `part` of `parts` of the model of `config`: its layout and its weights, without a group.

    Flat arrays are of `layout`. Raises `UserError` if the model cannot be divided into so many parts.
    """

    def __init__(self, config: GPTConfig, part: int, parts: int, *, recompute: bool = False) -> None:
        self.shards = TensorShards(config, parts)
        super().__init__(config, recompute=recompute)
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

    def __init__(self, config: GPTConfig, group: Group, *, recompute: bool = False) -> None:
        super().__init__(config, group.rank, group.size, recompute=recompute)
        self.group = group

    def _parameter(self, name: str, parameter: Parameter) -> Parameter:
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
        embedded = vocabulary_embedding(tape, tokens, tables[0], own, self.group)
        if len(tables) == 1:
            return embedded
        first, stop = span_of(len(tokens), self.part, self.group.size)
        places = batch.offset + np.arange(first, stop) % batch.inputs.shape[1]
        return ops.add(tape, embedded, ops.embedding(tape, places, tables[1]))

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
        y = scatter_rows(tape, self.operators.linear(tape, inner, weight), self.group)
        if bias:
            y = ops.add_bias(tape, y, bias[0])
        return ops.add(tape, x, self._dropout(tape, y, batch, site))

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
        own = self.shards.tokens(self.part)
        return vocabulary_cross_entropy(tape, logits, batch.targets, own, self.group, weight=batch.weight)
