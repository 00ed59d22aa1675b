"""Each job goes on from what the others wrote, in real processes, with the bits of one that did all."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

import pytest
from support.jobs.by_words import plain_by, train_by
from support.jobs.small_jobs import SmallJobs

from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.entry import zbmd as cli
from zbmd.training.checkpoint.index import KEEP_DEFAULT
from zbmd.training.checkpoint.sharded import checkpoint_in, load_trained
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.transport.errors import UserError

SHAPE = {
    **{"width": "16", "heads": "2", "layers": "2", "context": "8", "shards": "4"},
    **{"sequences-per-shard": "1", "warmup": "2", "curve": "constant"},
}
ZERO_STAGES, MESHES = ("1", "3", "2"), (("pp=2", 2), ("dp=2", 2), ("dp=2,pp=2", 4))


def go_on(
    small_jobs: SmallJobs,
    kind: str,
    number: int,
    out: Path,
    resume: Path | None,
    *,
    storage: str,
    **given: str,
) -> None:
    """Train up to step `number`: P (plain), J (replicas), Z (ZeRO), H (hybrid), M (a mesh), X (both)."""
    shared = {**SHAPE, "steps": str(number), "out": str(out), **given}
    if resume is not None:
        shared["resume"] = str(resume)
    flags = [text for name, value in shared.items() for text in (f"--{name}", value)]
    flags += ["--precision", storage]
    if kind == "P":
        plain_by(flags)
        return
    meshes = {"M": MESHES[number % len(MESHES)], "J": ("dp=2", 2), "Z": ("dp=3", 3), "X": ("dp=2,pp=2", 4)}
    meshes |= {"H": ("dp=2,fsdp=2", 4)}
    mesh, ranks = meshes[kind]
    flags += ["--mesh", given.get("mesh", mesh)]
    if kind in "ZXH":
        flags += ["--zero", ZERO_STAGES[number % len(ZERO_STAGES)]]
    assert small_jobs.train(flags, ranks=ranks).deaths == 0


def digest(path: Path) -> str:
    """Of the weights in a file."""
    return hashlib.sha256(load_weights(path / WEIGHTS_NAME)[0].data).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "kinds"),
    [("float32", "PJPZPMJZJMZMPXJXZXMXP"), ("float16", "PZPMZMPXZXMXP")],
    ids=["float32", "float16"],
)
def test_each_goes_on_from_each(small_jobs: SmallJobs, storage: str, kinds: str, tmp_path: Path) -> None:
    """A step by each in turn, so that each ordered pair of kinds is there once."""
    data, before = str(write_text(tmp_path / "text")), None
    pairs = set(itertools.pairwise(kinds))
    assert len(pairs) == len(kinds) - 1 == len(set(kinds)) * (len(set(kinds)) - 1)
    go_on(small_jobs, "P", len(kinds), tmp_path / "whole", None, storage=storage, data=data)
    for number, kind in enumerate(kinds, 1):
        out = tmp_path / f"{number}{kind}"
        go_on(small_jobs, kind, number, out, before, storage=storage, data=data)
        before = out
    assert before is not None and digest(before) == digest(tmp_path / "whole")


def test_hybrid_shards_go_on_from_others_and_they_from_them(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, before = str(write_text(tmp_path / "text")), None
    given = {"offload": str(tmp_path)}
    go_on(small_jobs, "P", 6, tmp_path / "whole", None, storage="float16", data=data)
    for number, (kind, more) in enumerate((("H", {}), ("Z", {}), ("H", given), ("X", {}), ("H", {})), 1):
        out = tmp_path / f"{number}{kind}"
        go_on(small_jobs, kind, number, out, before, storage="float16", data=data, **more)
        before = out
    go_on(small_jobs, "M", 6, tmp_path / "last", before, storage="float16", data=data)
    assert digest(tmp_path / "last") == digest(tmp_path / "whole")


def test_a_mesh_of_eight_goes_on_as_three_ranks_and_then_as_one(
    small_jobs: SmallJobs, tmp_path: Path
) -> None:
    """By the command, with the bits of one process that does all that follows the mesh."""
    data, cube = str(write_text(tmp_path / "text")), tmp_path / "cube"
    flags = [text for name, value in SHAPE.items() for text in (f"--{name}", value)] + ["--data", data]

    def trained(ranks: int, steps: int, out: Path, *more: str) -> Path:
        found = small_jobs.train([*flags, "--steps", str(steps), "--out", str(out), *more], ranks=ranks)
        assert found.deaths == 0, found.told
        return out

    trained(8, 2, cube, "--mesh", "dp=2,pp=2,tp=2")
    plain_by([*flags, "--steps", "6", "--out", str(tmp_path / "whole"), "--resume", str(cube)])
    for kind, more in (("replicas", ("--mesh", "dp=3")), ("sharded", ("--zero", "3"))):
        three = trained(3, 4, tmp_path / kind, *more, "--resume", str(cube))
        one = trained(1, 6, tmp_path / f"{kind}-one", "--resume", str(three))
        assert digest(one) == digest(tmp_path / "whole") != digest(three), kind


@pytest.mark.parametrize("offloaded", [False, True])
def test_sharded_float16_begins_as_one_process_does(
    small_jobs: SmallJobs, offloaded: bool, tmp_path: Path
) -> None:
    """Its loss scale is part of a state that is made when the run begins with it, and not before."""
    data, given = str(write_text(tmp_path / "text")), {"offload": str(tmp_path)} if offloaded else {}
    go_on(small_jobs, "P", 2, tmp_path / "plain", None, storage="float16", data=data)
    go_on(small_jobs, "Z", 2, tmp_path / "zero", None, storage="float16", data=data, **given)
    assert digest(tmp_path / "zero") == digest(tmp_path / "plain")


def test_what_tensor_parallel_ranks_wrote_is_read_by_one_and_by_a_mesh(
    small_jobs: SmallJobs, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Sums along `tp` have an order of their own: behind them, whoever goes on has the same bits."""
    data, out = str(write_text(tmp_path / "text")), tmp_path / "tp"
    go_on(small_jobs, "M", 2, out, None, storage="float32", data=data, mesh="tp=2,pp=2")
    go_on(small_jobs, "P", 4, tmp_path / "plain", out, storage="float32", data=data)
    go_on(small_jobs, "M", 4, tmp_path / "mesh", out, storage="float32", data=data)
    assert digest(tmp_path / "plain") == digest(tmp_path / "mesh")
    sharded = tmp_path / "sharded"
    go_on(small_jobs, "X", 2, sharded, None, storage="float32", data=data, mesh="dp=2,tp=2")
    assert digest(sharded) == digest(out)
    go_on(small_jobs, "P", 4, tmp_path / "further", sharded, storage="float32", data=data)
    assert digest(tmp_path / "further") == digest(tmp_path / "plain")
    for place, mesh in enumerate(("dp=2,tp=2", "dp=2,pp=2")):
        beyond = tmp_path / f"beyond{place}"
        go_on(small_jobs, "X", 3, beyond, sharded, storage="float32", data=data, mesh=mesh)
        go_on(small_jobs, "P", 4, tmp_path / f"last{place}", beyond, storage="float32", data=data)
    assert digest(tmp_path / "last1") == digest(tmp_path / "plain")

    # Text is made of a checkpoint as of the weights, which a run that was killed has not written.
    weights = load_weights(out / WEIGHTS_NAME)[0]
    capfdbinary.readouterr()
    assert cli.main(["generate", str(out), "--length", "20"]) == 0
    wanted = capfdbinary.readouterr().out
    (out / WEIGHTS_NAME).unlink()
    found, _, step = load_trained(out)
    assert (found.tobytes(), step) == (weights.tobytes(), 2)
    named = checkpoint_in(out)
    assert named is not None
    for path in (out, named):
        assert cli.main(["generate", str(path), "--length", "20"]) == 0
        assert capfdbinary.readouterr().out == wanted


