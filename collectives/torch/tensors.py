"""Tensors as numpy arrays over the same memory, and as text in PyTorch's notation."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.native._fast_path import array_at
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")

Array = NDArray[Any]

LABELS_KEPT: Final = 512
NAMED_MAX: Final = 8
"""Tensors of a list that are described one by one."""
LISTED_MAX: Final = 16
"""Numbers of a list that are shown."""
_NAMES: Final = (
    *("float64", "float32", "float16", "complex128", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
_NUMPY: Final[dict[Any, np.dtype[Any]]] = {
    getattr(torch, name): np.dtype(name) for name in _NAMES if hasattr(torch, name)
}
_BYTES: Final = np.dtype(np.uint8)
_WIDENED: Final[dict[Any, Any]] = {
    getattr(torch, name): torch.float32
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
"""Dtypes that are reduced in another one, and rounded once."""
_STRIDED: Final = torch.strided


class TensorBuffer:
    """One tensor: `array` is flat, over its memory, or over a copy if it is not contiguous.

    numbers: it is to be reduced. Otherwise a dtype that numpy does not have is taken as bytes. load: it is
    read. factor: a number or tensor by which a copy of it is multiplied. Raises `UserError` for tensors that
    are sparse or not in host memory, and for dtypes that cannot be reduced.
    """

    __slots__ = ("_flat", "_home", "array", "is_plain", "shape", "tensor_dtype")

    def __init__(self, tensor: Any, *, numbers: bool = False, load: bool = True, factor: Any = None) -> None:
        self.require_dense(tensor)
        if not tensor.is_cpu:
            raise UserError(
                f"a tensor is on {tensor.device}: the backend zbmd takes those in host memory here (.cpu())"
            )
        self.array: Array = _array_over(self.take(tensor, numbers, load, factor), numbers)
        self.note_plain(factor)

    @staticmethod
    def require_dense(tensor: Any) -> None:
        """Raise `UserError` if a tensor is sparse."""
        if tensor.layout is not _STRIDED:
            raise UserError(
                f"a tensor has layout {tensor.layout}: the backend zbmd takes dense ones (.to_dense())"
            )

    def take(self, tensor: Any, numbers: bool, load: bool, factor: Any) -> Any:
        """Return a contiguous tensor with its elements: itself, or a copy that is brought home."""
        self.shape, self.tensor_dtype = tensor.shape, tensor.dtype
        self._home = self._flat = None
        wide = _WIDENED.get(tensor.dtype) if numbers else None
        if wide or factor is not None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self._home = whole = tensor.detach()
            self._flat = tensor = _packed(whole, wide, factor) if load else _unfilled(whole, wide)
        return tensor

    def note_plain(self, factor: Any) -> None:
        """Set `is_plain`."""
        # Otherwise ranks agree on it by one more operation: a small call takes five times as long.
        own = self.tensor_dtype in _NUMPY or self.array.dtype.name == "bfloat16"
        self.is_plain = own and factor is None
        """Whether the array says all that ranks must have alike."""

    @property
    def text(self) -> str:
        """Its dtype and shape: `float32[4, 3]`."""
        return tensor_text(self.tensor_dtype, self.shape)

    @property
    def label(self) -> bytes:
        """Its text, for a message."""
        return _label(self.tensor_dtype, self.shape)

    def bring_home(self) -> None:
        """Copy the array to its tensor, unless they share memory."""
        if self._home is not None:
            with torch.inference_mode():
                self._home.copy_(self._flat)


def array_in_place(tensor: Any) -> Array | None:
    """Return the flat array over a tensor's memory; None unless it can be reduced where it lies."""
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None or not tensor.is_cpu or tensor.layout is not _STRIDED or not tensor.is_contiguous():
        return None
    count = tensor.numel()
    if not count or tensor.is_conj() or tensor.is_neg():
        return None
    return array_at(tensor, tensor.data_ptr(), count, dtype)


def _packed(whole: Any, dtype: Any, factor: Any) -> Any:
    """Return a contiguous copy, in another dtype and multiplied by a factor if there are any."""
    packed = whole.resolve_conj().resolve_neg().to(dtype or whole.dtype).contiguous()
    return packed if factor is None else (packed * factor).to(packed.dtype)


def _unfilled(whole: Any, dtype: Any) -> Any:
    return torch.empty_like(whole, dtype=dtype, memory_format=torch.contiguous_format)


