"""`python -m zbmd.tools.fuzzing`: any bytes at every place that decodes bytes from outside.

Each target is given inputs made from valid ones for its share of the time; it may refuse them with the errors
that it documents, and must do nothing else. With atheris (the `fuzz` extra) half of the time is led by
coverage. A finding is saved as a file, and told with the command that repeats it. Exit code: 0 nothing found,
1 something was, 2 bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zbmd.tools.cli.options import script_parser
from zbmd.tools.fuzzing import registry
from zbmd.tools.fuzzing.coverage import ARTIFACT_PREFIX, is_installed
from zbmd.tools.fuzzing.mutate import mutate
from zbmd.tools.fuzzing.target import (
    Broken,
    Hang,
    Target,
    bounded_in_memory,
    bounded_in_time,
    open_descriptors,
    refuses,
)
from zbmd.tools.sim.scenarios import quietly
from zbmd.transport.errors import UserError

SECONDS_DEFAULT = 60.0
SECONDS_MAX = 7 * 24 * 3600.0
MEASURED_EVERY = 16
"""One input in so many is run with its memory measured, which takes some three times as long."""
COVERAGE_GRACE_S = 60.0
"""Time that the process of atheris may take beside its share: imports, and an input that hangs."""
OUTPUT_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzFailure:
    """An input that was not refused as it should have been."""

    target: str
    path: Path
    why: str

    def __str__(self) -> str:
        command = f"python -m zbmd.tools.fuzzing {self.target} --input {shlex.quote(str(self.path))}"
        return f"{self.target}: {self.why}\nagain: {command}"


@dataclass(slots=True)
class Tally:
    """Result of fuzzing one target."""

    inputs: int = 0
    taken: int = 0


def try_input(target: Target, data: bytes, *, measured: bool = False) -> bool:
    """Run one input: whether it was taken, not refused. Raises what is a finding."""
    with bounded_in_time():
        if not measured:
            return refuses(target, data) is None
        with bounded_in_memory(target, len(data)):
            return refuses(target, data) is None


def fuzz(target: Target, seconds: float, seed: int, directory: Path, tally: Tally) -> FuzzFailure | None:
    """Try inputs for `seconds`, in the order that the seed gives, until one is a finding."""
    rng = random.Random(f"{seed}/{target.name}")
    corpus = target.seeds()
    for data in corpus:
        refuses(target, data)
    before = open_descriptors()
    end_s = time.monotonic() + seconds
    data = b""
    try:
        while time.monotonic() < end_s:
            data = mutate(rng, corpus)
            tally.taken += try_input(target, data, measured=tally.inputs % MEASURED_EVERY == 0)
            tally.inputs += 1
        if open_descriptors() > before:
            raise Broken(f"{open_descriptors() - before} descriptors were left open on the way")
    except (Exception, Hang) as error:  # noqa: BLE001 (whatever it is: it is a finding)
        traceback.print_exception(error)
        return save(target, data, f"{type(error).__name__}: {str(error)[:200]}", directory)
    return None


def save(target: Target, data: bytes, why: str, directory: Path) -> FuzzFailure:
    """Keep an input in a file that is named by what it holds."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return FuzzFailure(target=target.name, path=path, why=why)