BAD = [
    (
        ("--width", "32"),
        r"model.width (16, 32). Weights of another model do not fit: give that run's --width",
    ),
    (("--precision", "bf16"), "precision (float32, bfloat16). It was trained in float32: --precision"),
]


@pytest.mark.parametrize(("changed", "said"), BAD)
def test_what_does_not_fit_is_told(changed: tuple[str, ...], said: str, tmp_path: Path) -> None:
    flags = [text for name, value in SHAPE.items() for text in (f"--{name}", value)]
    flags += ["--data", str(write_text(tmp_path / "text"))]
    plain_by([*flags, "--steps", "1", "--out", str(tmp_path / "a")])
    again = [*flags, "--steps", "2", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"), *changed]
    for run in (plain_by, train_by):
        with pytest.raises(UserError, match=re.escape(said)):
            run(again)


def test_a_directory_has_its_last_checkpoint_whoever_wrote_it(tmp_path: Path) -> None:
    flags = [text for name, value in SHAPE.items() for text in (f"--{name}", value)]
    out = ["--data", str(write_text(tmp_path / "text")), "--out", str(tmp_path / "a")]
    plain_by([*flags, *out, "--steps", "2"])
    assert load_trained(tmp_path / "a")[2] == 2
    train_by([*flags, *out, "--resume", str(tmp_path / "a"), "--steps", "3"])
    named = checkpoint_in(tmp_path / "a")
    assert named is not None
    (tmp_path / "a" / WEIGHTS_NAME).unlink()
    assert load_trained(named)[2] == load_trained(tmp_path / "a")[2] == 3
    assert len(list((tmp_path / "a").glob("checkpoint-*.safetensors"))) == KEEP_DEFAULT