def tensor_text(dtype: Any, shape: Sequence[int]) -> str:
    """Return a dtype and a shape as text: `float32[4, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def bytes_over(tensor: Any) -> Array:
    """Return the bytes of a contiguous tensor, flat, without a copy."""
    # One that has a single element is contiguous whatever its strides are, and keeps them in `reshape`.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return TensorBuffer(flat.view(torch.uint8)).array


@lru_cache(LABELS_KEPT)
def _label(dtype: Any, shape: Any) -> bytes:
    return tensor_text(dtype, shape).encode()


class Called:
    """A call in its caller's words, which are put together only for an error, and its times. Keeps no tensor.

    name: of the operation. tensors: dtype and shape of the first few. place: the group's title, "" until the
    call has a number there. terms: what all ranks must have alike, where the operation does not compare it by
    itself. Times in ns of the monotonic clock, 0 until then.
    """

    __slots__ = (
        *("_count", "_more", "name", "number", "place", "tensors", "terms"),
        *("began_ns", "called_ns", "ended_ns", "limit_ns"),
    )

    def __init__(
        self,
        name: str,
        buffers: Sequence[TensorBuffer],
        more: str = "",
        *,
        own: str = "",
        tensor: Any = None,
        together: bool = False,
        terms: str = "",
    ) -> None:
        """more, own: the end of its arguments, that all ranks have alike or not. tensor: the only one of the
        call, without a buffer. together: there is an operation for each.
        """
        self.name, self._more, self.terms = name, more + own, terms
        if tensor is None:
            self.tensors = [(buffer.tensor_dtype, buffer.shape) for buffer in buffers[:NAMED_MAX]]
            self._count = len(buffers)
            together = together and self._count > 1
            if together or not all(buffer.is_plain for buffer in buffers):
                sizes = [buffer.array.size for buffer in buffers] if together else []
                dtypes = [str(buffer.tensor_dtype) for buffer in buffers]
                self.terms = f"{name} {dtypes} {sizes} {more if together or len(dtypes) == 1 else ''}"
        else:
            self.tensors, self._count = [(tensor.dtype, tensor.shape)], 1
        self.place = ""
        self.number = self.called_ns = self.limit_ns = self.began_ns = self.ended_ns = 0

    def text(self) -> str:
        """Return `all_reduce(float32[4, 3], SUM) #5 of default_pg`."""
        place = f" #{self.number} of {self.place}" if self.place else ""
        return f"{self.name}({self._described()}{self._more}){place}"

    def _described(self) -> str:
        """Return its tensors: `float32[4, 3]`, or `[float32[2], float32[4], … of 9]`."""
        named = [tensor_text(*each) for each in self.tensors]
        if self._count <= 1:
            return "".join(named)
        more = [f"… of {self._count}"] if self._count > NAMED_MAX else []
        return f"[{', '.join(named + more)}]"


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, of many the first."""
    shown = ", ".join(map(str, numbers[:LISTED_MAX]))
    return f"[{shown}{', …' if len(numbers) > LISTED_MAX else ''}]"


def only(tensors: Any) -> Any:
    """Return the tensor of a list of one, or the tensor itself."""
    if type(tensors) is not list and isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UserError(f"{len(tensors)} tensors were given; a process has one device, so one tensor")
    return tensors[0]


def list_of(tensors: Any) -> list[Any]:
    """Return the tensors of a list, or of a list of one list; none of an empty one."""
    tensors = list(tensors)
    return list(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor) else tensors


def splits_text(outputs: Any, inputs: Any) -> str:
    """Return split sizes as the end of the arguments of a call."""
    given = (("output_split_sizes", outputs), ("input_split_sizes", inputs))
    return "".join(f", {name}={_listed([*map(int, rows)])}" for name, rows in given if len(rows))


def row_elements(tensor: Any, place: TensorBuffer, rows: Any, size: int) -> list[int]:
    """Return the number of elements that go to, or come from, each rank."""
    rows = [int(number) for number in rows]
    if not rows:
        if tensor.shape[0] % size:
            raise UserError(f"{tensor.shape[0]} rows cannot be split among {size} ranks evenly")
        return [place.array.size // size] * size
    if len(rows) != size or sum(rows) != tensor.shape[0]:
        raise UserError(
            f"the split sizes {rows} are not {size} numbers that add up to {tensor.shape[0]} rows"
        )
    in_a_row = place.array.size // tensor.shape[0] if tensor.shape[0] else 0
    return [number * in_a_row for number in rows]


def require_elements(buffers: Sequence[TensorBuffer], count: int) -> None:
    """Raise `UserError` unless each has so many elements."""
    for buffer in buffers:
        if buffer.array.size != count:
            shape = f"{buffer.text} of {buffer.array.size} elements"
            raise UserError(f"{shape} was given where the other tensors of the call take {count}")


def number_type(flat: Any, numbers: bool) -> tuple[int, np.dtype[Any]]:
    """Return how many elements of which dtype of numpy's a contiguous tensor is. Raises `UserError`."""
    count, dtype = flat.numel(), _NUMPY.get(flat.dtype)
    if dtype is None and flat.dtype is torch.bfloat16:
        dtype = _bfloat16(numbers)
    elif dtype is None and numbers:
        raise UserError(f"{flat.dtype} cannot be reduced by the backend zbmd")
    if dtype is None:
        count, dtype = count * flat.element_size(), _BYTES
    return count, dtype


def _array_over(flat: Any, numbers: bool) -> Array:
    count, dtype = number_type(flat, numbers)
    if not count:
        return np.empty(0, dtype)
    # `Tensor.numpy()` would forbid that the tensor's storage is resized ever after, as FSDP does.
    return array_at(flat, flat.data_ptr(), count, dtype)


def _bfloat16(numbers: bool) -> np.dtype[Any]:
    try:
        narrow: Any = importlib.import_module("ml_dtypes")
    except ImportError:
        if numbers:
            raise UserError("bfloat16 takes ml_dtypes: pip install 'zbmd[bfloat16]'") from None
        return np.dtype(np.uint16)
    found: np.dtype[Any] = np.dtype(narrow.bfloat16)
    return found
