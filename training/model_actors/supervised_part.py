"""A part of a model whose passes are computed by actors, and computed again when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import GradReady, Parameter, Tape
from zbmd.training.model.gpt import Batch
from zbmd.training.model_actors.collective_log import Log, Recorder
from zbmd.training.model_actors.joint_call import Attempt
from zbmd.training.pipeline.part import GPTPart, Pass

R = TypeVar("R")


class Compute(Protocol):
    """`ModelActors.compute`."""

    def __call__(self, work: Callable[[Attempt], R]) -> R:
        """Return `work(attempt)`, repeated if an actor fails."""
        ...


class _Inputs(NamedTuple):
    """The arguments of `GPTPart.forward`."""

    params: Array
    grads: Array
    batch: Batch
    activations: Array | None
    on_grad_ready: GradReady | None
    splits: bool


class _SupervisedPass(Pass):
    """A pass that can be repeated, from its inputs and the gradient of its output.

    Gradients that were handed over are not written again: they may be on their way.
    """

    __slots__ = ("_final", "_gradient", "_inputs", "_log", "_loss_scale", "_part", "_recorder")

    def __init__(self, part: GPTPart, inputs: _Inputs, recorder: Recorder) -> None:
        self._part, self._inputs, self._recorder = part, inputs, recorder
        self._log: Log = []
        self._final = frozenset[int]()
        self._gradient: Array | None = None
        self._loss_scale = 1.0

    def begin_backward(self, gradient: Array | None, loss_scale: float) -> None:
        """Keep what the backward pass begins with: it is used up."""
        self._gradient, self._loss_scale = None if gradient is None else gradient.copy(), loss_scale

    def end(self) -> None:
        """Drop what a repetition would need."""
        self._log, self._gradient = [], None

    def forward(self, attempt: Attempt) -> _SupervisedPass:
        """Compute forwards."""
        with self._recorder.recording(self._log, again=True):
            self._forward(attempt)
        return self

    def backward(self, attempt: Attempt, gradient: Array | None) -> Array | None:
        """Compute backwards; in another attempt forwards as well."""
        attempt.tape, attempt.parameters = self.tape, self.parameters
        with self._recorder.recording(self._log, again=attempt.number > 0):
            if attempt.number:
                return self._repeat(attempt)
            return GPTPart.backward(self._part, self, gradient, loss_scale=self._loss_scale)

    def weight_gradient(self, attempt: Attempt) -> None:
        """Compute what `backward` has deferred; in another attempt all."""
        attempt.unit, attempt.parameters = self._part.layers[0], self.parameters
        with self._recorder.recording(self._log, again=attempt.number > 0):
            if attempt.number:
                self._repeat(attempt)
            GPTPart.weight_gradient(self._part, self)

    def _forward(self, attempt: Attempt) -> None:
        tape = attempt.tape = Tape(self._part.model.xp)
        params, grads, batch, activations, on_grad_ready, splits = self._inputs
        made = GPTPart.forward(
            self._part,
            params,
            grads,
            batch,
            activations,
            on_grad_ready=on_grad_ready,
            splits=splits,
            tape=tape,
        )
        self.tape, self.parameters, self.input = tape, made.parameters, made.input
        self.output, self.weight_gradients = made.output, made.weight_gradients

    def _repeat(self, attempt: Attempt) -> Array | None:
        self._final |= {one.index for one in self.parameters if one.handed}
        self._forward(attempt)
        attempt.parameters = self.parameters
        for index in self._final:
            _discard(self.parameters[index])
        given = None if self._gradient is None else self._gradient.copy()
        return GPTPart.backward(self._part, self, given, loss_scale=self._loss_scale)


class SupervisedPart(GPTPart):
    """`plain`, computed by `compute`; `recorder` keeps what collectives along `tp` return.

    The inputs of a pass must not change until its backward pass is over.
    """

    def __init__(self, plain: GPTPart, compute: Compute, recorder: Recorder) -> None:
        super().__init__(plain.model, plain.layers)
        self._compute, self._recorder = compute, recorder

    def forward(
        self,
        params: Array,
        grads: Array,
        batch: Batch,
        activations: Array | None,
        *,
        on_grad_ready: GradReady | None = None,
        splits: bool = False,
        tape: Tape | None = None,
    ) -> Pass:
        """See `GPTPart`; the tape is a new one. Raises `RestartsExhausted`."""
        inputs = _Inputs(params, grads, batch, activations, on_grad_ready, splits)
        return self._compute(_SupervisedPass(self, inputs, self._recorder).forward)

    def backward(self, forward: Pass, gradient: Array | None, *, loss_scale: float = 1.0) -> Array | None:
        """See `GPTPart`. Raises `RestartsExhausted`."""
        done = forward
        assert isinstance(done, _SupervisedPass), "a pass of another part"
        done.begin_backward(gradient, loss_scale)
        found = self._compute(lambda attempt: done.backward(attempt, gradient))
        if not done.weight_gradients:
            done.end()
        return found

    def weight_gradient(self, forward: Pass) -> None:
        """See `GPTPart`. Raises `RestartsExhausted`."""
        assert isinstance(forward, _SupervisedPass), "a pass of another part"
        self._compute(forward.weight_gradient)
        forward.end()

    def evaluate(
        self, params: Array, batch: Batch, activations: Array | None, *, tape: Tape | None = None
    ) -> Array:
        """See `GPTPart`; the tape is a new one. Raises `RestartsExhausted`."""
        log, evaluate = Log(), super().evaluate

        def work(attempt: Attempt) -> Array:
            attempt.tape = Tape(self.model.xp, recording=False)
            with self._recorder.recording(log, again=True):
                return evaluate(params, batch, activations, tape=attempt.tape)

        return self._compute(work)


def _discard(parameter: Parameter) -> None:
    """Have a gradient computed that nobody reads: other parts of the pass overwrite what it is made of."""
    assert parameter.grad is not None
    parameter.grad = np.empty_like(parameter.grad)
    parameter.on_ready = None
