"""The table of all kernels: sources, entries, architectures, what each may use, and which compute what.

The tests compile every kernel for its architectures and hold ptxas's report against the budget; the engine
reads the same table to launch. Products and attention have kernels for every architecture and kernels for
Hopper: `choose_product` and `choose_attention` are the rule between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final, Literal

from zbmd.training.ops.cuda.compiler import Compiled, Compiler
from zbmd.training.ops.fp8 import why_not_in_fp8

PACKAGE: Final = __name__.rpartition(".")[0]
PORTABLE: Final = ("sm_80", "sm_90a")
HOPPER: Final = "sm_90a"
MatmulPrecision = Literal["default", "fp8"]
"""The precision of linear layers: the dtype of activations, or E4M3 with a scale for each block."""
MATMUL_PRECISIONS: Final[tuple[MatmulPrecision, ...]] = ("default", "fp8")
FP8: Final = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEntry:
    """One kernel. Its arguments are described at its definition in the source."""

    name: str
    source: str
    """A file beside this module, or in the folder `hopper`."""
    block: int
    """Threads of a block."""
    registers: int
    """At most, of a thread."""
    shared: int = 0
    """Bytes of static shared memory."""
    dynamic: int = 0
    """Bytes of dynamic shared memory, an argument of the launch."""
    architectures: tuple[str, ...] = PORTABLE


def _both(source: str, registers: int, *names: str, block: int = 256, shared: int = 0) -> list[KernelEntry]:
    """Return kernels that exist for float32 and bfloat16."""
    return [
        KernelEntry(name=f"{name}_{kind}", source=source, block=block, registers=registers, shared=shared)
        for name in names
        for kind in ("f32", "bf16")
    ]


def _attention(depth: int, keys_block: int, *registers: int) -> list[KernelEntry]:
    """Return the kernels of attention with heads of `depth`; tiles of 64 rows are in shared memory."""
    tile, (forward, keys, queries) = 64 * depth * 2, registers
    entries = (
        ("attention", 128, forward, 5 * tile),
        ("attention_delta", 128, 32, 0),
        ("attention_keys_grad", keys_block, keys, 6 * tile),
        ("attention_queries_grad", 128, queries, 6 * tile),
    )
    return [
        KernelEntry(
            name=f"{name}_{depth}", source="attention.cu", block=block, registers=most, dynamic=dynamic
        )
        for name, block, most, dynamic in entries
    ]


def _attention_by_wgmma(depth: int, *registers: int) -> list[KernelEntry]:
    """Return the kernels of `_attention` for Hopper: a block has 128 rows, and stages of 64 that change."""
    own, stages = 128 * depth * 2, 4 * 64 * depth * 2
    parts = (
        ("", "hopper/attention.cu", own),
        ("_keys_grad", "hopper/attention_grad.cu", 2 * own),
        ("_queries_grad", "hopper/attention_grad.cu", 2 * own),
    )
    return [
        KernelEntry(
            name=f"attention_wgmma{part}_{depth}",
            source=source,
            block=256,
            registers=most,
            dynamic=kept + stages,
            architectures=(HOPPER,),
        )
        for (part, source, kept), most in zip(parts, registers, strict=True)
    ]


def _fp8() -> list[KernelEntry]:
    """Return the kernels of FP8: rounding, scales, and products of K-major operands."""
    source, hopper = "hopper/fp8.cu", PORTABLE[1:]
    formats = ("e4m3", "e5m2")
    found = [
        KernelEntry(
            name=f"fp8_quantise_{form}_{kind}",
            source=source,
            block=256,
            registers=40,
            shared=5120,
            architectures=hopper,
        )
        for form in formats
        for kind in ("f32", "bf16")
    ]
    found += [
        KernelEntry(name=f"fp8_scale_{one}", source=source, block=32, registers=48, architectures=hopper)
        for one in formats
    ]
    found += [
        KernelEntry(
            name=f"fp8_{kinds}",
            source=source,
            block=256,
            registers=200,
            shared=1024 if kinds.startswith("of_rows") else 0,
            dynamic=128 * 1024,
            architectures=hopper,
        )
        for kinds in (
            *("e4m3_e4m3_bf16", "e5m2_e4m3_bf16", "e4m3_e5m2_f32"),
            *("blocks_bf16", "of_rows_f32", "of_rows_bf16"),
        )
    ]
    found += [
        KernelEntry(
            name=f"fp8_{blocks}_{kind}",
            source=source,
            block=256,
            registers=32,
            shared=shared,
            dynamic=128 * 129 * 4,
            architectures=hopper,
        )
        for blocks, shared in (("rows", 0), ("rows_turned", 0), ("tiles", 1024), ("tiles_turned", 1024))
        for kind in ("f32", "bf16")
    ]
    return found


KERNELS: Final[tuple[KernelEntry, ...]] = (
    *_both("norm.cu", 32, "rms_norm", "layer_norm", "rms_norm_grad", "layer_norm_grad", shared=128),
    *_both("norm.cu", 40, "norm_gain_grad", shared=2112),
    *_both("norm.cu", 32, "column_sums", shared=1056),
    KernelEntry(name="sum_runs", source="norm.cu", block=256, registers=40),
    *_both("elementwise.cu", 32, "gelu", "gelu_grad", "squared_relu", "squared_relu_grad", "add", "add_bias"),
    *_both("elementwise.cu", 40, "dropout"),
    KernelEntry(name="cast_f32_bf16", source="elementwise.cu", block=256, registers=32),
    KernelEntry(name="cast_bf16_f32", source="elementwise.cu", block=256, registers=32),
    *_both("loss.cu", 32, "cross_entropy", "part_sums", shared=128),
    *_both("loss.cu", 32, "part_slopes"),
    *_both("loss.cu", 40, "embedding", "embedding_grad"),
    *_both("optimizers.cu", 40, "adamw", "sgd", "nesterov", "lion"),
    *_both("optimizers.cu", 32, "block_squares", shared=128),
    KernelEntry(name="norm_and_clip", source="optimizers.cu", block=32, registers=40),
    KernelEntry(name="state_sums", source="optimizers.cu", block=256, registers=40, shared=256),
    # Two blocks of 128 registers a thread and 64 KiB fit a multiprocessor.
    *(
        KernelEntry(
            name=f"matmul_{form}_{kind}", source="matmul.cu", block=256, registers=128, dynamic=64 * 1024
        )
        for form in ("nn", "nt", "tn")
        for kind in ("f32", "bf16")
    ),
    *(
        KernelEntry(name=f"tf32_{form}_f32", source="matmul.cu", block=256, registers=most, dynamic=64 * 1024)
        for form, most in (("nn", 128), ("nt", 128), ("tn", 152))
    ),
    *(
        KernelEntry(
            name=f"tma_{form}_{kind}",
            source="hopper/products_tma.cu",
            block=288,
            registers=224,
            dynamic=192 * 1024 + 64,
            architectures=("sm_90a",),
        )
        for form in ("nn", "nt", "tn")
        for kind in ("f32", "bf16")
    ),
    *_fp8(),
    KernelEntry(name="cache_rows", source="cached.cu", block=256, registers=40),
    KernelEntry(name="attention_cached", source="cached.cu", block=128, registers=64, shared=4128),
    *_attention_by_wgmma(64, 120, 176, 128),
    *_attention_by_wgmma(128, 168, 248, 176),
    *_attention(64, 128, 160, 248, 176),
    *_attention(128, 256, 200, 255, 240),
)

BY_NAME: Final[Mapping[str, KernelEntry]] = {kernel.name: kernel for kernel in KERNELS}


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels that compute a product, or attention, of one shape.

    prefix: of their names. tile: the rows and columns of a product, or the queries and keys, of a block.
    """

    prefix: str
    tile: tuple[int, int]
    reason: str
    is_tiled: bool = False
    """Whether operands are given as tensor maps."""


