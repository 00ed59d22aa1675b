"""Reverse-mode automatic differentiation on a tape, with gradients written in place.

An op computes its output and records one closure, which takes the output's gradient and passes gradients on.
The tape plays the closures backwards. Ownership avoids copies: a closure *owns* the gradient it is given
(nobody reads it afterwards, so it may be overwritten or passed on), and an array given to `Tensor.accumulate`
belongs to that tensor from then on.

A parameter's gradient is written directly to memory of the caller, and a hook is called when it is final, so
that its reduction can start while the backward pass continues. The method is the Wengert list (R. E. Wengert,
"A simple automatic derivative evaluation program", 1964).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, is_narrow, room_like, widened
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe, ProbePoint, active_probe
from zbmd.training.autograd.op_watch import OpWatch, active_watch
from zbmd.transport.errors import LocalProtocolError

Backward = Callable[[Array], None]
GradReady = Callable[[int], None]

_NO_SPAN = nullcontext()


class Tensor:
    """A value on the tape and, during the backward pass, the gradient accumulated for it so far."""

    __slots__ = ("data", "grad")

    def __init__(self, data: Array) -> None:
        self.data = data
        self.grad: Array | None = None

    def accumulate(self, grad: Array) -> None:
        """Add `grad` (of the shape of `data`) to the gradient; the tensor owns `grad` from here on."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad


class Parameter:
    """A leaf whose gradient goes to memory of the caller.

    Shapes and dtypes of `stored` and `grad` agree. The previous content of `grad` does not matter: the first
    use overwrites it, each further use adds to it. With 16-bit floats, everything is computed in float32, and
    a gradient is rounded when it is stored.
    """

    __slots__ = ("_fresh", "deferred", "grad", "handed", "index", "on_ready", "stored", "uses_left")

    def __init__(self, stored: Array, grad: Array | None, index: int, on_ready: GradReady | None) -> None:
        self.stored = stored
        self.grad = grad
        self.index = index
        self.uses_left = 0
        self.handed = False
        """Whether the hook has been called, so that the gradient is final."""
        self._fresh = True
        self.on_ready = on_ready
        self.deferred: list[Callable[[], None]] | None = None
        """The queue of gradients that are computed later, in order; None: each is computed at once."""

    @property
    def data(self) -> Array:
        """Return the value to compute with; for 16-bit floats, a new copy at each call."""
        return widened(self.stored)

    def rows(self, places: Array) -> Array:
        """Return a copy of the rows `places` of the value."""
        return widened(self.stored[places])

    def let_go(self) -> None:
        """Keep neither the value nor the gradient alive: what is on a tape may outlive its pass.

        An empty slice of the value would keep all of it.
        """
        self.stored, self.grad = np.empty(0, self.stored.dtype), None

    def release(self) -> None:
        """Cancel one counted use that will bring no gradient."""
        self.uses_left -= 1

    def receive(self, write: Callable[[Array], object], *, lasting: bool = False) -> None:
        """Take the gradient of one use: `write(out)` sets all of `out`, an array like `data`.

        `lasting`: nothing that `write` reads changes any more, so it can be called later. Otherwise a
        deferred gradient is computed now and stored separately until its turn.
        """
        if self.deferred is None:
            self._take(write)
            return
        later = write if lasting else self._kept_apart(write)
        take, watch = partial(self._take, later), active_watch()
        self.deferred.append(take if watch is None else watch.deferred(take))

    def _kept_apart(self, write: Callable[[Array], object]) -> Callable[[Array], object]:
        """Compute what `write` sets now; return a function that copies it."""
        partial = self._room()
        write(partial)

        def copy(out: Array) -> None:
            out[...] = partial

        return copy

    def _room(self) -> Array:
        """Return an uninitialised array like `data`."""
        if self.grad is None:
            raise LocalProtocolError(f"parameter {self.index} got an unexpected gradient")
        return room_like(self.grad)

    def _take(self, write: Callable[[Array], object]) -> None:
        if self.grad is None or self.uses_left == 0:
            raise LocalProtocolError(f"parameter {self.index} got an unexpected gradient")
        if self._fresh and not is_narrow(self.grad):
            write(self.grad)
        else:
            partial = self._room()
            write(partial)
            if not self._fresh:
                partial += self.grad
            with np.errstate(over="ignore"):  # what is too large for 16 bits becomes infinite, which is seen
                self.grad[...] = partial
        self._fresh = False
        self.uses_left -= 1
        if self.uses_left == 0 and self.on_ready is not None:
            self.on_ready(self.index)
            self.handed = True

    @property
    def handing(self) -> bool:
        """Whether the hook is running, or has raised."""
        told = not self._fresh and self.uses_left == 0 and self.on_ready is not None
        return told and not self.handed


