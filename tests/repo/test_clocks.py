"""Deadlines, timeouts and durations are monotonic: the wall clock is read only to tell people when it was."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("transport", "actors", "collectives", "training", "tools")
WALL_CLOCK = re.compile(r"(.*\.)?(time\.time(_ns)?|datetime\.(now|utcnow|today)|clock_gettime(_ns)?)")
NAMED = re.compile(r"\.[\s\\]*(time(_ns)?|now|utcnow|today|clock_gettime(_ns)?)\b")
"""The last part of what that matches, in the text of a module: most have none, and are not parsed."""
NATIVE_WALL_CLOCK = re.compile(r"CLOCK_REALTIME|gettimeofday|time\.time(_ns)?\(")
# Each reads it for a stamp or for people; none waits by it, or measures with it.
READERS = {
    "actors/replay/recording.py": "the time that a recorded actor receives",
    "actors/cluster/node/incarnation.py": "how far a node's clock is from another's, for its warning",
    "actors/cluster/heartbeats/heartbeat.h": "makes the kernel's stamp monotonic, between bounds",
    "tools/runs/snapshots.py": "the age of a checkpoint, by the time of its file",
    "actors/core/context.py": "an actor's own wall clock",
    "actors/process/log.py": "the time of a line of the log",
    "collectives/group/flight_dump.py": "when a dump was taken, beside the monotonic clock",
    "collectives/torch/flights.py": "when calls began, in the dump of PyTorch's recorder",
    "tools/lab/faults/slow.py": "when a drawn run began, beside the monotonic clock",
    "tools/node/recorder.py": "when a launch began, beside the monotonic clock",
    "tools/node/run_many.py": "when a launch began, for what outlives it to tell launches apart",
    "tools/telemetry/diagnosis/cluster.py": "how far the clocks of nodes are from this one",
    "tools/telemetry/otlp.py": "the stamp of metrics that are sent",
    "training/profiler/metrics.py": "the stamps of a file of metrics, which tell processes of a rank apart",
    "training/profiler/profiler.py": "when a run began, beside the monotonic clock",
    "transport/link/_link.pyx": "the stamp of a frame",
    "transport/link/base.py": "that clock, as its default",
    "transport/capture/recorder.py": "the anchor of a log",
}


def reads(text: str) -> Iterator[int]:
    """The lines of a module that read the wall clock, or name what reads it."""
    for node in ast.walk(ast.parse(text)) if NAMED.search(text) else ():
        if isinstance(node, ast.Attribute) and WALL_CLOCK.fullmatch(ast.unparse(node)):
            yield node.lineno


def sources(suffix: str) -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for path in (ROOT / layer).rglob(f"*{suffix}")
        if "bench" not in path.parts
    )


@pytest.mark.parametrize("path", sources(".py"))
def test_only_those_that_tell_the_time_read_the_wall_clock(path: str) -> None:
    found = list(reads((ROOT / path).read_text()))
    assert not found or path in READERS, f"{path}:{found}: wait and measure by the monotonic clock"


@pytest.mark.parametrize("path", [*sources(".pyx"), *sources(".h")])
def test_nor_does_compiled_code(path: str) -> None:
    assert not NATIVE_WALL_CLOCK.search((ROOT / path).read_text()) or path in READERS, path


@pytest.mark.parametrize(
    "text",
    ["end = time.time() + 5", "clock = time.time_ns", "datetime.datetime.now()", "(time.\n time_ns())"],
)
def test_a_planted_reader_is_seen(text: str) -> None:
    assert list(reads(text))
