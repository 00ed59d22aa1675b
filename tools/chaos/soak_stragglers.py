"""Whether a rank is named a straggler that is none, on a machine with whatever other load it has.

    python -m zbmd.tools.chaos.soak_stragglers --folder F [--kind train|torch] [--minutes 60]
    python -m zbmd.tools.chaos.soak_stragglers --folder F --replay

Runs two ranks of `zbmd train`, or of a resilient loop of PyTorch, which sleep alike between their steps, so
that the soak takes about half a core. Beside the machine's own load it starts bursts of busy processes of
drawn numbers and lengths, on no rank's side. So every rank that is named is a false alarm. The exit code is 1
if there was one. Minutes, steps and alarms are kept in F: the same command goes on from there, and so does
one after a kill.

Each sample that the ranks judge is kept too, and `--replay` judges them again, with the machine as it is now:
it prints each alarm with the scores that led to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankReport
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.cli.options import script_parser
from zbmd.tools.cli.settings import cores
from zbmd.training.job.stragglers.machine import (
    Cleared,
    Entered,
    Moved,
    Named,
    Stepped,
    StragglerAction,
    StragglerEvent,
    StragglerMachine,
)
from zbmd.transport.host.files import write_atomically

RANKS: Final = 2
MINUTES_DEFAULT: Final = 60.0
PACE_MS_DEFAULT: Final = 150.0
STEPS_MAX: Final = 10_000_000
"""More than any soak makes: it is stopped by the clock."""
SAVE_EVERY_S: Final = 15.0
BURST_EVERY_S: Final = 8.0
"""The mean time between two bursts."""
BURST_MIN_S, BURST_MAX_S, BURST_TAIL = 0.03, 6.0, 1.1
"""Lengths of bursts are of a Pareto distribution with this exponent."""
BURSTS_KEPT: Final = 32
STATE_BYTES_MAX: Final = 64 << 20
ARENA_BYTES: Final = 64 << 20
STEP: Final = re.compile(rb"step (\d+) loss")
MODULE: Final = "zbmd.tools.chaos.soak_stragglers"
STOPPED: Final = "the soak is over"
TEXT: Final = "to be or not to be, that is the question. " * 500
RECIPE: Final = (
    *("--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--shards", "8"),
    *("--sequences-per-shard", "4", "--curve", "constant", "--evaluate-every", "0", "--mesh", "dp=2"),
    *("--evaluate-windows", "1", "--checkpoint-every", "0", "--steps", str(STEPS_MAX)),
)
LOOP_WIDTH, LOOP_BATCH, LOOP_BATCHES = 256, 128, 64


class Burst(msgspec.Struct, frozen=True):
    """Busy processes that the soak has started. ago_s: before the alarm that it is noted with."""

    ago_s: float
    seconds: float
    processes: int


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A rank was named, or cleared. at_s: of the soak; run: of those that it consists of."""

    at_s: float
    run: int
    step: int
    rank: int
    text: str
    over: bool
    load: float
    pressure: str
    """Of the processors, as the kernel says it."""
    bursts: tuple[Burst, ...]


class Soak(msgspec.Struct, kw_only=True):
    """The state of a soak. runs: jobs that it consists of so far."""

    kind: str
    seconds: float = 0.0
    steps: int = 0
    runs: int = 0
    bursts: int = 0
    load_sum: float = 0.0
    """Of the machine's load, times seconds."""
    alarms: list[Alarm] = []
    ends: list[str] = []
    """Of ranks that ended though nothing was to end them."""

    @property
    def false(self) -> list[Alarm]:
        """Return those that name a rank."""
        return [alarm for alarm in self.alarms if not alarm.over]


