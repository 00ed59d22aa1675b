"""Checkpoints in servers of S3, Google Cloud Storage and Azure, real processes: killed, slow, refusing, back.

Azurite stands for Azure; it checks signatures. moto, which does not, stands for S3, and for Google's XML API,
in which objects, lists and uploads in parts are those of S3.
"""

from __future__ import annotations

import asyncio
import os
import shutil
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
SERVER, URL = PROGRAMS / "training/object_server.py", "s3://bucket/runs/1"
URLS = {scheme: f"{scheme}://bucket/runs/1" for scheme in ("s3", "gs", "az")}
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", ""),
    "gs": ("GOOGLE_BASE_URL", ""),
    "az": ("AZURE_STORAGE_ENDPOINT", "/account"),
}
CREDENTIALS = {
    "s3": {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"},
    "gs": {"GOOGLE_BEARER_TOKEN": "token"},
    "az": {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"},
}
AZURITE = shutil.which(
    "azurite-blob", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
HAS_AZURITE = (
    pytest.mark.optional,
    pytest.mark.skipif(
        AZURITE is None, reason="there is no azurite-blob: npm install --global --prefix .venv azurite@3.35.0"
    ),
)
AZURE = pytest.param("az", marks=HAS_AZURITE)
NUMBERS = 20_000
TURNS = 10


class Server:
    """The server, which may be started again at its port, with nothing in its bucket."""

    def __init__(self, mode: str, scheme: str) -> None:
        self.port, self._scheme = 0, scheme
        self.start(mode)

    def start(self, mode: str) -> None:
        azurite = [str(AZURITE)] if self._scheme == "az" else []
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.port), mode, *azurite],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # in which Azurite is, too
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


Serve = Callable[..., Server]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, object_store_runtime: None) -> Iterator[Serve]:
    started = list[Server]()

    def start(mode: str, scheme: str = "s3") -> Server:
        for name, value in CREDENTIALS[scheme].items():
            monkeypatch.setenv(name, value)
        started.append(Server(mode, scheme))
        name, path = ENDPOINTS[scheme]
        monkeypatch.setenv(name, f"http://127.0.0.1:{started[-1].port}{path}")
        return started[-1]

    yield start
    for one in started:
        one.kill()


def pieces(size: int, scale: float = 1) -> list[Piece]:
    flat = np.arange(size, dtype=np.float32) * np.float32(scale)
    return [Piece("x", flat_slice(size, 0, size), (flat, flat, flat))]


@pytest.mark.parametrize(
    ("scheme", "mode", "codec"),
    [
        *(("s3", mode, codec) for mode in ("well", "slow") for codec in Codec),
        ("gs", "well", Codec.NONE),
        pytest.param("az", "well", Codec.NONE, marks=HAS_AZURITE),
    ],
)
def test_a_checkpoint_of_many_parts_is_read_from_there(
    scheme: str, mode: str, codec: Codec, serve: Serve
) -> None:
    serve(mode, scheme)
    url = URLS[scheme]
    size = PART_BYTES // 4 + 5  # each of three arrays has more than a part
    for version in (1, 2, 3):
        held = pieces(size if version == 3 else 10, version)
        write_alone(url, held, version=version, plan="{}", codec=codec)
    storage = ObjectStore(url)
    assert last_in(storage) == f"{url}/checkpoint.json" and read_names(url).version == 3
    assert not Retention().removed(storage.names(), read_names(url)) and len(storage.names()) == 5
    slot = ParameterLayout.of({"x": (size,)}).slots[0]
    with closing(open_state(Path(url), plan="{}")) as saved:
        assert saved.parameter("mean", slot).tobytes() == pieces(size, 3)[0].arrays[1].tobytes()


