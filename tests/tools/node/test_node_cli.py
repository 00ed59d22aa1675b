"""`zbmd-node` as a user meets it: a subprocess, real ranks, real signals, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import textwrap
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from programs import PROGRAMS
from support.cluster.etcd_server import free_ports
from support.processes.launcher import after_threads, assert_no_socket
from support.processes.stopping import kill, stop

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

TIMEOUT_S = 180.0
MARKER = "ZBMD_TEST_NODE_CLI"

JOINS = str(PROGRAMS / "node" / "joins.py")


class Run:
    """A running `zbmd-node`, its standard output and error read line by line."""

    def __init__(self, process: asyncio.subprocess.Process, marker: str) -> None:
        self.process = process
        self.marker = marker
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._news = asyncio.Event()
        self._ended = 0
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self.lines)),
            asyncio.create_task(self._read(process.stderr, self.errors)),
        ]

    async def _read(self, stream: asyncio.StreamReader, into: list[str]) -> None:
        async for line in stream:
            into.append(line.decode().rstrip("\n"))
            self._news.set()
        self._ended += 1
        self._news.set()

    async def until(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until `count` lines match, and return the first so many; fails with all that was printed."""
        wanted = re.compile(pattern)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    last = self._ended == len(self._readers)
                    self._news.clear()
                    found = [m for line in [*self.lines, *self.errors] if (m := wanted.search(line))]
                    if len(found) >= count:
                        return found[:count]
                    if last:
                        break
                    await self._news.wait()
        except TimeoutError:
            pass
        pytest.fail(f"never printed {count} x {pattern!r}:\n{self.all_output}")

    async def ended(self) -> int:
        """Wait for the end; the exit code, or minus the signal."""
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self._readers)
            return await self.process.wait()

    @property
    def all_output(self) -> str:
        return "\n".join([*self.lines, *self.errors])

    async def assert_nothing_left(self) -> None:
        """Every process of this run is gone, or going as the kernel frees it."""
        loop = asyncio.get_running_loop()
        for pid in processes_with(self.marker):
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            gone = asyncio.Event()
            loop.add_reader(pidfd, gone.set)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await gone.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        assert not processes_with(self.marker)


