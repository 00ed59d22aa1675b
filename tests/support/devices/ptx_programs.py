"""Small PTX kernels for tests: one instruction on the lanes of two warps, or a CUDA source compiled once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from zbmd.tools.lab import ptx
from zbmd.training.ops.cuda.compiler import Compiler
from zbmd.training.ops.cuda.table import headers

LANES = 64
_TYPES: dict[str, tuple[str, Any]] = {
    **{f"u{8 * n}": (f"u{8 * n}", np.dtype(f"u{n}")) for n in (2, 4, 8)},
    **{f"s{8 * n}": (f"s{8 * n}", np.dtype(f"i{n}")) for n in (2, 4, 8)},
    **{"b16": ("b16", np.uint16), "b32": ("b32", np.uint32), "b64": ("b64", np.uint64)},
    **{"f32": ("f32", np.float32), "f64": ("f64", np.float64), "f16": ("b16", np.float16)},
}
"""The type by which a kind is loaded and stored, and numpy's."""
Array = npt.NDArray[Any]


def _register(kind: str) -> str:
    return "b16" if kind == "f16" else kind


def evaluate(body: str, result: str, *inputs: tuple[str, Array]) -> Array:
    """Return %d of kind `result` after `body`, which reads %a, %b and %c, one value a lane."""
    loads, registers = list[str](), [f".reg .{_register(result)} %d;"]
    for name, (kind, _) in zip("abc", inputs, strict=False):
        stored, dtype = _TYPES[kind]
        registers.append(f".reg .{_register(kind)} %{name};")
        loads += [
            f"ld.param.u64 %at, [{name}];",
            f"mad.wide.u32 %at, %lane, {np.dtype(dtype).itemsize}, %at;",
            f"ld.global.{stored} %{name}, [%at];",
        ]
    stored, dtype = _TYPES[result]
    out = np.zeros(LANES, dtype)
    kernel = ptx.parse(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry one(.param .u64 out"
        + "".join(f", .param .u64 {name}" for name, _ in zip("abc", inputs, strict=False))
        + ")\n{"
        + "".join(registers)
        + ".reg .b64 %at; .reg .b32 %lane; .reg .pred %p; .reg .pred %q; mov.u32 %lane, %tid.x;"
        + "".join(loads)
        + body
        + f"ld.param.u64 %at, [out]; mad.wide.u32 %at, %lane, {out.itemsize}, %at;"
        + f"st.global.{stored} [%at], %d; ret;}}"
    )["one"]
    arguments = [ptx.Buffer(out, initialised=False)]
    for kind, values in inputs:
        arguments.append(ptx.Buffer(np.resize(values, LANES).astype(_TYPES[kind][1]), writable=False))
    ptx.launch(kernel, grid=1, block=LANES, arguments=arguments)
    return out


@cache
def compiler() -> Compiler:
    return Compiler()


def compiled(source: str, entry: str, architecture: str = "sm_80") -> ptx.Kernel:
    """Return a kernel of a CUDA source that may include our headers."""
    found = compiler().compile(source, architecture=architecture, headers=headers())
    return ptx.parse(found.ptx)[entry]
