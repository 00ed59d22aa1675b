"""Compare the bits of training runs with those of another commit: weights, moments and losses.

    python -m zbmd.tools.dev.same_bits --against main~3               all kinds of runs
    python -m zbmd.tools.dev.same_bits --against main~3 --only zero

Tests compare the runs of one commit with each other, so a change of all of them goes unseen, and stored
digests depend on the processor and its BLAS. This builds the other commit in a work tree of its own, runs
every setting there and here, and compares. A change that is meant to keep bits is run against the commit
before it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.tools.chaos.small_job import write_text

ROOT: Final = Path(__file__).resolve().parents[2]
SHAPE: Final = (
    *("--width", "32", "--heads", "2", "--layers", "2", "--context", "16", "--shards", "4"),
    *("--sequences-per-shard", "1", "--steps", "20", "--checkpoint-every", "0", "--evaluate-every", "6"),
)
RUN_S_MAX: Final = 300.0
MESHES: Final = ("dp=1", "dp=2", "pp=2", "tp=2", "dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2")
SHARDED_MESHES: Final = (
    *(("dp=2,tp=2", stage, "float32") for stage in (1, 2, 3)),
    *(("dp=2,pp=2", stage, "float32") for stage in (1, 2, 3)),
    *(("dp=2,fsdp=2", stage, "float32") for stage in (1, 3)),
    *(("dp=2,tp=2", 3, "bfloat16"), ("dp=2,pp=2", 1, "float16"), ("dp=2,pp=2,tp=2", 2, "float32")),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. `ranks`: under `zbmd-node run`; 0 for a command that starts its ranks itself."""

    name: str
    ranks: int
    arguments: tuple[str, ...]


def settings() -> list[Setting]:
    """Return every setting: kinds of runs, with precisions, optimizers and dropout."""
    plain_of = ("--mesh", "dp=1", "--plain", "on", "--precision")
    found = [Setting(f"plain {storage}", 1, (*plain_of, storage)) for storage in STORAGES]
    found += [Setting(f"dp={ranks}", ranks, ("--mesh", f"dp={ranks}")) for ranks in (1, 2, 3)]
    found += [
        Setting(f"zero{stage} {storage} {optimizer}", 0, _zero(stage, storage, optimizer))
        for stage, (storage, optimizer) in itertools.product(
            (1, 2, 3),
            (("float32", "adamw"), ("bfloat16", "adamw"), ("float16", "adamw"), ("float32", "muon")),
        )
    ]
    found += [
        Setting(f"zero{stage} {mesh} {storage}", 0, _zero(stage, storage, "adamw", mesh))
        for mesh, stage, storage in SHARDED_MESHES
    ]
    plain = [(mesh, ()) for mesh in MESHES]
    varied: list[tuple[str, tuple[str, ...]]] = [
        (mesh, option)
        for mesh, option in itertools.product(("dp=2", "pp=2", "tp=2"), OPTIONS)
        if (mesh, option) != ("tp=2", ("--recompute", "on"))
    ]
    return found + [
        Setting(f"mesh {mesh} {' '.join(option)}".rstrip(), 0, ("--mesh", mesh, *option))
        for mesh, option in [*plain, *varied]
    ]


STORAGES: Final = ("float32", "bfloat16", "float16")
OPTIONS: Final = (
    *(("--precision", "bf16"), ("--precision", "f16"), ("--optimizer", "lion"), ("--optimizer", "muon")),
    *(("--dropout", "0.1"), ("--recompute", "on")),
)


def _zero(stage: int, storage: str, optimizer: str, mesh: str = "dp=2") -> tuple[str, ...]:
    return ("--mesh", mesh, "--zero", str(stage), "--precision", storage, "--optimizer", optimizer)


