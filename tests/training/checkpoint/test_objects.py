"""Checkpoints in an S3-compatible server, a real process: killed midway, slow, refusing, and back again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from programs import PROGRAMS

from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import Retention
from zbmd.training.checkpoint.objects import PART_BYTES, ObjectStore
from zbmd.training.checkpoint.sharded import Piece, last_in, open_state, read_names, write_alone
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task
from zbmd.transport.errors import UserError

pytest.importorskip("moto", reason="moto is not installed")
pytest.importorskip("obstore", reason="obstore is not installed")
SERVER, URL = PROGRAMS / "training/s3_server.py", "s3://bucket/runs/1"
NUMBERS = 20_000
TURNS = 10


class Server:
    """The server, which may be started again at its port, with nothing in its bucket."""

    def __init__(self, mode: str) -> None:
        self.port = 0
        self.start(mode)

    def start(self, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.port), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Serve = Callable[[str], Server]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, object_store_runtime: None) -> Iterator[Serve]:
    started = list[Server]()

    def start(mode: str) -> Server:
        started.append(Server(mode))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{started[-1].port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        return started[-1]

    yield start
    for one in started:
        one.kill()


def pieces(size: int, scale: float = 1) -> list[Piece]:
    flat = np.arange(size, dtype=np.float32) * np.float32(scale)
    return [Piece("x", flat_slice(size, 0, size), (flat, flat, flat))]


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("mode", ["well", "slow"])
def test_a_checkpoint_of_many_parts_is_read_from_there(mode: str, codec: Codec, serve: Serve) -> None:
    serve(mode)
    size = PART_BYTES // 4 + 5  # each of three arrays has more than a part
    for version in (1, 2, 3):
        held = pieces(size if version == 3 else 10, version)
        write_alone(URL, held, version=version, plan="{}", codec=codec)
    storage = ObjectStore(URL)
    assert last_in(storage) == f"{URL}/checkpoint.json" and read_names(URL).version == 3
    assert not Retention().removed(storage.names(), read_names(URL)) and len(storage.names()) == 5
    slot = ParameterLayout.of({"x": (size,)}).slots[0]
    with closing(open_state(Path(URL), plan="{}")) as saved:
        assert saved.parameter("mean", slot).tobytes() == pieces(size, 3)[0].arrays[1].tobytes()


def test_a_server_killed_midway_leaves_the_last_good_one(serve: Serve) -> None:
    server = serve("dies:2")
    write_alone(URL, pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=r"cannot write s3://bucket/runs/1/checkpoint-2-.*connection"):
        write_alone(URL, pieces(PART_BYTES), version=2, plan="{}")
    server.process.wait()
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        read_names(URL)
    server.start("well")
    with pytest.raises(UserError, match=r"there is no checkpoint at s3://bucket/runs/1/checkpoint\.json"):
        read_names(URL)


def test_what_cannot_be_used_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("refuses:1")
    with pytest.raises(UserError, match=r"cannot write s3://bucket/runs/1/checkpoint.*403"):
        write_alone(URL, pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match="cannot write s3://other/runs"):
        write_alone("s3://other/runs", pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=r"expected a directory, or a URL that begins with s3://"):
        write_alone("ftp://bucket/runs", pieces(10), version=1, plan="{}")


class Mean(DataParallelTask):
    """Finds the mean of numbers; `events`: what happens after steps."""

    steps, examples, shards, samples, name = 60, 40, 4, 3, "Mean"

    def __init__(self, events: dict[int, Callable[[], None]]) -> None:
        self.events = events

    def initial(self) -> dict[str, np.ndarray]:
        return {"mean": np.zeros(NUMBERS, np.float32)}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        error = state["mean"] - np.float32(ids.mean())
        return float((error**2).mean()), {"mean": 2 * error}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["mean"][:] = old["mean"] - np.float32(0.1) * gradient["mean"]
        self.events.get(step, lambda: None)()


async def test_a_run_goes_on_without_its_server(
    tmp_path: Path, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server dies before the first checkpoint, and is back before the end."""
    calm = await run_task(Mean({}), out=tmp_path / "calm")
    server, short = serve("well"), Mean({15: lambda: server.kill(), 50: lambda: server.start("refuses:1")})
    capfd.readouterr()
    done = await run_task(short, out=tmp_path / "run", checkpoint_every=20, checkpoint_to=URL)
    told = capfd.readouterr().err
    assert done is not None and calm is not None and done.state_sha256 == calm.state_sha256
    assert told.count("could not be written") == 1 and "There is none yet; the run goes on" in told
    assert told.count("is written, after failures") == 1 and read_names(URL).version == 60
    longer = Mean({})
    longer.steps = 90
    with pytest.raises(UserError, match=r"steps \(60, 90\)"):
        await run_task(longer, out=tmp_path / "longer", resume=Path(URL))


async def test_a_run_resumes_from_a_url(tmp_path: Path, serve: Serve) -> None:
    """It was stopped by a signal, after which it writes a checkpoint, to a slow server."""
    serve("slow")
    loop = asyncio.get_running_loop()

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(TURNS):  # the loop takes the signal
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()

    calm = await run_task(Mean({}), out=tmp_path / "calm")
    stopped = await run_task(Mean({30: stop}), out=tmp_path / "run", checkpoint_every=5, checkpoint_to=URL)
    assert stopped is None and 30 < read_names(URL).version < 60
    further = await run_task(Mean({}), out=tmp_path / "further", resume=Path(URL))
    assert calm is not None and further is not None and further.state_sha256 == calm.state_sha256
