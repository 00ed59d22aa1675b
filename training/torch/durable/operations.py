"""The ops of PyTorch in the sampled steps of a loop: a mode of the dispatcher, which sees each call.

It is on while the script computes and updates, and off during votes, copies and waits, and in all other
steps. It sees what is left once autograd, DTensor and `torch.compile` have done their parts: of a compiled
model, the calls that its code makes into PyTorch, and not the kernels that were generated. A call whose first
tensor is on a GPU runs as long as PyTorch's events say that stand around it, any other one by the host's
clock. A backward pass on a CPU runs on the thread that asked for it; to other threads of autograd PyTorch
hands the mode on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from zbmd.training.profiler.operations import BACKWARD, FORWARD, WORK, OpSampler, OpSum
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
modes: Any = importlib.import_module("torch.utils._python_dispatch")

SHAPES_MAX: Final = 4
"""Tensors that a call is given, and that its row names."""
KNOWN_MAX: Final = 1 << 14
"""Calls with other arguments; those of any further ones are described again each time."""
LEFT_OUT: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler"})
"""Namespaces of calls that compute nothing: of operations the groups know more, and of labels nobody needs
to."""
UNFILLED: Final = ("empty", "new_empty")
"""Names of ops whose result nobody has written."""

_in_backward: Final[Callable[[], int]] = torch._C._current_graph_task_id
_records_gradients: Final[Callable[[], bool]] = torch.is_grad_enabled
_PLAIN: Final = torch.Tensor.__torch_dispatch__
"""Of types that do nothing of their own."""
_ATTENTION: Final = ("_scaled_dot_product_flash_attention_for_cpu", 0)
_ATTENTION_BACKWARD: Final = ("_scaled_dot_product_flash_attention_for_cpu_backward", 1)


class OpMode(modes.TorchDispatchMode):  # type: ignore[misc]
    """Adds each call to the rows of `sampler`, while it is on. For the thread that trains."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no compiler ever sees a call of the mode, and it need not be kept from that."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: models are compiled in a sampled step as in any other."""
        return True

    def __init__(self, sampler: OpSampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._known: dict[object, OpSum | None] = {}
        self._generation = sampler.generation
        self._products = _formulas()
        self._is_entered = self._is_on = False

    def watch(self, *, is_on: bool) -> None:
        """Watch from here on, or no longer. A mode of the script that is still entered keeps this one."""
        self._is_on = is_on
        if self._generation != self._sampler.generation:
            self._known.clear()
            self._generation = self._sampler.generation
        if is_on and not self._is_entered:
            self.__enter__()
            self._is_entered = True
        elif not is_on and self._is_entered and modes._get_current_dispatch_mode() is self:
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a call, and count it."""
        if types and any(each.__torch_dispatch__ is not _PLAIN for each in types):
            return NotImplemented  # a DTensor, say, which makes calls of its own
        kwargs = kwargs or {}
        tensors = [each for each in map(_tensor_in, args) if each is not None] if self._is_on else []
        begin = self._sampler.mark() if tensors and _is_on_device(tensors[0]) else -1
        begin_ns = now_ns()
        out = func(*args, **kwargs)
        end_ns = now_ns()
        if not self._is_on:
            return out
        which = BACKWARD if _in_backward() != -1 else FORWARD if _records_gradients() else WORK
        first = tensors[0] if tensors else _tensor_in(out)
        key = (
            func,
            which,
            tuple([each.shape for each in tensors]),
            None if first is None else first.dtype,
            getattr(out, "shape", None) if func in self._products else None,
        )
        try:
            row = self._known[key]
        except KeyError:
            row = self._learnt(key, args, kwargs, out)
        if row is not None:
            self._sampler.called(row, begin_ns, end_ns, begin)
        return out

    def _learnt(
        self, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> OpSum | None:
        func, which, _, dtype, _ = key
        name = _name_of(func)
        row: OpSum | None = None
        if name.partition("::")[0] not in LEFT_OUT:
            told = (name, which, _shapes(args), "" if dtype is None else str(dtype).removeprefix("torch."))
            flops = _flops(self._products.get(func), args, kwargs, out)
            row = self._sampler.found(told, nbytes=_nbytes(func, name, (args, kwargs, out)), flops=flops)
        if len(self._known) < KNOWN_MAX:
            self._known[key] = row
        return row


def _is_on_device(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def _tensor_in(given: Any) -> Any:
    """Return a tensor, or the first one of a list; None of anything else."""
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, list | tuple) and given and isinstance(given[0], torch.Tensor):
        return given[0]
    return None


def _name_of(func: Any) -> str:
    """Return the name of an op as PyTorch's profiler shows it: `aten::mm`."""
    schema = getattr(func, "_schema", None)
    return str(func.name() if schema is None else schema.name)[:200]


def _shapes(args: Sequence[Any]) -> str:
    """Return the shapes of the first tensors: `128x512, 512x256`; a list says how many it has."""
    found: list[str] = []
    for each in args:
        tensor = _tensor_in(each)
        if tensor is not None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            found.append(shape if tensor is each else f"{len(each)} * {shape}")
    return ", ".join(found[:SHAPES_MAX])[:256]


def _nbytes(func: Any, name: str, values: Any) -> int:
    """Return the bytes of all tensors that a call takes and gives, each once; 0 of a view."""
    if getattr(func, "is_view", False) or name.partition("::")[2].startswith(UNFILLED):
        return 0
    found: dict[object, int] = {}
    _collect(values, found)
    return sum(found.values())


def _collect(value: Any, found: dict[object, int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            # An expanded tensor has less memory than elements.
            nbytes = min(value.nbytes, value.untyped_storage().nbytes())
            found[value.data_ptr() or id(value), value.shape] = int(nbytes)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


def _flops(
    formula: Callable[..., int] | None, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> int:
    """Return the FLOPs of a call by PyTorch's formula for it; 0 without one, or if it does not fit."""
    if formula is None:
        return 0
    try:
        return max(0, int(formula(*args, **kwargs, out_val=out)))
    except (AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return 0


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return PyTorch's formulas of matrix products, convolutions and attention, by op and overload."""
    counter: Any = importlib.import_module("torch.utils.flop_counter")
    found: dict[Any, Callable[..., int]] = {}
    for packet, formula in counter.flop_registry.items():
        overloads = getattr(packet, "overloads", None)
        for each in [packet] if overloads is None else [getattr(packet, name) for name in overloads()]:
            found[each] = formula
    # It has none for attention on a CPU.
    for (name, skipped), formula in (
        (_ATTENTION, counter.sdpa_flop_count),
        (_ATTENTION_BACKWARD, counter.sdpa_backward_flop_count),
    ):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found[packet.default] = _of_shapes(formula, 3 + skipped)
    return found


def _of_shapes(formula: Callable[..., int], tensors: int) -> Callable[..., int]:
    """Return a formula that takes the shapes of the first tensors of a call."""
    return lambda *args, **_: formula(*(each.shape for each in args[:tensors]))
