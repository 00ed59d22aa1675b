"""Accelerators as data: dense peaks by type, memory, bandwidths, and where each number is from.

Peaks are dense: data sheets of NVIDIA also print twice that, for structured sparsity. Links are bytes per
second in one direction; data sheets print the sum of both.
"""

from __future__ import annotations

from typing import Final

import msgspec

from zbmd.transport.errors import UserError


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator. peak: dense FLOP/s by type. memory: bytes. bandwidth: of its memory, bytes a second.

    link: to the others of its node, bytes a second in one direction. node: accelerators of a node. device: as
    CUDA names the very model that the numbers are of; another model of the chip has other ones.
    """

    name: str
    peak: dict[str, float]
    memory: float
    bandwidth: float
    link: float
    node: int
    source: str
    device: str = ""


_T, _GB = 1e12, 1e9
_TABLE: Final = (
    Accelerator(
        name="A100",
        device="NVIDIA A100-SXM4-80GB",
        peak={"fp32": 19.5 * _T, "tf32": 156 * _T, "bf16": 312 * _T},
        memory=80 * _GB,
        bandwidth=2_039 * _GB,
        link=300 * _GB,
        node=8,
        source="NVIDIA A100 data sheet, SXM 80 GB: NVLink 600 GB/s in both directions",
    ),
    Accelerator(
        name="H100",
        device="NVIDIA H100 80GB HBM3",
        peak={"fp32": 67 * _T, "tf32": 494.7 * _T, "bf16": 989.4 * _T, "fp8": 1_978.9 * _T},
        memory=80 * _GB,
        bandwidth=3_350 * _GB,
        link=450 * _GB,
        node=8,
        source="NVIDIA H100 data sheet, SXM, half of the peaks with sparsity; NVLink 900 GB/s both ways",
    ),
    Accelerator(
        name="H200",
        device="NVIDIA H200",
        peak={"fp32": 67 * _T, "tf32": 494.7 * _T, "bf16": 989.4 * _T, "fp8": 1_978.9 * _T},
        memory=141 * _GB,
        bandwidth=4_800 * _GB,
        link=450 * _GB,
        node=8,
        source="NVIDIA H200 data sheet, SXM: the chip of an H100 with other memory",
    ),
    Accelerator(
        name="B200",
        device="NVIDIA B200",
        peak={"fp32": 75 * _T, "tf32": 1_100 * _T, "bf16": 2_250 * _T, "fp8": 4_500 * _T},
        memory=180 * _GB,
        bandwidth=8_000 * _GB,
        link=900 * _GB,
        node=8,
        source="NVIDIA DGX B200 data sheet, an eighth of it; NVLink 1.8 TB/s in both directions",
    ),
    Accelerator(
        name="L4",
        device="NVIDIA L4",
        peak={"fp32": 30.3 * _T, "tf32": 60 * _T, "bf16": 121 * _T, "fp8": 242.5 * _T},
        memory=24 * _GB,
        bandwidth=300 * _GB,
        link=32 * _GB,
        node=8,
        source="NVIDIA L4 data sheet, half of the peaks with sparsity; PCIe 4.0 x16, 64 GB/s both ways",
    ),
    Accelerator(
        name="MI300X",
        peak={"fp32": 163.4 * _T, "tf32": 653.7 * _T, "bf16": 1_307.4 * _T, "fp8": 2_614.9 * _T},
        memory=192 * _GB,
        bandwidth=5_300 * _GB,
        link=448 * _GB,
        node=8,
        source="AMD Instinct MI300X data sheet; seven links of 128 GB/s in both directions",
    ),
)
ACCELERATORS: Final = {one.name.lower(): one for one in _TABLE}


def of_device(name: str) -> Accelerator | None:
    """Return the accelerator that CUDA calls so; None if the table does not have that very model."""
    return next((one for one in _TABLE if one.device and one.device == name), None)


def accelerator(name: str) -> Accelerator:
    """Return an accelerator of the table. Raises `UserError` for one that it does not have."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        known = ", ".join(one.name for one in _TABLE)
        raise UserError(f"expected one of {known}, got {name!r}")
    return found