def command_of(setting: Setting, tree: Path, data: Path, out: Path) -> list[str]:
    """Return the command of a setting by the code of `tree`, for the interpreter that runs this."""
    shared: tuple[str, ...] = (*SHAPE, "--data", str(data), "--out", str(out))
    start = "from zbmd.tools.entry.scripts import node; raise SystemExit(node())"
    if setting.ranks and (tree / "training/replicated/job.py").exists():  # it was another job's
        words = list(setting.arguments[2:])
        if "--plain" in words:
            words = ["--plain", "--storage", words[-1]]
        launch = ("run", "-n", str(setting.ranks), "-m", "zbmd.training")
        return [sys.executable, "-c", start, *launch, *shared, *words]
    given = setting.arguments
    if "--zero" in given and "," in given[1] and not (tree / "training/sharded/zero_trainer.py").exists():
        given = (*given[:2], *given[4:])  # ZeRO changes no bit of a mesh
    if "--zero" in given or setting.ranks:
        shared = (*shared, "--evaluate-windows", "512")
    ranks = 1
    for axis in given[1].split(","):
        ranks *= int(axis.partition("=")[2])
    return [sys.executable, "-m", "zbmd", "train", "--ranks", str(ranks), *shared, *given]


OF_RUN: Final = """
import hashlib, sys
from contextlib import closing
from pathlib import Path
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint.plan import read_plan
from zbmd.training.checkpoint.sharded import checkpoint_in, open_state, read_names
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.optim import arrays_of
from zbmd.transport.errors import UserError
path = checkpoint_in(Path(sys.argv[1]))
text = read_names(path).plan
plan = read_plan(text)
with closing(open_state(path, plan=text)) as saved:
    digest = hashlib.sha256(repr(saved.loss_scale).encode())
    for array in arrays_of(plan.training.optimizer):
        for slot in ParameterLayout.of(parameter_shapes(plan.model)).slots:
            try:
                digest.update(saved.parameter(array, slot).data)
            except UserError:  # Muon's second moment is 0, and earlier versions wrote it
                digest.update(bytes(4 * slot.size))
print(digest.hexdigest())
"""
"""Prints the digest of weights, moments and loss scale in the last checkpoint of a run."""


def bits_of(tree: Path, setting: Setting, data: Path, out: Path) -> dict[str, object]:
    """Run a setting with the code of `tree`; return what is compared. Raises `CalledProcessError`."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OPENBLAS_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=out.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=True,
        )
        return done.stdout

    printed = run(*command_of(setting, tree, data, out)).strip().splitlines()[-1]
    result = json.loads(printed[printed.index("{") :])
    found = {name: result[name] for name in ("steps", "loss_last", "held_out_loss", "weights_sha256")}
    found["state_sha256"] = run(sys.executable, "-c", OF_RUN, str(out)).strip()
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [line for line in lines if line["step"]]  # older commits do not evaluate a run's beginning
        kept = sorted([line["step"], str(line.get("loss")), str(line.get("held_out_loss"))] for line in lines)
        found["losses_sha256"] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    return found


def build(commit: str, tree: Path) -> None:
    """Check `commit` out in `tree` and compile its modules. Raises `CalledProcessError`."""
    subprocess.run(
        ["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree,
        check=True,
        capture_output=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, with a line for each setting. Exit code 1: bits differ, or a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m zbmd.tools.dev.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose name has this in it")
    arguments = parser.parse_args(argv)
    chosen = [setting for setting in settings() if arguments.only in setting.name]
    differing = 0
    with tempfile.TemporaryDirectory(prefix="zbmd-same-bits-") as scratch:
        tree, data = Path(scratch) / "tree", write_text(Path(scratch) / "text")
        build(arguments.against, tree)
        try:
            for number, setting in enumerate(chosen):
                there, here = Path(scratch) / f"there-{number}", Path(scratch) / f"here-{number}"
                try:
                    before, after = (
                        bits_of(code, setting, data, out) for code, out in ((tree, there), (ROOT, here))
                    )
                except subprocess.CalledProcessError as error:
                    print(f"{setting.name}: failed\n{error.stderr[-2000:]}", flush=True)
                    differing += 1
                    continue
                changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
                print(
                    f"{setting.name}: {', '.join(sorted(changed)) + ' differ' if changed else 'equal'}",
                    flush=True,
                )
                differing += bool(changed)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(f"{len(chosen)} settings, {differing} differ from {arguments.against}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