def processes_with(marker: str) -> list[int]:
    """The live processes whose environment holds the marker."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            alive = entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if alive:
            found.append(int(entry.name))
    return found


Start = Callable[..., Any]


@pytest.fixture
def plain(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "plain.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ZBMD_") or k == "ZBMD_TEST_SESSION"}
    return {**kept, "ZBMD_COOKIE_FILE": str(tmp_path / "cookie"), "ZBMD_ARENA": "1MiB"}


@contextmanager
def inherited(handlers: dict[signal.Signals, signal.Handlers]) -> Generator[None]:
    """Have processes that are started meanwhile begin with these."""
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Start:
    @asynccontextmanager
    async def run(
        *arguments: str, ignored: tuple[signal.Signals, ...] = (), **variables: str
    ) -> AsyncGenerator[Run, None]:
        marker = uuid.uuid4().hex
        # A process that has closed its groups ignores SIGUSR2, and this one may have.
        with inherited(dict.fromkeys(ignored, signal.SIG_IGN) | {signal.SIGUSR2: signal.SIG_DFL}):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "zbmd.tools.node.cli",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**environment, **variables, MARKER: marker},
                cwd=tmp_path,
            )
        run = Run(process, marker)
        try:
            yield run
        finally:
            if process.returncode is None:
                process.kill()
            await run.ended()
            await run.assert_nothing_left()

    return run


# Running.


def test_every_rank_joins_and_sees_every_other(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", JOINS, "ends")
    assert ended.code == 0, ended
    assert sorted(ended.out) == [
        "[rank0]: joined 1 epoch 1 with 1 2",
        "[rank1]: joined 1 epoch 1 with 0 2",
        "[rank2]: joined 1 epoch 1 with 0 1",
    ]
    assert not after_threads(ended.errors)


def test_what_launchers_set_is_set(launcher: Launcher, plain: Callable[[str], str]) -> None:
    path = plain(
        """
        import os, sys
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ZBMD_DATA OPENBLAS_NUM_THREADS".split()
        print(*(os.environ[n] for n in names), *sys.argv[1:], __name__)
        """
    )
    ended = launcher.run(
        "run", "--nproc_per_node", "2", "--data", path, path, "--lr", "1", OPENBLAS_NUM_THREADS="2"
    )
    assert ended.code == 0, ended
    assert sorted(ended.out) == [f"[rank{r}]: {r} {r} 2 2 {path} 2 --lr 1 __main__" for r in range(2)]


def test_a_module_runs_like_a_script(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print(__package__, sys.argv[1:])")
    ended = launcher.run("run", "-n", "1", "-m", "package.job", "-x")
    assert (ended.code, ended.out) == (0, ["[rank0]: package ['-x']"]), ended


def test_modules_are_imported_before_the_forks(launcher: Launcher, plain: Callable[[str], str]) -> None:
    path = plain("import sys; print(*(name in sys.modules for name in ('wave', 'xml.dom', 'turtle')))")
    ended = launcher.run("run", "-n", "2", "--preload", "wave, xml", "--preload", "xml.dom", path)
    assert (ended.code, sorted(ended.out)) == (0, [f"[rank{r}]: True True False" for r in (0, 1)]), ended


@pytest.mark.optional
@pytest.mark.parametrize("name", ["torch", "zbmd.torch"])
def test_what_loops_import_comes_with_pytorch(
    launcher: Launcher, plain: Callable[[str], str], name: str
) -> None:
    """Else each replacement would import it, while the others wait."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = plain(
        "import sys; before = {*sys.modules}\n"
        "import torch._dynamo, torch.distributed.fsdp, zbmd.torch; zbmd.torch.resilient\n"
        "print(*sorted(n for n in {*sys.modules} - before if n.startswith(('torch.', 'zbmd.training'))))"
    )
    caches = str(launcher.directory / "caches")  # which importing torch._dynamo makes
    ended = launcher.run("run", "-n", "1", "--preload", name, path, TORCHINDUCTOR_CACHE_DIR=caches)
    assert (ended.code, ended.out) == (0, ["[rank0]: "]), ended


