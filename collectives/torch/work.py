"""Works and futures of `torch.distributed`, and numpy arrays over the memory of tensors.

Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import UserError, ZbmdError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

Array = NDArray[Any]

COMPLETERS = 8
"""Threads that complete futures. A callback may wait for another future, so there is more than one."""


def as_torch_error(error: BaseException) -> BaseException:
    """Return what torch's users expect: a `DistBackendError`, which is a `RuntimeError`, caused by ours."""
    if not isinstance(error, ZbmdError):
        return error
    wrapped: BaseException = dist.DistBackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class Waits:
    """The methods of `Work`. outputs: the tensors of its result. source: who sent, of a receive."""

    def __init__(
        self,
        done: Future[Any],
        outputs: Sequence[Any],
        completers: ThreadPoolExecutor,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()  # C++ needs it
        self._done = done
        # A work that is kept for C++ must keep no memory.
        self._outputs = [weakref.ref(tensor) for tensor in outputs]
        self._completers = completers
        self._source = source
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done. timeout: no limit if it is 0 or less. Raises `DistBackendError`."""
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        try:
            self._done.result(limit_s if limit_s > 0 else None)
        except concurrent.futures.TimeoutError:
            raise dist.DistBackendError(f"the operation is not done after {limit_s:g} s") from None
        except ZbmdError as error:
            raise as_torch_error(error) from error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, in either way."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that it failed with, if it has."""
        error = self._done.exception() if self._done.done() else None
        return None if error is None else as_torch_error(error)

    def result(self) -> list[Any]:
        """Return the tensors that it has written and that still exist."""
        return [tensor for tensor in (output() for output in self._outputs) if tensor is not None]

    def source_rank(self) -> int:
        """Return the rank in the group that sent, of a receive; else -1."""
        return -1 if self._source is None else self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a `torch.futures.Future` of the tensors; its callbacks run beside operations."""
        if self._future is not None:
            return self._future
        outputs, done = self.result(), self._done

        def value(_: Any) -> list[Any]:
            error = done.exception()
            if error is not None:
                raise as_torch_error(error)
            return outputs

        base = torch.futures.Future()
        # `set_exception` would store an ordinary value, which C++ takes for a result.
        self._future = base.then(value)

        def completed(_: Future[Any]) -> None:
            try:
                self._completers.submit(base.set_result, None)
            except RuntimeError:  # the process group has been shut down
                base.set_result(None)

        done.add_done_callback(completed)
        return self._future


Work: Any = type("ZbmdWork", (Waits, dist.Work), {"__doc__": Waits.__doc__})


class TensorBuffer:
    """One tensor: `array` is flat, over its memory, or over a copy if it is not contiguous.

    numbers: of its own dtype, for a reduction; else of bytes, whatever its dtype is. load: it is read. Raises
    `UserError` for tensors that are sparse or not in host memory, and for dtypes that cannot be reduced.
    """

    __slots__ = ("_flat", "_home", "array")

    def __init__(self, tensor: Any, *, numbers: bool = False, load: bool = True) -> None:
        if tensor.layout is not torch.strided:
            raise UserError(
                f"a tensor has layout {tensor.layout}: the backend zbmd takes dense ones (.to_dense())"
            )
        if tensor.device.type != "cpu":
            raise UserError(
                f"a tensor is on {tensor.device}: the backend zbmd takes those in host memory (.cpu())"
            )
        whole = tensor.detach()
        self._home = None if whole.is_contiguous() else whole
        if self._home is not None:
            whole = whole.contiguous() if load else torch.empty(whole.shape, dtype=whole.dtype)
        self._flat = whole
        flat = whole.view(-1)
        self.array: Array = _numbers(flat) if numbers else flat.view(torch.uint8).numpy()

    def bring_home(self) -> None:
        """Copy the array to its tensor, unless they share memory."""
        if self._home is not None:
            with torch.inference_mode():
                self._home.copy_(self._flat)


def _numbers(flat: Any) -> Array:
    if flat.dtype is torch.bfloat16:
        try:
            narrow: Any = importlib.import_module("ml_dtypes")
        except ImportError:
            raise UserError("bfloat16 takes ml_dtypes: pip install 'zbmd[bfloat16]'") from None
        return np.asarray(flat.view(torch.int16).numpy().view(narrow.bfloat16))
    try:
        return np.asarray(flat.numpy())
    except TypeError as error:
        raise UserError(f"{flat.dtype} cannot be reduced: {error}") from None
