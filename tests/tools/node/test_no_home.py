"""Users of containers who have a number and neither a name nor a home: a cookie's path is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

if TYPE_CHECKING:
    from support.processes.launcher import Ended, Launcher

NOBODY = ("unshare", "--user", "--map-user=4242", "--map-group=4242")
HOMES = ("HOME", "USER", "LOGNAME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
SIZES = "--context 8 --width 16 --heads 2 --layers 2 --shards 4 --sequences-per-shard 2".split()  # noqa: SIM905
SCHEDULE = "--warmup 2 --curve constant --evaluate-every 0 --checkpoint-every 0 --steps 3".split()  # noqa: SIM905
SMALL = (*SIZES, *SCHEDULE, "--evaluate-windows", "4", "--data", "text", "--out", "run")
FAILS = "import zbmd\nraise KeyError('there is something to keep of this')\n"
GROUP = str(PROGRAMS / "launched" / "one_reduction.py")


def as_nobody(launcher: Launcher, *arguments: str, cookie: bool = True, home: str = "") -> Ended:
    unset = [word for name in (*HOMES, *(() if cookie else ("ZBMD_COOKIE_FILE",))) for word in ("-u", name)]
    given = [f"HOME={home}"] if home else []
    return launcher.run(*arguments, before=(*NOBODY, "env", *unset, *given))


def test_what_needs_a_home_says_what_to_set(launcher: Launcher) -> None:
    ended = as_nobody(launcher, "run", "-n", "1", GROUP, cookie=False)
    assert (
        ended.code == 2 and "no home directory" in ended.errors[-1] and "ZBMD_COOKIE_FILE" in ended.errors[-1]
    )
    ended = as_nobody(launcher, "run", "-n", "1", GROUP, cookie=False, home="/proc/1")
    assert ended.code == 2 and "ZBMD_COOKIE_FILE" in ended.errors[-1], ended
    ended = as_nobody(launcher, "dump")
    assert ended.code == 2 and "ZBMD_FLIGHT_DIR" in ended.errors[-1], ended
    ended = as_nobody(launcher, "up")
    assert ended.code == 2 and "ZBMD_STATE_DIR" in ended.errors[-1], ended


@pytest.mark.parametrize("home", ["", "/proc/1"], ids=["none", "read-only"])
def test_jobs_and_commands_work_without_a_home(launcher: Launcher, home: str) -> None:
    (launcher.directory / "fails.py").write_text(FAILS)
    (launcher.directory / "text").write_text("To be or not to be, that is the question. " * 100)
    job = as_nobody(launcher, "run", "-n", "2", GROUP, home=home)
    assert job.code == 0 and sorted(job.out) == ["[rank0]: done", "[rank1]: done"], job
    train = as_nobody(launcher, "run", "-n", "2", "-m", "zbmd", "train", *SMALL, home=home)
    assert train.code == 0, train
    failed = as_nobody(launcher, "run", "-n", "1", "fails.py", home=home)
    assert failed.code == 1 and "KeyError" in failed.errors[-1], failed
    for command in ("status", "doctor"):
        assert as_nobody(launcher, command, home=home).code == 0
    assert not [path for path in launcher.directory.iterdir() if path.name.startswith("~")]