PORTABLE_PRODUCTS: Final = Choice("matmul", (128, 128), "mma.sync: wgmma needs compute capability 9.0")
HOPPER_PRODUCTS: Final = Choice("tma", (128, 256), "wgmma, with tiles brought by tensor maps", is_tiled=True)
NARROW_PRODUCTS: Final = Choice(
    "matmul", (128, 128), "mma.sync: at most 128 columns leave half of a tile of wgmma empty"
)
FP8_PRODUCTS: Final = Choice("fp8", (128, 128), "wgmma of E4M3, with a scale for each block of both operands")
PORTABLE_ATTENTION: Final = Choice("attention", (64, 64), "mma.sync: wgmma needs compute capability 9.0")
HOPPER_ATTENTION: Final = Choice("attention_wgmma", (128, 64), "wgmma, in tiles of 128 queries")
SHORT_ATTENTION: Final = Choice(
    "attention", (64, 64), "mma.sync: sequences of at most 64 tokens leave half of a tile of wgmma empty"
)


def choose_product(architecture: str, columns: int, *, fp8_depth: int = 0) -> Choice:
    """Return what computes a product with so many columns. All choices but FP8 have the same bits.

    fp8_depth: elements that a sum is over, of a product that is asked for in FP8.
    """
    why_not = why_not_in_fp8(fp8_depth) if architecture == HOPPER else "FP8 needs compute capability 9.0"
    if fp8_depth and not why_not:
        return FP8_PRODUCTS
    if architecture != HOPPER:
        choice = PORTABLE_PRODUCTS
    else:
        choice = NARROW_PRODUCTS if columns <= PORTABLE_PRODUCTS.tile[1] else HOPPER_PRODUCTS
    return replace(choice, reason=f"{why_not}: bf16, by {choice.reason}") if fp8_depth else choice


def product_kernel(choice: Choice, form: str, kind: str) -> str:
    """Return the kernel that computes a product by `choice`; see `CudaOperators.multiply`."""
    if choice == FP8_PRODUCTS:
        return f"fp8_of_rows_{kind}" if form == "tn" else f"fp8_blocks_{kind}"
    return f"{choice.prefix}_{form}_{kind}"


def choose_attention(architecture: str, length: int) -> Choice:
    """Return what computes attention of sequences of this length, whatever their number."""
    if architecture != HOPPER:
        return PORTABLE_ATTENTION
    return SHORT_ATTENTION if length <= PORTABLE_ATTENTION.tile[0] else HOPPER_ATTENTION


@cache
def read_source(name: str) -> str:
    """Return the text of a source or a header, by its path from this module."""
    return resources.files(PACKAGE).joinpath(*name.split("/")).read_text()


def headers() -> dict[str, str]:
    """Return our headers, by name."""
    found = dict[str, str]()
    for folder in ("", "hopper/"):
        here = resources.files(PACKAGE).joinpath(folder)
        names = (one.name for one in here.iterdir() if one.name.endswith(".cuh"))
        found |= {name: read_source(folder + name) for name in sorted(names)}
    return found


def compile_source(compiler: Compiler, source: str, architecture: str) -> Compiled:
    """Return all kernels of a source, compiled. Raises `CompileFailed`."""
    return compiler.compile(read_source(source), architecture=architecture, headers=headers(), name=source)
