"""Retention, codecs and storages of a loop's checkpoints, and the fallback to the newest that is whole."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import train

from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.autograd.parameter_layout import ParameterSlot
from zbmd.training.checkpoint.index import SHARDS_NAME, is_index, is_shard, read_index
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = PROGRAMS / "torch/recorded_loop.py"
STEPS = 10
WEIGHT = ParameterSlot(name="module.2.weight", shape=(8,), offset=0, decayed=False)


def weights_in(out: Path) -> dict[int, list[bytes]]:
    """Return a layer's weights and their moments in each checkpoint."""
    found = {}
    for path in out.iterdir():
        if is_index(path.name):
            names = read_index(Directory(out), path.name)
            with closing(open_state(path, plan=names.plan)) as saved:
                arrays = ("weights", "0.exp_avg", "0.exp_avg_sq")
                found[names.version] = [saved.parameter(name, WEIGHT).tobytes() for name in arrays]
    return found


def losses_in(out: Path) -> list[float]:
    return [loss_of(record) for record in read_log(out / LOG_NAME)[1]]


async def run(out: Path, **more: str) -> list[str]:
    """Run a loop to its end; return what its ranks print."""
    variables = {"OUT": str(out), **more}
    result, lines = await train(PROGRAM, "plain", ranks=2, more=variables)
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert audit_run(out).is_whole
    return lines


async def test_what_is_written_beside_steps_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of checkpoints that all wait for; a damaged one is left out by the next run."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    beside, waited = tmp_path / "beside", tmp_path / "waited"
    await run(beside, EVERY="1", KEEP="50")
    await run(waited, SAVE="1", KEEP="2", KEEP_EVERY="3", CODEC="zstd")
    kept, every = weights_in(waited), weights_in(beside)
    assert sorted(kept) == [3, 6, 9, 10] and {1, 10} <= every.keys()
    assert all(kept[version] == every[version] for version in kept.keys() & every.keys())
    assert len({*map(tuple, every.values())}) == len(every)

    newest = read_names(waited / SHARDS_NAME)
    assert newest.version == 10
    (shard,) = newest.files
    data = bytearray((waited / shard).read_bytes())
    data[-5] ^= 1
    (waited / shard).write_bytes(data)
    lines = await run(waited, RESUME="1", EVERY="5")
    told = "\n".join(lines)
    assert "left out: " in told and shard in told and "going on from the checkpoint of step 9" in told
    assert losses_in(waited) == losses_in(beside) and weights_in(waited)[10] == every[10]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, object_store_runtime: None) -> Iterator[str]:
    """The URL of a folder in an object store."""
    pytest.importorskip("moto", reason="moto is not installed")
    server = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "training/object_server.py"), "0", "well"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{int(server.stdout.readline())}")
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    yield "s3://bucket/loops/1"
    server.kill()
    server.communicate()


async def test_an_object_store_has_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out, calm = tmp_path / "run", tmp_path / "calm"
    await run(calm)
    await run(out, TO=bucket, EVERY="2", EPOCHS="1")
    assert read_names(bucket).version == STEPS // 2 and not [*filter(is_shard, map(str, out.iterdir()))]
    await run(out, TO=bucket, EVERY="2", RESUME="1")
    assert read_names(bucket).version == STEPS and losses_in(out) == losses_in(calm)


async def test_checkpoints_that_cannot_be_written_end_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported once; the run ends as one that is not saved."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    file = tmp_path / "a file where a directory should be"
    file.write_text("")
    lines = await run(tmp_path / "run", TO=str(file), EVERY="4")
    told = "\n".join(lines)
    assert told.count("could not be written") == 1 and "the run goes on" in told, told
    assert f"step {STEPS} not saved: see above" in told and len(losses_in(tmp_path / "run")) == STEPS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_checkpoints": 0}, "keep_checkpoints=….: expected at least 1, got 0"),
        ({"keep_every": -1}, "keep_every=….: expected 0 or more steps, got -1"),
        ({"checkpoint_codec": "gzip"}, "checkpoint_codec=….: expected none or zstd, got 'gzip'"),
        ({"checkpoint_every": -3}, "checkpoint_every=….: expected auto or 0 or more"),
    ],
)
def test_options_that_keep_nothing_are_refused(options: dict[str, object], words: str) -> None:
    """Before anything of PyTorch's groups is asked for."""
    ours = importlib.import_module("zbmd.training.torch.resilient")
    model = importlib.import_module("torch").nn.Linear(1, 1)
    with pytest.raises(Exception, match=words):
        ours.resilient(model, None, out="unused", **options)
