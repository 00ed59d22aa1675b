"""Rules for every test: one seed, nothing left behind, no quiet skips.

- `ZBMD_TEST_SEED=n` repeats a run; without it the seed is fresh. It is printed first, feeds hypothesis, and
  the `seed` fixture derives each test's own from it.
- The log is as structlog has it by default: at the start of each test nobody has set it up.
- After each test no child, thread, file descriptor or file in /dev/shm may be left that did not exist
  before; what a fixture of wider scope holds is accounted for at the end of the session.
- Temporary files of the session and of all that it starts lie in one directory, which goes with it, or with
  the next session if this one is killed.
- Bytecode is written, whatever the environment says: without it each process that a test starts would
  compile the whole of zbmd for itself, which takes longer than most of what it is started for.
- With `ZBMD_STRICT_SKIPS=1` (CI) a skip fails the run, unless the test is marked `optional`.

All of it holds, too, where pytest-xdist deals the test files out to workers: each of them watches what
its own tests hold, and the controller, which runs no test, adds up what they tell.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import structlog
import uvloop
from hypothesis import HealthCheck, settings

SEED_VARIABLE = "ZBMD_TEST_SEED"
STRICT_SKIPS_VARIABLE = "ZBMD_STRICT_SKIPS"
# Every process that a test starts inherits this, so that an orphan differs from a stranger.
MARKER_VARIABLE = "ZBMD_TEST_SESSION"
# Packages outside the dev extra: a module that skips itself for want of one is allowed to.
OPTIONAL_PACKAGES = ("torch", "cupy", "pyverbs", "transformers")
# A BLAS pool would be threads that no test started, and that no forked child may inherit.
POOL_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Set in many containers; Python takes it from the environment at its start.
NO_BYTECODE_VARIABLE = "PYTHONDONTWRITEBYTECODE"
# Of the directory in which a session has all temporary files.
SCRATCH = "zbmd-test-"
# Under this name a worker of pytest-xdist reports the things that its session has left behind.
LEFT_BEHIND = "zbmd_left_behind"
# What was asked to end may take this long to be gone from /proc.
SETTLE_S = 5.0
SETTLE_STEP_S = 0.005
# Workers of libuv (files and names) and of obstore's runtime live as long as the process.
LASTING_THREADS = frozenset({"libuv-worker", "tokio-rt-worker"})

settings.register_profile(
    "zbmd",
    deadline=None,
    database=None,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("zbmd")


@dataclass(frozen=True, slots=True)
class Holdings:
    """The things that this process holds at one moment, each by a key that is never used twice at once."""

    children: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]
    processes: frozenset[int]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            children=frozenset(_children()),
            threads=frozenset(_threads()),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset(),
            processes=frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()),
        )

    def since(self, before: Holdings) -> list[str]:
        """Return a name for each thing held now and not before, a process of this session included."""
        kept = [f"child {child}" for child in self.children - before.children]
        kept += [f"thread {thread}" for thread in self.threads - before.threads]
        kept += [f"descriptor {descriptor}" for descriptor in self.descriptors - before.descriptors]
        if named := self.shared_memory - before.shared_memory:
            kept += [f"/dev/shm/{name}" for name in named - _of_others(named)]
        kept += [f"orphan {pid}" for pid in self.processes - before.processes if _is_orphan(pid)]
        return sorted(kept)


def _read(path: str) -> str:
    """Read a file of /proc; empty when its process or thread has just ended."""
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _described(left: list[str]) -> str:
    """What `_left_behind` has found, for people: a process has no command line while it is being started."""
    return "; ".join(f"{thing}{_command_of(thing)}" for thing in left)


def _command_of(thing: str) -> str:
    kind, _, pid = thing.partition(" ")
    if kind not in ("child", "orphan"):
        return ""
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return f" ({command or 'ended, never waited for'})"


def _children() -> Generator[str]:
    for thread in os.listdir("/proc/self/task"):
        yield from _read(f"/proc/self/task/{thread}/children").split()


def _threads() -> Generator[str]:
    ours = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for thread in os.listdir("/proc/self/task"):
        name = _read(f"/proc/self/task/{thread}/comm").strip()
        if name and name not in LASTING_THREADS:
            yield f"{thread} ({ours.get(thread, name)})"


def _descriptors() -> Generator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # The directory's own descriptor, closed since.
        yield f"{descriptor} -> {target}"


def _is_orphan(pid: int) -> bool:
    """Tell whether `pid` was started by this session and is no child of it any more."""
    marker = f"{MARKER_VARIABLE}={os.environ[MARKER_VARIABLE]}"
    return marker in _read(f"/proc/{pid}/environ").split("\0") and _parent(pid) not in (None, os.getpid())


def _of_others(names: frozenset[str]) -> set[str]:
    """Return the files of /dev/shm, of these, that processes outside of this session have mapped.

    Such are those of the other workers of pytest-xdist, and of whatever else this machine does: what
    mpirun's ranks share is there for seconds.
    """
    ours = f"{MARKER_VARIABLE}={os.environ[MARKER_VARIABLE]}"
    found = set[str]()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        is_ours = ours in _read(f"/proc/{pid}/environ").split("\0") or os.getpid() in (pid, _parent(pid))
        if not is_ours:
            maps = _read(f"/proc/{pid}/maps")
            found.update(name for name in names if f"/dev/shm/{name}" in maps)
    return found


def _left_behind(before: Holdings, allowed: set[str]) -> list[str]:
    """Return what is left of what came since `before`, once it has had SETTLE_S to go."""
    pause = threading.Event()
    deadline_s = time.monotonic() + SETTLE_S
    collected = False
    while True:
        is_last = time.monotonic() > deadline_s  # asked first: this process may be the one that is late
        left = [thing for thing in Holdings.now().since(before) if thing not in allowed]
        if not left or is_last:
            return left
        if not collected:
            gc.collect()
            collected = True
        else:
            pause.wait(SETTLE_STEP_S)


def _parent(pid: int) -> int | None:
    found = re.search(r"^PPid:\t(\d+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else None


def _end_processes(before: Holdings) -> None:
    """Kill and reap what a test left running, so that the next test starts clean."""
    for pid in Holdings.now().processes - before.processes:
        if _parent(pid) == os.getpid() or _is_orphan(pid):
            os.kill(pid, signal.SIGKILL)
        if _parent(pid) == os.getpid():
            os.waitpid(pid, 0)


class Watch:
    """The hooks that hold a session to its rules, and what they remember between tests."""

    def __init__(self, seed: int, *, runs_tests: bool) -> None:
        self.seed = seed
        self.runs_tests = runs_tests
        self.before_session = Holdings.now()
        self.before_test = self.before_session
        # What fixtures of wider scope took on while the current test was set up.
        self.by_fixtures: set[str] = set()
        self.lasting_things: set[str] = set()
        self.quiet_skips: list[str] = []
        self.left_by_session: list[str] = []
        # In CI: a run that is ended from outside prints no summary.
        self.says_at_once: pytest.TerminalReporter | None = None

    @contextmanager
    def lasting(self) -> Generator[None]:
        """Let what comes meanwhile stay until the process ends: the runtime of a library."""
        before = Holdings.now()
        yield
        self.lasting_things.update(Holdings.now().since(before))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.before_session = Holdings.now()
        if os.environ.get("CI") and _worker_output(session.config) is None:
            self.says_at_once = session.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        self.by_fixtures.clear()
        self.before_test = Holdings.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)  # what it takes on is the test's own
        before = Holdings.now()
        result = yield
        self.by_fixtures.update(Holdings.now().since(before))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        yield
        if left := _left_behind(self.before_test, self.by_fixtures):
            said = _described(left)
            _end_processes(self.before_test)
            pytest.fail(f"left behind: {said}", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            command = f"{SEED_VARIABLE}={self.seed} make test PYTEST_ARGS='{item.nodeid}'"
            report.sections.append(("to repeat it", command))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail") or "optional" in report.keywords
        if report.skipped and not expected:
            self.quiet_skips.append(f"{report.nodeid}: {_reason(report.longrepr)}")
        if report.failed and self.says_at_once is not None:
            said = f"\n{report.when} of {report.nodeid}, {report.duration:.1f} s\n{report.longreprtext}"
            self.says_at_once.write_line(said, red=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and not _wants_optional_package(report.longrepr):
            self.quiet_skips.append(f"{report.nodeid}: {_reason(report.longrepr)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.runs_tests:
            if left := _left_behind(self.before_session, self.lasting_things):
                self.left_by_session.append(_described(left))
            _end_processes(self.before_session)
        if (told := _worker_output(session.config)) is not None:
            told[LEFT_BEHIND] = self.left_by_session
        strict = os.environ.get(STRICT_SKIPS_VARIABLE) == "1"
        if session.exitstatus == pytest.ExitCode.OK and (
            self.left_by_session or (strict and self.quiet_skips)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take what a worker has told at its end. One that died told nothing, which xdist reports."""
        self.left_by_session += getattr(node, "workeroutput", {}).get(LEFT_BEHIND, [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_by_session:
            terminalreporter.section("left behind by the session", red=True)
            terminalreporter.write_line("\n".join(self.left_by_session))
        if self.quiet_skips and os.environ.get(STRICT_SKIPS_VARIABLE) == "1":
            terminalreporter.section("skipped, but not optional: install what is missing", red=True)
            terminalreporter.write_line("\n".join(self.quiet_skips))


def _worker_output(config: pytest.Config) -> dict[str, object] | None:
    """The report of this process to the controller at its end; None if it is no worker."""
    return getattr(config, "workeroutput", None)


def _is_controller(config: pytest.Config) -> bool:
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def _reason(longrepr: object) -> str:
    """Return why a report was skipped: the last part of its (file, line, reason)."""
    return str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)


def _wants_optional_package(longrepr: object) -> bool:
    """Tell whether a module skipped itself at a line that asks for one of OPTIONAL_PACKAGES."""
    if not isinstance(longrepr, tuple):
        return False
    path, line = str(longrepr[0]), int(longrepr[1])
    statement = Path(path).read_text().splitlines()[line - 1]
    return any(re.search(rf"importorskip\(['\"]{name}\b", statement) for name in OPTIONAL_PACKAGES)


WATCH = pytest.StashKey[Watch]()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _begin_scratch(config: pytest.Config) -> None:
    """Have all temporary files of this session and of what it starts in one directory, which goes with it.

    A process that is killed leaves its own there. A session that is killed leaves all of it, locked no more:
    the next one removes that. The directories of `tmp_path` stay where pytest has them.
    """
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{SCRATCH}*"):
        with suppress(OSError), (left / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}"))
    lock = (made / "lock").open("wb")  # before others see it
    fcntl.flock(lock, fcntl.LOCK_EX)
    scratch = made.rename(root / made.name.removeprefix("."))
    config.add_cleanup(partial(shutil.rmtree, scratch, ignore_errors=True))
    config.add_cleanup(lock.close)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(root))
    os.environ["TMPDIR"], tempfile.tempdir = str(scratch), None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the session's seed before hypothesis reads its own and before any test imports numpy."""
    text = os.environ.get(SEED_VARIABLE, "")
    if text and not text.isdecimal():
        raise pytest.UsageError(f"{SEED_VARIABLE} is {text!r}; set it to a whole number, or leave it out")
    seed = int(text) if text else secrets.randbits(32)
    os.environ[SEED_VARIABLE] = str(seed)  # for the workers
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = seed
    for variable in POOL_VARIABLES:
        os.environ.setdefault(variable, "1")
    os.environ.pop(NO_BYTECODE_VARIABLE, None)
    # Programs and scripts that tests start find `support` and `programs` as the tests do.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *_python_path()])
    sys.dont_write_bytecode = False
    os.environ[MARKER_VARIABLE] = secrets.token_hex(8)
    # A run that fails would leave a process that waits for the next one: tests of that ask for it.
    os.environ["ZBMD_SNAPSHOTS"] = "off"
    if not hasattr(config, "workerinput"):
        _begin_scratch(config)
    # Processes that tests have crash write their last records there.
    state = tempfile.TemporaryDirectory(prefix="state-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)
    # A shell starts what it runs in the background without these, and all that tests start would inherit it.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # libuv opens a pipe with a process's first loop and keeps it.
    uvloop.new_event_loop().close()
    config.stash[WATCH] = watch = Watch(seed, runs_tests=not _is_controller(config))
    config.pluginmanager.register(watch, "zbmd-watch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files are dealt out to workers in this order: a long one that came last would run alone.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed first."""
    return f"{SEED_VARIABLE}={config.stash[WATCH].seed} repeats this run"


@pytest.fixture(autouse=True)
def own_log() -> Generator[None]:
    """Settings of structlog end with the test that made them: others look for entries of every level."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed (64 bits), derived from the session's and the test's name."""
    text = f"{request.config.stash[WATCH].seed} {request.node.nodeid}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