class RecordedMachine(StragglerMachine):
    """Keeps each event in a file, for `--replay`, and sleeps after it."""

    def __init__(self, file: IO[bytes] | None, pace_s: float) -> None:
        super().__init__()
        self._file, self._pace_s = file, pace_s

    def handle(self, event: StragglerEvent) -> list[StragglerAction]:
        """Take an event."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(_plain(event)) + b"\n")
        actions = super().handle(event)
        time.sleep(self._pace_s)
        return actions


def _plain(event: StragglerEvent) -> dict[str, Any]:
    if isinstance(event, Stepped):
        return {"step": event.step, "samples": event.samples.tolist()}
    return asdict(event)


def be_rank(kind: str, folder: Path, pace_s: float, environment: RankEnvironment) -> int:
    """Train until the process ends."""
    is_first = environment.rank == 0
    record = (folder / "samples.jsonl").open("ab", buffering=1 << 14) if is_first else None
    in_training = kind == "train"
    driver = "job.slow_ranks" if in_training else "torch.durable.slow_ranks"
    module: Any = importlib.import_module(f"zbmd.training.{driver}")
    module.StragglerMachine = lambda: RecordedMachine(record, pace_s if in_training else 0.0)
    if in_training:
        from zbmd.tools.entry import zbmd

        return zbmd.main(["train", "--data", str(folder / "text.txt"), "--out", str(folder / "out"), *RECIPE])
    loop(folder / "out", pace_s)
    return 0


def loop(out: Path, pace_s: float, *, passes: int = STEPS_MAX, on_straggler: str = "warn") -> None:
    """Train a perceptron in a resilient loop whose steps take a rank milliseconds.

    pace_s: pause after each step; passes: over the samples.
    """
    import zbmd.torch

    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    data: Any = importlib.import_module("torch.utils.data")
    nn = torch.nn
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    layers = [each for _ in range(3) for each in (nn.Linear(LOOP_WIDTH, LOOP_WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zbmd.torch.resilient(model, optimizer, out=out, on_straggler=on_straggler)
    samples = data.TensorDataset(torch.randn(LOOP_BATCH * LOOP_BATCHES, LOOP_WIDTH))
    for (x,) in run.batches(data.DataLoader(samples, LOOP_BATCH), epochs=passes):
        with run.step():
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            run.mean(loss=loss)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {run.steps} loss {run.metrics['loss']:.4f}", flush=True)
        time.sleep(pace_s)
    dist.destroy_process_group()


class Watch:
    """One run of the job, as its host sees it."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._before = soak.steps
        self._bursts: list[tuple[float, float, int]] = []
        self.over = False
        self.working = asyncio.Event()

    async def observe(self, event: HostEvent) -> None:
        """Take an event of the host."""
        match event:
            case RankReport(payload=payload) if payload.get("kind") == "straggler":
                self._alarm(payload)
            case RankReport(payload={"kind": "step", "version": int(step)}):
                self._step(step)
            case RankDown() if not self.over:
                self._soak.ends.append(f"rank {event.rank}: {event.reason}; {' / '.join(event.tail)[:2048]}")
            case _:
                pass

    def _alarm(self, payload: dict[str, Any]) -> None:
        now = time.monotonic()
        alarm = Alarm(
            at_s=self._soak.seconds,
            run=self._soak.runs,
            step=int(payload["step"]),
            rank=int(payload["rank"]),
            text=str(payload["text"]),
            over=bool(payload["over"]),
            load=os.getloadavg()[0],
            pressure=pressure(),
            bursts=tuple(Burst(now - at, seconds, count) for at, seconds, count in self._bursts),
        )
        self._soak.alarms.append(alarm)
        print(f"{self._soak.seconds / 60:.1f} min: step {alarm.step} {alarm.text}", flush=True)

    async def write_line(self, line: OutputLine) -> None:
        """Take a rank's line: its step."""
        found = STEP.search(line.text)
        if found:
            self._step(int(found[1]))

    def _step(self, step: int) -> None:
        self._soak.steps = self._before + step
        self.working.set()

    async def make_noise(self, draw: random.Random) -> None:
        """Start bursts of busy processes until it is cancelled."""
        while True:
            await asyncio.sleep(draw.expovariate(1 / BURST_EVERY_S))
            seconds = min(BURST_MAX_S, BURST_MIN_S * draw.paretovariate(BURST_TAIL))
            count = draw.randint(1, 2 * cores())
            self._bursts = [*self._bursts[1 - BURSTS_KEPT :], (time.monotonic(), seconds, count)]
            self._soak.bursts += 1
            command = ("timeout", f"{seconds:.3f}", "sh", "-c", "while :; do :; done")
            each = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
            await asyncio.gather(*(one.wait() for one in each))