def fuzz_by_coverage(
    targets: Sequence[Target], seconds: float, seed: int, directory: Path
) -> tuple[list[FuzzFailure], str]:
    """Have atheris try inputs of all targets for `seconds`: what it found, and its final report."""
    with tempfile.TemporaryDirectory(prefix="zbmd-fuzz-") as scratch:
        arguments = [str(seed % (1 << 31)), str(max(1, round(seconds))), scratch, *(t.name for t in targets)]
        command = [sys.executable, "-m", "zbmd.tools.fuzzing.coverage", *arguments]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds + COVERAGE_GRACE_S,
                check=False,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"atheris did not end {COVERAGE_GRACE_S:g} s after its time was up.") from None
        lines = done.stdout.splitlines()
        findings: list[FuzzFailure] = []
        for file in sorted(Path(scratch).glob(f"{ARTIFACT_PREFIX}*")):
            data = file.read_bytes()
            target = targets[data[0] % len(targets)] if data else targets[0]
            findings.append(save(target, data[1:], f"atheris: {file.name}", directory))
    if done.returncode != 0 and not findings:
        raise UserError(
            "atheris ended with code " + "\n".join([str(done.returncode), *lines[-OUTPUT_LINES:]])
        )
    if findings:
        print("\n".join(lines[-OUTPUT_LINES:]))
    told = [line for line in lines if line.startswith(("Done ", "stat::number_of_executed_units"))]
    return findings, "; ".join(told)


def repeat(target: Target, path: Path) -> int:
    """Run one saved input as it was: exit code 1 if it is a finding still."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    try:
        with quietly():
            taken = try_input(target, data, measured=True)
    except (Exception, Hang) as error:  # noqa: BLE001 (it is what was asked for)
        traceback.print_exception(error)
        return 1
    print(f"{target.name}: {len(data)} bytes, {'taken' if taken else 'refused'}, as documented")
    return 0


def campaign(targets: Sequence[Target], seconds: float, seed: int, directory: Path) -> list[FuzzFailure]:
    """Fuzz every target for its share of the time, told as it goes on."""
    findings: list[FuzzFailure] = []
    led = is_installed()
    share_s = seconds / len(targets) / (2 if led else 1)
    for target in targets:
        tally = Tally()
        with quietly():
            finding = fuzz(target, share_s, seed, directory, tally)
        print(f"{target.name:24} {tally.inputs:8,} inputs, {tally.taken:7,} taken", flush=True)
        if finding is not None:
            print(finding, flush=True)
            findings.append(finding)
    if led:
        found, words = fuzz_by_coverage(targets, seconds / 2, seed, directory)
        print(f"atheris, by coverage: {words}", flush=True)
        for finding in found:
            print(finding, flush=True)
        findings += found
    return findings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = script_parser("fuzzing", __doc__)
    made.add_argument("targets", nargs="*", metavar="TARGET", help="a target, or the first part of its name")
    made.add_argument("--list", action="store_true", help="tell the targets, and what each takes")
    made.add_argument(
        "--seconds", type=float, default=SECONDS_DEFAULT, help="for all targets together (%(default)s)"
    )
    made.add_argument("--seed", type=int, help="the same inputs again; default: a fresh one, printed")
    made.add_argument("--input", type=Path, metavar="FILE", help="run this one input of the target")
    made.add_argument(
        "--save", type=Path, metavar="DIR", default=Path("zbmd-fuzz"), help="where findings go (%(default)s)"
    )
    return made


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says. Raises `UserError`."""
    if arguments.list:
        width = max(map(len, registry.TARGETS))
        for target in registry.TARGETS.values():
            print(f"{target.name:{width}}  {target.what}")
        return 0
    if not 0 < arguments.seconds <= SECONDS_MAX:
        raise UserError(f"--seconds {arguments.seconds:g} is out of range: more than 0, and at most 7 days.")
    named = [target for name in arguments.targets for target in registry.find(name)]
    named = named or list(registry.TARGETS.values())
    if arguments.input is not None:
        if len(named) != 1:
            raise UserError("--input takes the name of the one target whose input it is.")
        return repeat(named[0], arguments.input)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    engine = (
        "half of the time by coverage" if is_installed() else "by mutation alone: atheris is not installed"
    )
    print(f"seed {seed}, {len(named)} targets, {arguments.seconds:g} s, {engine}", flush=True)
    findings = campaign(named, arguments.seconds, seed, arguments.save)
    print(f"{len(findings)} findings with seed {seed}")
    return 1 if findings else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    try:
        return run(parser().parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