class Tape:
    """The record of one forward pass. With `recording=False` it keeps nothing and `backward` is refused."""

    __slots__ = (
        "_nodes",
        "_parameters",
        "_units",
        "_unrecorded",
        "labels",
        "recording",
        "unit_running",
        "xp",
    )

    def __new__(cls, *_: Any, **__: Any) -> Tape:
        """Make the tape a `WatchedTape` in a step whose ops are sampled."""
        is_watched = cls is Tape and active_watch() is not None
        return object.__new__(WatchedTape if is_watched else cls)

    def __init__(self, xp: ModuleType, *, recording: bool = True) -> None:
        self.xp = xp
        self.recording = recording
        self._nodes: list[tuple[Tensor, Backward]] = []
        self._parameters: list[Parameter] = []
        self._units: list[tuple[int, int]] = []
        self._unrecorded = 0
        self.labels: dict[int, str] = {}
        """The ops at some positions, by name; see `zbmd.training.model_actors`."""
        self.unit_running = 0
        """The unit that is computed, in both directions."""

    @property
    def position(self) -> int:
        """Return the index of the op that is running, in the order of the forward pass, in both
        directions."""
        return len(self._nodes) if self.recording else self._unrecorded

    def kept(self) -> Iterator[object]:
        """Yield what the backward pass needs: the outputs of ops, and their rules with everything these close
        over.
        """
        for node in self._nodes:
            yield from node

    def unit(self, number: int) -> AbstractContextManager[None]:
        """Attribute what is recorded from here on to the model's unit `number`; enter the result around
        it."""
        self.unit_running = number
        if not self.recording:
            return _NO_SPAN
        self._units.append((len(self._nodes), number))
        watching = active_probe()
        return spans.FORWARD[number] if watching is None else self._watched(watching, number)

    @contextmanager
    def _watched(self, watching: NonFiniteProbe, number: int) -> Generator[None]:
        watching.at(ProbePoint.FORWARD, number)
        with spans.FORWARD[number]:
            yield
        watching.look(self._nodes[-1][0].data)

    def record(self, data: Array, backward: Backward, *parameters: Parameter) -> Tensor:
        """Return the tensor of an op's output, computed from `parameters` and others, with the rule
        `backward`.

        `backward` passes exactly one gradient to each of `parameters` (`Parameter.receive`).
        """
        output = Tensor(data)
        if self.recording:
            self._nodes.append((output, backward))
            for parameter in parameters:
                parameter.uses_left += 1
                self._parameters.append(parameter)
        else:
            self._unrecorded += 1
        return output

    def backward(self, loss: Tensor, *, scale: float = 1.0) -> None:
        """Play the tape backwards from `loss` with a gradient of `scale`. A tape plays once.

        Raises `LocalProtocolError` if a parameter that was used gets no gradient, or nothing was recorded.
        """
        if not self._nodes:
            raise LocalProtocolError("the tape is empty, or was played before")
        self.play(loss, self.xp.full_like(loss.data, scale))
        self.check_whole()

    def check_whole(self) -> None:
        """Raise `LocalProtocolError` if a parameter that was used has received no gradient."""
        for parameter in self._parameters:
            if parameter.uses_left:
                raise LocalProtocolError(
                    f"parameter {parameter.index} was used, but the loss does not depend on it"
                )

    def checkpoint(
        self, block: Callable[[Tape, Tensor], Tensor], x: Tensor, parameters: Sequence[Parameter]
    ) -> Tensor:
        """Return `block(tape, x)` and keep only `x` of it: the backward pass computes it again.

        `parameters` are all that `block` uses, each at least once. `block` must be a function of `x`,
        `parameters` and constants, so that the second run gives the same bits; random numbers are such a
        function too (`zbmd.training.autograd.rng.random_words`). T. Chen and others, "Training deep nets with
        sublinear memory cost", 2016, arXiv:1604.06174.
        """
        if not self.recording:
            return block(self, x)
        y = block(Tape(self.xp, recording=False), Tensor(x.data))

        def backward(dy: Array) -> None:
            inner, source = Tape(self.xp), Tensor(x.data)
            with spans.RECOMPUTE:
                output = block(inner, source)
            for parameter in parameters:
                parameter.release()  # `inner` has counted its uses by now
            inner.play(output, dy)
            if source.grad is not None:
                x.accumulate(source.grad)

        return self.record(y.data, backward, *parameters)

    def play(self, output: Tensor, grad: Array) -> None:
        """Play the tape backwards from `output`, whose gradient is `grad`."""
        output.accumulate(grad)
        while self._units:
            floor, number = self._units.pop()
            self.unit_running = number
            watching = active_probe()
            if watching is not None:
                watching.at(ProbePoint.BACKWARD, number)
            with spans.BACKWARD[number]:
                self._play_down_to(floor)
            before = self._nodes[-1][0].grad if self._nodes else None
            if watching is not None and before is not None:
                watching.look(before)
        self._play_down_to(0)

    def _play_down_to(self, floor: int) -> None:
        while len(self._nodes) > floor:
            node, backward = self._nodes.pop()
            found, node.grad = node.grad, None
            if found is not None:
                backward(found)


class WatchedTape(Tape):
    """A tape that reports its ops to the watch that is on when it is made."""

    __slots__ = ("_watch",)

    def __init__(self, xp: ModuleType, *, recording: bool = True) -> None:
        super().__init__(xp, recording=recording)
        watch = active_watch()
        assert watch is not None, "made by Tape.__new__ alone"
        self._watch: OpWatch = watch
        watch.begin()

    def unit(self, number: int) -> AbstractContextManager[None]:
        """See `Tape`."""
        entered = super().unit(number)
        self._watch.begin()
        return entered

    def record(self, data: Array, backward: Backward, *parameters: Parameter) -> Tensor:
        """See `Tape`."""
        rule = self._watch.computed(self.unit_running, data, backward, parameters)
        output = super().record(data, rule, *parameters)
        self._watch.begin()
        return output