def test_no_line_is_lost_torn_or_mixed(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", str(PROGRAMS / "launched" / "many_lines.py"))
    assert ended.code == 0, str(ended)[-2000:]
    for rank in ("0", "1"):
        mine = [line for line in ended.out if line.startswith(f"[rank{rank}]: ")]
        assert mine == [f"[rank{rank}]: {rank * 80} {i}" for i in range(3000)]
    assert sorted(after_threads(ended.errors)) == [f"[rank{r}]: no newline at the end" for r in (0, 1)]


def test_the_json_log_has_rank_and_time(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run("run", "-n", "2", "--log-dir", str(tmp_path / "logs"), JOINS, "logs")
    assert ended.code == 0, ended
    for rank in (0, 1):
        (line,) = (tmp_path / "logs" / f"rank{rank}.jsonl").read_text().splitlines()
        event = json.loads(line)
        assert event.pop("time_us") > 0
        assert event == {
            "event": "all_reduce",
            "level": "info",
            "rank": rank,
            "incarnation": 1,
            "step": 3,
            "group": "world",
            "op": "ring",
            "peer": 1,
        }


# Loss.


def test_a_killed_rank_is_replaced_and_the_view_grows(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", JOINS, "loses_rank_1_once")
    assert ended.code == 0, ended
    assert "[rank1]: joined 2 epoch 2 with 0 2" in ended.out
    for rank in (0, 2):
        assert f"[rank{rank}]: entered 2 [1, 2, 1] 2" in ended.out
    failed, together = (line for line in ended.errors if line.startswith("[zbmd]"))
    assert re.search(r"rank 1 \(pid \d+, incarnation 1\) failed: killed \(SIGKILL\); its replacement", failed)
    assert "rank 1 was killed (SIGKILL); 3 ranks together again (epoch 2)" in together


async def test_ranks_killed_from_outside_at_once_cost_one_view(start: Start) -> None:
    async with start("run", "-n", "4", JOINS, "waits_for_epoch_2") as run:
        found = await run.until(r"rank([13])\]: pid (\d+)", 2)
        await run.until(r"\]: pid (\d+)", 4)
        stop(run.process.pid)  # it learns of both at once, however late one is
        for match in found:
            kill(int(match[2]))
        run.process.send_signal(signal.SIGCONT)
        assert await run.ended() == 0, run.all_output
    entered = [line for line in run.lines if "entered" in line]
    assert sorted(entered) == ["[rank0]: entered 2", "[rank2]: entered 2"], run.all_output


def test_shrink_goes_on_over_those_left(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", "--on-loss", "shrink", JOINS, "loses_rank_2")
    assert ended.code == 0, ended
    assert "[rank0]: entered 2 (0, 1) (2,) [1]" in ended.out
    assert "[rank1]: entered 2 (0, 1) (2,) [0]" in ended.out


async def test_progress_and_what_a_loss_cost_are_told(start: Start) -> None:
    async with start("run", "-n", "2", JOINS, "reports_steps") as run:
        (victim,) = await run.until(r"rank1\]: pid (\d+)")
        await run.until(r"^step 4 loss 2\.50 grad_norm 0\.50 mem \d+\.\dGiB$")
        os.kill(int(victim[1]), signal.SIGKILL)
        assert await run.ended() == 0, run.all_output
    told = r"\[zbmd\]: rank 1 was killed \(SIGKILL\) at step 5; back at step 5 after \d+ ms; nothing lost"
    assert any(re.fullmatch(told, line) for line in run.errors), run.all_output
    assert any(line.startswith("step 5 loss 2.25 mem") for line in run.errors)


def test_more_restarts_than_allowed_end_the_run_in_clear_words(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", "--max-restarts", "2", JOINS, "loses_rank_1_always")
    assert ended.code == 75
    assert "the run failed: more than 2 restarts within 60 s; the last: rank1 failed" in ended.errors[-1]
    assert "The first failure was rank 1's: killed (SIGKILL)" in ended.errors[-1]


def test_a_script_that_raises_on_one_rank_ends_the_run(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", "--on-loss", "stop", JOINS, "raises_on_rank_1")
    assert ended.code == 1
    (told,) = (line for line in ended.errors if line.startswith("[zbmd]"))
    assert told == ended.errors[-1]
    assert "rank 1's: exit code 1: RuntimeError: the reason. Its traceback is above" in told
    assert not any("template.py" in line or "runpy" in line for line in ended.errors), (
        "only the user's frames"
    )


def test_a_script_that_fails_before_joining_is_not_tried_again(
    launcher: Launcher, plain: Callable[[str], str]
) -> None:
    ended = launcher.run("run", "-n", "1", plain("import no_such_module"))
    assert ended.code == 1
    assert "rank0 failed before it joined: exit code 1" in ended.errors[-1]
    assert sum("Traceback" in line and line.startswith("[rank0]") for line in ended.errors) == 1


def test_a_users_mistake_found_by_the_script_is_one_paragraph(
    launcher: Launcher, plain: Callable[[str], str]
) -> None:
    path = plain("from zbmd.transport.errors import UserError\nraise UserError('no corpus there. Give one.')")
    ended = launcher.run("run", "-n", "1", path)
    assert ended.code == 2
    (told,) = after_threads(ended.errors)
    assert told == "[zbmd]: rank 0 cannot go on, and so the run ends: no corpus there. Give one."


# Ending.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_stops_everything(start: Start, number: signal.Signals, code: int) -> None:
    async with start("run", "-n", "3", JOINS, "waits") as run:
        address = (await run.until(r"address (\S+)", 3))[0][1]
        run.process.send_signal(number)
        assert await run.ended() == code, run.all_output
    assert f"[zbmd]: stopped: {number.name} received" in run.errors
    assert_no_socket(address)


async def test_a_second_signal_kills_what_ignores_the_first(start: Start) -> None:
    async with start("run", "-n", "2", JOINS, "ignores_sigterm") as run:
        await run.until("ready", 2)
        run.process.send_signal(signal.SIGINT)
        await run.until("SIGTERM ignored", 2)
        run.process.send_signal(signal.SIGINT)
        assert await run.ended() == 130, run.all_output


@pytest.fixture(params=[False, True], ids=["one host", "several"])
def hosts(request: pytest.FixtureRequest) -> list[str]:
    """The options of a run on one host, and of one that others may join."""
    elastic = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"]
    return elastic if request.param else []


async def test_signals_for_ranks_reach_those_that_handle_them(start: Start, hosts: list[str]) -> None:
    async with start("run", *hosts, "-n", "2", JOINS, "takes_signals") as run:
        await run.until("ready", 2)
        run.process.send_signal(signal.SIGUSR1)
        await run.until("SIGUSR1 received: no rank has a handler for it, and nothing is done")
        run.process.send_signal(signal.SIGQUIT)
        await run.until("SIGQUIT received: nothing is done")
        for count in (1, 2, 3):
            run.process.send_signal(signal.SIGUSR2)
            await run.until(f"SIGUSR2 {count}", 2)
        assert await run.ended() == 0, run.all_output


async def test_signals_to_handle_reach_the_ranks_too(start: Start, hosts: list[str]) -> None:
    """SIGTERM is among torchrun's, and ends the run as ever."""
    names = "SIGTERM,quit,SIGCONT"
    async with start("run", *hosts, "-n", "2", JOINS, "takes_sigquit", PET_SIGNALS_TO_HANDLE=names) as run:
        for number in (signal.SIGQUIT, signal.SIGCONT):
            await run.until(f"ready for {number.name}", 2)
            run.process.send_signal(number)
        assert await run.ended() == 0, run.all_output


async def test_what_is_ignored_at_the_start_stays_ignored(start: Start, hosts: list[str]) -> None:
    """As under `nohup`, and in the background of a shell without job control."""
    ignored = signal.SIGHUP, signal.SIGINT
    async with start("run", *hosts, "-n", "2", JOINS, "takes_signals", ignored=ignored) as run:
        await run.until("ready", 2)
        for count, number in ((1, signal.SIGHUP), (2, signal.SIGINT), (3, signal.SIGHUP)):
            run.process.send_signal(number)
            run.process.send_signal(signal.SIGUSR2)
            await run.until(f"SIGUSR2 {count}", 2)
        assert await run.ended() == 0, run.all_output


async def test_killing_the_host_takes_everything_with_it(start: Start) -> None:
    async with start("run", "-n", "3", JOINS, "waits") as run:
        address = (await run.until(r"address (\S+)", 3))[0][1]
        assert len(processes_with(run.marker)) == 6, "host, reaper, template, three ranks"
        run.process.kill()
        assert await run.ended() == -signal.SIGKILL
        await run.assert_nothing_left()
    assert_no_socket(address)


async def test_killing_the_template_ends_the_run_in_clear_words(start: Start) -> None:
    async with start("run", "-n", "2", JOINS, "waits") as run:
        template_pid = int((await run.until(r"template (\d+)", 2))[0][1])
        os.kill(template_pid, signal.SIGKILL)
        assert await run.ended() == 75
    assert "the run failed: the template process was killed by signal 9" in run.all_output


def test_what_a_rank_started_ends_with_it(launcher: Launcher) -> None:
    path = str(PROGRAMS / "launched" / "leaves_a_child.py")
    ended = launcher.run("run", "-n", "1", path)
    assert (ended.code, ended.out) == (0, ["[rank0]: done"]), ended


# Status.


async def test_status_shows_nodes_ranks_and_actors(start: Start, launcher: Launcher) -> None:
    async with start("run", "-n", "2", JOINS, "has_an_actor") as run:
        ready = await run.until(r"rank(\d)\]: ready (\S+) (\d+)", 2)
        pids = {int(m[1]): int(m[3]) for m in ready}
        status = launcher.run("status", "--json")
        assert status.code == 0, status
        nodes = json.loads(status.out[0])["nodes"]
        (node,) = (n for n in nodes if n["address"] == ready[0][2])
        assert node["epoch"] == 1
        assert node["restarts"] == 0
        assert node["pid"] == run.process.pid
        for rank in node["ranks"]:
            assert rank["pid"] == pids[rank["rank"]]
            assert rank["state"] == "joined"
            assert rank["incarnation"] == 1
            assert rank["memory_bytes"] > 1 << 20
            assert rank["actors"] == ["directory", "member", "inside", "code", "counter"]
        table = launcher.run("status", COLUMNS="200")
        assert table.code == 0, table
        assert any(str(pids[1]) in line and "joined" in line for line in table.out)


# Settings and bad input.


def test_show_config_merges_by_precedence(launcher: Launcher, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('on-loss = "shrink"\nmax_restarts = 7\nnproc_per_node = 5\n')
    ended = launcher.run("run", "-n", "2", "--config", str(config), "--show-config", ZBMD_MAX_RESTARTS="9")
    assert ended.code == 0, ended
    assert "nproc_per_node = 2  # --nproc-per-node" in ended.out
    assert "max_restarts = 9  # ZBMD_MAX_RESTARTS" in ended.out
    assert f'on_loss = "shrink"  # {config}' in ended.out
    assert 'restart_window = "60s"  # default' in ended.out
    assert 'recovery_budget = "1s"  # default' in ended.out


def test_the_recovery_budget_reaches_the_ranks(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", "--recovery-budget", "2500ms", JOINS, "prints_deadlines")
    assert ended.code == 0, ended
    assert sum("deadlines 2500000000 1000000000" in line for line in ended.out) == 2


BAD_INPUT = [
    (["-n", "0", "plain.py"], "expected 1 to 1022 processes, auto, gpu or cpu, got '0'"),
    (["-n", "many", "plain.py"], "expected 1 to 1022 processes, auto, gpu or cpu, got 'many'"),
    ([], "SCRIPT: expected a Python file, or -m and the name of a module"),
    (["missing.py"], "there is no script missing.py"),
    (["-m", "no_such_module"], "there is no module no_such_module"),
    (
        ["--config", "missing.toml", "plain.py"],
        "missing.toml: the settings file cannot be read: No such file",
    ),
    (["--config", "broken.toml", "plain.py"], "broken.toml: not valid TOML"),
    (["--config", "broken.toml", "plain.py"], "line 2"),
    (["--config", "unknown.toml", "plain.py"], "unknown.toml:2: unknown setting 'speed'. Known are: arena"),
    (["--config", "wrong.toml", "plain.py"], "wrong.toml: '64 parsecs' is not a duration"),
    (["--arena", "9000GiB", "plain.py"], "9000GiB is out of range"),
    (["-n", "2", "--arena", "3TiB", "plain.py"], "2 ranks with an arena of"),
    (
        ["--on-loss", "panic", "plain.py"],
        "--on-loss: expected a policy for a lost rank, one of replace, shrink, stop, got 'panic'",
    ),
    (["--data", "none/*.txt", "plain.py"], "--data none/*.txt matches no file"),
    (["--preload", "wave,no_such_module", "plain.py"], "there is no module no_such_module"),
    (["--preload", "wave;json", "plain.py"], "--preload: expected names of modules with commas between them"),
    (["--restart-window", "soon", "plain.py"], "'soon' is not a duration. Write a number and a unit"),
    (["--recovery-budget", "soon", "plain.py"], "--recovery-budget: 'soon' is not a duration"),
    (["--recovery-budget", "1ms", "plain.py"], "budget of 1ms is out of range. Give 100ms to 10min"),
    (["--signals-to-handle", "SIGKILL", "plain.py"], "such as SIGUSR1,SIGQUIT, got 'SIGKILL'"),
    (["--no-such-option", "plain.py"], "See zbmd-node"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_told_in_one_paragraph(launcher: Launcher, arguments: list[str], message: str) -> None:
    directory = launcher.directory
    (directory / "plain.py").write_text("print('ran')")
    (directory / "broken.toml").write_text("arena = 1\nn = = 2\n")
    (directory / "unknown.toml").write_text("arena = '1MiB'\nspeed = 3\n")
    (directory / "wrong.toml").write_text("restart_window = '64 parsecs'\n")
    ended = launcher.run("run", *arguments)
    assert ended.code == 2, ended
    assert not ended.out
    assert len(ended.errors) == 1, ended
    assert message in ended.errors[0]