def pressure() -> str:
    """Return what the kernel says on waits for processors; empty: nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return ""


async def run_once(
    soak: Soak, folder: Path, *, until_s: float, pace_ms: float, save: Callable[[], None]
) -> None:
    """Run a job until the soak has lasted so long, or the job ends."""
    soak.runs += 1
    run = folder / f"run{soak.runs}"
    run.mkdir(parents=True)
    (run / "text.txt").write_text(TEXT)
    watch = Watch(soak)
    arguments = ("--folder", str(run), "--kind", soak.kind, "--pace-ms", str(pace_ms))
    config = HostConfig(
        target=MODULE, is_module=True, arguments=arguments, world_size=RANKS, arena_bytes=ARENA_BYTES
    )
    host = Host(config, output=watch, observer=watch.observe)
    running = asyncio.create_task(host.run())
    noise = asyncio.create_task(watch.make_noise(random.Random(soak.runs)))
    started = asyncio.create_task(watch.working.wait())
    try:
        await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
        at = time.monotonic()
        while not running.done() and soak.seconds < until_s:
            await asyncio.wait([running], timeout=min(SAVE_EVERY_S, max(0.1, until_s - soak.seconds)))
            passed, at = time.monotonic() - at, time.monotonic()
            soak.seconds += passed
            soak.load_sum += os.getloadavg()[0] * passed
            await asyncio.to_thread(save)
    finally:
        watch.over = True
        noise.cancel()
        started.cancel()
        host.stop(STOPPED, kill=True)
        await asyncio.gather(noise, started, return_exceptions=True)
        result = await running
        if soak.seconds < until_s:
            soak.ends.append(f"run {soak.runs}: {result.reason}")
        save()


def soak_in(folder: Path, kind: str, minutes: float, pace_ms: float) -> Soak:
    """Go on with the soak in `folder` until it has lasted `minutes`."""
    path = folder / f"{kind}.json"
    soak = Soak(kind=kind)
    with contextlib.suppress(FileNotFoundError):
        soak = msgspec.json.decode(path.read_bytes()[:STATE_BYTES_MAX], type=Soak)

    def save() -> None:
        write_atomically(path, lambda file: file.write(msgspec.json.format(msgspec.json.encode(soak))))

    if soak.seconds < minutes * 60:
        uvloop.run(run_once(soak, folder / kind, until_s=minutes * 60, pace_ms=pace_ms, save=save))
    return soak


def replay(folder: Path, kind: str) -> int:
    """Judge the kept samples again; returns the number of alarms."""
    alarms = 0
    for path in sorted((folder / kind).glob("run*/samples.jsonl")):
        machine, steps = StragglerMachine(), 0
        for line in path.read_bytes().splitlines():
            found: dict[str, Any] = msgspec.json.decode(line)
            if "samples" in found:
                event: StragglerEvent = Stepped(found["step"], np.array(found["samples"]))
                steps += 1
            elif "ranks" in found:
                event = Entered(**{name: tuple(found[name]) for name in ("ranks", "shards", "alike")})
            else:
                event = Moved(tuple(found["shards"]))
            for action in machine.handle(event):
                alarms += isinstance(action, Named)
                assert isinstance(action, Named | Cleared)
                print(f"{path.parent.name} step {action.step} {action.text}\n{machine.scores.round(2)}")
        print(f"{path.parent.name}: {steps} steps")
    return alarms


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("chaos.soak_stragglers", __doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=("train", "torch"), default="train")
    parser.add_argument("--minutes", type=float, default=MINUTES_DEFAULT)
    parser.add_argument("--pace-ms", type=float, default=PACE_MS_DEFAULT, help="sleep after each step")
    parser.add_argument("--replay", action="store_true")
    arguments = parser.parse_args(argv)
    folder, kind = arguments.folder.resolve(), arguments.kind
    environment = RankEnvironment.read(os.environ)
    if environment is not None:
        return be_rank(kind, folder, arguments.pace_ms / 1e3, environment)
    if arguments.replay:
        return 1 if replay(folder, kind) else 0
    soak = soak_in(folder, kind, arguments.minutes, arguments.pace_ms)
    for alarm in soak.false:
        print(f"false alarm after {alarm.at_s / 60:.1f} min, step {alarm.step}: {alarm.text}")
    for end in soak.ends:
        print(f"ended: {end}")
    print(
        f"{kind}: {soak.seconds / 60:.1f} min of {RANKS} ranks on {cores()} cores, mean load "
        f"{soak.load_sum / max(soak.seconds, 1):.1f}, {soak.bursts} bursts: {soak.steps} steps, "
        f"{len(soak.false)} false alarms"
    )
    return 1 if soak.false or not soak.steps else 0


if __name__ == "__main__":
    sys.exit(main())
