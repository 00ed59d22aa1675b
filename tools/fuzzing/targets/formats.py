"""Targets that read checkpoints of other programs, and compiled kernels."""

from __future__ import annotations

import contextlib
import hashlib
from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from zbmd.tools.fuzzing.target import Broken, as_file, file_target, target
from zbmd.tools.runs.launches import LAUNCH_DECODER
from zbmd.tools.telemetry.diagnosis.findings import as_text
from zbmd.tools.telemetry.diagnosis.log_text import evidence_in
from zbmd.tools.telemetry.diagnosis.rules import diagnose
from zbmd.training.checkpoint.formats.safetensors_folder import SafetensorsFile
from zbmd.training.checkpoint.formats.tensors import Meta, Tensor, decode_meta, encode_meta
from zbmd.training.model.hugging_face import INDEX_NAME, WEIGHTS_NAME, read_index
from zbmd.training.ops.cuda.compiler import DIGEST_BYTES, Compiled, decode_entry, encode_entry
from zbmd.training.profiler.announcements import read_announcements
from zbmd.training.profiler.metrics import decode_metrics
from zbmd.transport.errors import UserError

file_target(
    "gpt2.index",
    "the index of a model in several safetensors files",
    (b'{"metadata":{"total_size":8},"weight_map":{"w":"model-00001-of-00002.safetensors"}}',),
    UserError,
    file=INDEX_NAME,
)(read_index)


def _meta_seeds() -> tuple[bytes, ...]:
    tensors = (Tensor("model.w", "weights", "w", "float32", (2, 3)),)
    return (encode_meta(Meta(version=1, plan="{}", loss_scale=(2.0,), tensors=tensors)).tobytes(),)


def _file_seeds() -> tuple[bytes, ...]:
    return (save({"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.int8)}, metadata={"format": "pt"}),)


@target(
    "formats.meta", "what a folder of torch.distributed.checkpoint keeps of a run", _meta_seeds, UserError
)
def _meta(data: bytes) -> None:
    decode_meta(data, Path("dcp"))


@target("formats.safetensors", "a safetensors file, tensor by tensor", _file_seeds, UserError)
def _safetensors(data: bytes) -> None:
    with as_file(data, WEIGHTS_NAME) as path, closing(SafetensorsFile(path)) as file:
        for name, tensor in file.tensors.items():
            if file.read(name).nbytes != tensor.nbytes:
                raise Broken(f"{tensor}")


def _kernel_seeds() -> tuple[bytes, ...]:
    entry = encode_entry(Compiled(ptx=".version 9.0", cubin=b"\x7fELF", log="ptxas info"))
    return (entry[DIGEST_BYTES:],)


@target("kernels.cache", "a compiled kernel in the user's cache", _kernel_seeds)
def _kernel(data: bytes) -> None:
    found = decode_entry(hashlib.sha256(data).digest() + data)
    if found is not None and decode_entry(encode_entry(found)) != found:
        raise Broken(f"{found}")


@target(
    "profile.announcements",
    "the runs and deaths that are announced to a dashboard",
    lambda: (b'{"kind":"run","directory":"/r"}\n{"kind":"lost","rank":1,"incarnation":2,"cause":"x"}\n',),
)
def _announcements(data: bytes) -> None:
    read_announcements(data)


@target(
    "launches.lines",
    "the record of a launch",
    lambda: (
        b'{"kind":"rank","at_ns":1,"rank":0,"incarnation":1,"pid":9}',
        b'{"kind":"note","at_ns":1,"text":"node b is lost"}',
        b'{"kind":"end","at_ns":3,"outcome":"failed","reason":"r","exit_code":1}',
    ),
)
def _launch(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        LAUNCH_DECODER.decode(data)


@target(
    "diagnosis.text",
    "what a launcher has printed, which is diagnosed",
    lambda: (
        b'[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py", line 3, in f\n'
        b"[rank1]: ValueError: bad\n[zbmd]: the run failed: rank1 failed: exit code 1; on-loss is stop. "
        b"The first failure was rank 1's: exit code 1: ValueError: bad. Its traceback is above.\n",
        b"[zbmd]: no progress: rank 1 never entered all_reduce #9; rank1 is at a.py:3 in f; it ends\n"
        b"[zbmd]:    a.py:3 in f\n[zbmd]: the run failed: The first failure was rank 0's: killed (SIGBUS)\n",
    ),
)
def _printed(data: bytes) -> None:
    found = evidence_in(data.decode(errors="replace").splitlines(), "fuzzed")
    if found is not None and not as_text(diagnose(found)):
        raise Broken("nothing is said")


@target(
    "profile.metrics",
    "the metrics of a user's program",
    lambda: (
        b'{"rank":0,"incarnation":1,"began_ns":1,"at_ns":2,"series":[["a","counter","",[["b","c"]],1.5]]}',
    ),
)
def _metrics(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        decode_metrics(data)
