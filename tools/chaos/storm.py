"""Kill ranks of small training jobs at any moment: the weights must stay the same.

    python -m zbmd.tools.chaos.storm                       ten minutes of it, with a fresh seed
    python -m zbmd.tools.chaos.storm --minutes 60 --seed 7
    python -m zbmd.tools.chaos.storm --only tp=2 --runs 50

`sweep` kills at points that are in the code; this kills by the clock, so also where no point is: while a
rank starts, meets the others, evaluates, prints its result, or takes over from one that was killed before.
Every setting of the sweep is run once undisturbed, then again and again with one or two kills. A seed says
which settings, how many kills, and when; whom that finds doing what is the machine's. Two ranks that die at
once may take the state along, and must then say so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankStarted
from zbmd.actors.process.log import log_to_stderr
from zbmd.tools.chaos.small_job import JobOutcome, run_small_job, write_text
from zbmd.tools.chaos.sweep import Setting, every_setting
from zbmd.tools.cli.options import script_parser
from zbmd.training.redundancy.machine import LOST_WITH_BUDDY
from zbmd.transport.errors import UserError

LIMIT_S: Final = 120.0
"""A run takes a second or two where nothing else does."""
TOLD_RUNS: Final = 50
TWO_KILLS: Final = 0.3
"""The part of runs that have two."""
SECOND_S: Final = (0.0, 1.0)
"""Range of the delay of the second kill: while a replacement starts, takes over, or has done so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormSetting:
    """A setting, and what is special about its runs."""

    setting: Setting
    links: str = "auto"
    offload: bool = False

    def __str__(self) -> str:
        return f"{self.setting} {self.links}{' offload' if self.offload else ''}"


def kinds() -> list[StormSetting]:
    """All that the storm is about."""
    settings = [setting for setting in every_setting() if setting.ranks > 1]
    others = [
        StormSetting(setting=Setting.of(zero=3), links="tcp"),
        StormSetting(setting=Setting.of(mesh="dp=2,pp=2"), links="tcp"),
        StormSetting(setting=Setting.of(zero=2), offload=True),
        StormSetting(setting=Setting.of(zero=3, mesh="dp=2,pp=2,tp=2")),
        StormSetting(setting=Setting.of(zero=1, mesh="dp=2,tp=2"), offload=True),
        StormSetting(setting=Setting.of(mesh="pp=2"), offload=True),
    ]
    return [StormSetting(setting=setting) for setting in settings] + others


@dataclass(slots=True)
class Victims:
    """The processes of a run, as its host reports them; some are killed by the clock."""

    chosen: random.Random
    pids: dict[int, int] = field(default_factory=dict[int, int])
    told: list[str] = field(default_factory=list[str])

    def see(self, event: HostEvent) -> None:
        """Keep who lives."""
        match event:
            case RankStarted(rank=rank, pid=pid):
                self.pids[rank] = pid
            case RankDown(rank=rank, pid=pid) if self.pids.get(rank) == pid:
                del self.pids[rank]
            case _:
                pass

    async def kill(self, delays_s: Sequence[float]) -> None:
        """Kill one that lives behind each of these."""
        began_s = time.monotonic()
        for delay_s in delays_s:
            await asyncio.sleep(delay_s)
            if not self.pids:
                continue
            rank = self.chosen.choice(sorted(self.pids))
            try:
                os.kill(self.pids[rank], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.told.append(f"rank {rank} at {time.monotonic() - began_s:.3f} s")


class Storm:
    """Runs, each in a directory of its own below `scratch`."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch, self._seed = scratch, seed
        self._data = write_text(scratch / "text")
        self._calm: dict[StormSetting, tuple[str, float]] = {}

    async def run(self, number: int, among: Sequence[StormSetting]) -> str:
        """One run; what was wrong with it, or "". Raises `UserError` if it fails without a kill, too."""
        chosen = random.Random(f"{self._seed}-{number}")
        kind = chosen.choice(among)
        if kind not in self._calm:
            began_s = time.monotonic()
            outcome = await self._once(kind, Victims(chosen), [])
            self._calm[kind] = outcome.digest, time.monotonic() - began_s
        digest, calm_s = self._calm[kind]
        delays_s = [chosen.uniform(0.0, calm_s)]
        if chosen.random() < TWO_KILLS:
            delays_s.append(chosen.uniform(*SECOND_S))
        victims = Victims(chosen)
        try:
            outcome = await self._once(kind, victims, delays_s)
        except UserError as error:
            if len(victims.told) > 1 and LOST_WITH_BUDDY in str(error):
                return ""
            return f"{kind}, {', '.join(victims.told)}: {error}"
        if outcome.digest != digest:
            return f"{kind}, {', '.join(victims.told)}: other bits\n{outcome.told}"
        return ""

    async def _once(self, kind: StormSetting, victims: Victims, delays_s: Sequence[float]) -> JobOutcome:
        out, files = self._scratch / "run", self._scratch / "files"
        files.mkdir()
        killing = asyncio.ensure_future(victims.kill(delays_s))
        try:
            return await run_small_job(
                out,
                self._data,
                world_size=kind.setting.ranks,
                links=kind.links,
                zero=kind.setting.zero,
                mesh=kind.setting.mesh,
                offload=files if kind.offload else None,
                limit_s=LIMIT_S,
                see=victims.see,
            )
        finally:
            killing.cancel()
            await asyncio.wait([killing])
            for folder in (out, files):
                shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("chaos.storm", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=sys.maxsize, metavar="N", help="at most so many")
    parser.add_argument("--seed", type=int, help="of the settings and moments (a fresh one)")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings that contain this text")
    return parser


async def _storm(
    arguments: argparse.Namespace, seed: int, among: Sequence[StormSetting]
) -> tuple[int, list[str]]:
    until_s, wrong, number = time.monotonic() + 60.0 * arguments.minutes, list[str](), 0
    with tempfile.TemporaryDirectory(prefix="zbmd-storm-") as scratch:
        storm = Storm(Path(scratch), seed)
        while number < arguments.runs and time.monotonic() < until_s:
            number += 1
            found = await storm.run(number, among)
            if found:
                wrong.append(found)
                print(f"run {number}: {found}", flush=True)
            if number % TOLD_RUNS == 0:
                print(f"{number} runs, {len(wrong)} wrong", flush=True)
    return number, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Exit code 1: a run ended with other weights, or not at all."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    among = [kind for kind in kinds() if arguments.only in str(kind)]
    if not among:
        parser.error(f"no setting contains {arguments.only!r}: there are {', '.join(map(str, kinds()))}")
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    log_to_stderr()
    print(f"seed {seed}, {len(among)} settings", flush=True)
    try:
        runs, wrong = asyncio.run(_storm(arguments, seed, among))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{runs} runs, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
