"""The template: forks by request, tells every end, and goes with its host."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from zbmd.actors.process.lines import without_marks
from zbmd.actors.process.template import REQUEST_BYTES_MAX, Forked, ForkExited, ForkFailed, ForkRequest
from zbmd.actors.process.template_client import TemplateClient, TemplateLost
from zbmd.transport.errors import UserError

TIMEOUT_S = 180.0


class Template:
    """A running template and what it said."""

    def __init__(self, tmp_path: Path) -> None:
        self.replies: asyncio.Queue[Forked | ForkFailed | ForkExited] = asyncio.Queue()
        self.lost: asyncio.Future[TemplateLost] = asyncio.get_running_loop().create_future()
        self.client = TemplateClient(on_reply=self._on_reply, on_lost=self.lost.set_result)
        self._directory = tmp_path
        self._incarnation = 0

    def _on_reply(self, reply: Forked | ForkFailed | ForkExited, pidfd: int | None) -> None:
        if pidfd is not None:
            os.close(pidfd)
        self.replies.put_nowait(reply)

    def fork(self, text: str, **environment: str) -> int:
        """Ask for a child that runs `text`; the end of its standard output that we read."""
        self._incarnation += 1
        script = self._directory / f"script{self._incarnation}.py"
        script.write_text(text)
        read, write = os.pipe2(os.O_CLOEXEC)
        request = ForkRequest(
            rank=0,
            incarnation=self._incarnation,
            target=str(script),
            is_module=False,
            arguments=("a", "b"),
            environment=environment,
        )
        try:
            self.client.fork(request, stdout_fd=write, stderr_fd=write)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return read

    async def reply(self) -> Forked | ForkFailed | ForkExited:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.replies.get()

    async def run(self, text: str, **environment: str) -> tuple[int, str]:
        """Run a child to its end: its exit code and output."""
        read = self.fork(text, **environment)
        forked, exited = await self.reply(), await self.reply()
        assert isinstance(forked, Forked) and isinstance(exited, ForkExited)
        assert exited.pid == forked.pid
        with os.fdopen(read, "rb") as output:
            return exited.code, output.read().decode()


@asynccontextmanager
async def template(tmp_path: Path, *modules: str) -> AsyncGenerator[Template, None]:
    found = Template(tmp_path)
    ready = await found.client.start(modules=modules, environment=os.environ)
    assert ready.threads == 1
    try:
        yield found
    finally:
        await found.client.close()


async def test_children_get_arguments_environment_and_no_descriptors_of_others(tmp_path: Path) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['X'], sorted(os.listdir('/proc/self/fd'))[:4])"
    async with template(tmp_path) as running:
        # 0 to 2 are its own; 3 is the directory that is being listed.
        assert await running.run(show, X="1") == (0, "['a', 'b'] 1 ['0', '1', '2', '3']\n")
        assert await running.run(show, X="2") == (0, "['a', 'b'] 2 ['0', '1', '2', '3']\n")


async def test_ends_are_told_as_they_are(tmp_path: Path) -> None:
    async with template(tmp_path) as running:
        assert await running.run("raise SystemExit(7)") == (7, "")
        assert await running.run("import os; os.kill(os.getpid(), 9)") == (-signal.SIGKILL, "")
        assert await running.run("import os; os.kill(os.getpid(), 15)") == (-signal.SIGTERM, "")
        code, output = await running.run("def f():\n    1 / 0\nf()")
        assert code == 1
        lines = [part for line in output.split("\n")[:-1] for part in without_marks(line.encode())]
        assert all(marked for _, marked in lines)
        assert lines[0][0] == b"Traceback (most recent call last):"
        assert b"in <module>" in lines[1][0]
        assert lines[-1][0] == b"ZeroDivisionError: division by zero"


async def test_what_was_imported_once_is_there_and_random_states_differ(tmp_path: Path) -> None:
    text = "import sys; assert 'numpy' in sys.modules; import numpy, random\n"
    text += "print(numpy.random.random(), random.random())"
    async with template(tmp_path, "numpy", "numpy.random") as running:
        _, first = await running.run(text)
        _, second = await running.run(text)
    assert len({*first.split(), *second.split()}) == 4


async def test_children_of_a_child_end_with_it(tmp_path: Path) -> None:
    text = (
        "import os\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.read(read, 1)\n"  # for ever: it holds the other end itself
        "os._exit(0)\n"
    )
    async with template(tmp_path) as running:
        read = running.fork(text)
        assert isinstance(await running.reply(), Forked)
        exited = await running.reply()
        assert isinstance(exited, ForkExited)
        assert exited.code == 0
        # The helper held the pipe too: its end is the end of the file.
        with os.fdopen(read, "rb") as output:
            assert output.read() == b""


async def test_children_die_with_the_template_and_the_host_hears_of_it(tmp_path: Path) -> None:
    async with template(tmp_path) as running:
        read = running.fork("import signal\nprint('up', flush=True)\nsignal.pause()")
        assert isinstance(await running.reply(), Forked)
        with os.fdopen(read, "rb") as output:
            assert output.readline() == b"up\n"
            os.kill(running.client.pid, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                error = await running.lost
            assert output.read() == b"", "the child is gone too"
        assert str(error) == "the template process was killed by signal 9"
        with pytest.raises(TemplateLost):
            running.fork("pass")


async def test_an_import_that_fails_is_told(tmp_path: Path) -> None:
    found = Template(tmp_path)
    with pytest.raises(TemplateLost, match="ended with exit code 1"):
        await found.client.start(modules=["no_such_module_anywhere"], environment=os.environ)
    await found.client.close()


async def test_arguments_beyond_the_bound_are_told(tmp_path: Path) -> None:
    async with template(tmp_path) as running:
        with pytest.raises(UserError, match="Put them into a file"):
            running.fork("pass", X="x" * REQUEST_BYTES_MAX)


@pytest.mark.parametrize(
    "packet",
    [b"garbage", b"\x93\xa5ready\x01\xa2\xff\xfe", b"\x94\xa6forked\x00\x01\x02"],
    ids=["no reply", "no UTF-8", "out of turn"],
)
async def test_a_template_whose_module_writes_into_its_socket_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packet: bytes
) -> None:
    (tmp_path / "meddler.py").write_text(f"import os, sys\nos.write(int(sys.argv[1]), {packet!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = TemplateClient(on_reply=lambda reply, pidfd: None, on_lost=lambda error: None)
    with pytest.raises(TemplateLost, match="broke its protocol"):
        await client.start(modules=["meddler"], environment=os.environ)
    await client.close()