@pytest.mark.parametrize("scheme", ["s3", "gs", AZURE])
def test_files_are_written_read_in_part_listed_and_removed(scheme: str, serve: Serve) -> None:
    serve("well", scheme)
    storage, above = ObjectStore(URLS[scheme]), ObjectStore(f"{scheme}://bucket/runs")
    assert storage.names() == []
    for data in (b"", b"first", b"the second"):
        storage.put("a b-1.json", [data[:3], data[3:]])
        assert storage.get("a b-1.json", 1000) == data
    above.put("other", [b"above"])
    assert storage.names() == ["a b-1.json"] and above.names() == ["other"]
    assert storage.get("a b-1.json", 3) == b"the"
    file = storage.open("a b-1.json")
    assert (file.size, file.read(4, 6), file.read(10, 0)) == (10, b"second", b"")
    with pytest.raises(ValueError, match="it ends at byte 10, and byte 11 was expected"):
        file.read(5, 6)
    for _ in range(2):
        storage.remove("a b-1.json")
    assert storage.names() == [] and above.names() == ["other"]
    for absent in (lambda: storage.get("a b-1.json", 1), lambda: storage.open("a b-1.json")):
        with pytest.raises(FileNotFoundError, match="not found"):
            absent()
    with pytest.raises(OSError, match="not found"):
        file.read(0, 1)


@pytest.mark.parametrize("scheme", ["s3", "gs", AZURE])
def test_a_server_killed_midway_leaves_the_last_good_one(scheme: str, serve: Serve) -> None:
    server, url = serve("dies:2", scheme), URLS[scheme]
    write_alone(url, pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=rf"cannot write {url}/checkpoint-2-.*connection"):
        write_alone(url, pieces(PART_BYTES), version=2, plan="{}")
    server.process.wait()
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        read_names(url)
    server.start("well")
    with pytest.raises(UserError, match=rf"there is no checkpoint at {url}/checkpoint\.json"):
        read_names(url)


@pytest.mark.parametrize("scheme", ["s3", "gs", AZURE])
def test_parts_of_lost_connections_are_sent_again(scheme: str, serve: Serve) -> None:
    """Until the store has been lost too often: the checkpoint before stays, and is whole."""
    url, held = URLS[scheme], pieces(PART_BYTES // 4 + 5)
    serve("drops:3", scheme)
    write_alone(url, held, version=1, plan="{}")
    with closing(open_state(Path(url), plan="{}")) as saved:
        slot = ParameterLayout.of({"x": (len(held[0].arrays[0]),)}).slots[0]
        assert saved.parameter("mean", slot).tobytes() == held[0].arrays[1].tobytes()
    serve("drops:1000", scheme)
    write_alone(url, pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=rf"cannot write {url}/checkpoint-2-"):
        write_alone(url, held, version=2, plan="{}")
    assert read_names(url).version == 1 and not [one for one in ObjectStore(url).names() if "-2-" in one]
    with closing(open_state(Path(url), plan="{}")) as saved:
        assert saved.parameter("mean", ParameterLayout.of({"x": (10,)}).slots[0])[9] == 9


@pytest.mark.parametrize("scheme", ["s3", "gs", AZURE])
def test_what_cannot_be_used_is_named(scheme: str, serve: Serve) -> None:
    serve("refuses:1", scheme)
    with pytest.raises(UserError, match=rf"cannot write {URLS[scheme]}/checkpoint.*403"):
        write_alone(URLS[scheme], pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=rf"cannot write {scheme}://other/runs.*404"):
        write_alone(f"{scheme}://other/runs", pieces(10), version=1, plan="{}")
    with pytest.raises(UserError, match=r"expected a directory, or a URL that begins with s3://"):
        write_alone("ftp://bucket/runs", pieces(10), version=1, plan="{}")


@pytest.mark.parametrize("scheme", [AZURE])
def test_a_wrong_key_is_refused(scheme: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("well", scheme)
    write_alone(URLS[scheme], pieces(10), version=1, plan="{}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
    with pytest.raises(UserError, match=r"cannot write az://bucket/runs/1/checkpoint.*403.*credentials"):
        write_alone(URLS[scheme], pieces(10), version=2, plan="{}")
    with pytest.raises(UserError, match=r"cannot be read as a checkpoint.*403"):
        read_names(URLS[scheme])
    with pytest.raises(OSError, match="403"):
        ObjectStore(URLS[scheme]).names()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UserError, match=r"cannot use az://bucket/runs/1: .*az://CONTAINER/PREFIX, and cred"):
        ObjectStore(URLS[scheme])


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
