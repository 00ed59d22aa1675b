"""Mistakes of users, by the real command: one paragraph that says what to do, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import node_template
from support.processes.launcher import THREADS, after_threads

from zbmd.tools.train.command import merged, options_of

if TYPE_CHECKING:
    from support.processes.launcher import Ended, Launcher

USAGE = 2
PROGRESS = re.compile(r"step |\[rank0\]: (step \d|\w+ = |# \w+ is not set|redundancy \w+: )")
"""Lines of a run that are no error: its recipe, redundancy, steps, evaluations."""
SMALL = (
    *("--steps", "6", "--context", "16", "--width", "16", "--heads", "2", "--layers", "1"),
    *("--sequences-per-shard", "1", "--checkpoint-every", "2", "--evaluate-every", "3"),
)
SHARD_BYTES_MORE = 60_000  # has each rank's part of a checkpoint; other files of a step have far fewer

# The superuser reads and writes what it likes; what is executed from here is no longer one in this respect.
_OBEY_PERMISSIONS = """
import ctypes, os, sys
for CAP_DAC in (1, 2):
    ctypes.CDLL(None).prctl(24, CAP_DAC, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""
OBEY_PERMISSIONS = (sys.executable, "-c", _OBEY_PERMISSIONS)


@pytest.fixture(scope="module")
def template() -> Generator[socket.socket]:
    """Return the process that all commands here are forked from: none has the superuser's rights on files."""
    with node_template(*OBEY_PERMISSIONS) as ours:
        yield ours


def write_text(path: Path) -> str:
    path.write_text("".join(f"line {i} of some text that is to be learnt\n" for i in range(2000)))
    return str(path)


RECORDED = ("--capture", "captured")


def started(launcher: Launcher) -> bool:
    """Whether a process of a run that was to be `RECORDED` has come so far as to begin a record."""
    return (launcher.directory / "captured").exists()


def train(
    launcher: Launcher,
    *arguments: str,
    out: str = "run",
    before: tuple[str, ...] = (),
    starting: tuple[str, ...] = (),
) -> Ended:
    """The training job on two ranks; `--data` and `--out` given again in `arguments` count."""
    job = ("-m", "zbmd", "train", "--data", "text", "--out", out, *SMALL, *arguments)
    return launcher.run("run", "-n", "2", *starting, *job, before=before)


def assert_one_paragraph(ended: Ended, *patterns: str) -> None:
    """The last line of standard error is the only one of ours, and no other is there but progress."""
    told = [line for line in ended.errors if not PROGRESS.match(line) and not THREADS.match(line)]
    assert ended.code == USAGE, ended
    assert len(told) == 1, ended
    assert told[0] == ended.errors[-1], ended
    assert not ended.out, ended
    for pattern in patterns:
        assert re.search(pattern, told[0]), ended
    assert not told[0].endswith(".."), ended


# Data, output, checkpoint, model.

BAD_JOBS = [
    (["--data", "absent"], r'--data "absent" does not exist', "check the path"),
    (["--data", "absent/*.txt"], r'no file matches "absent/\*\.txt"', "quote a pattern"),
    (["--data", "empty"], "the corpus empty is empty", "Give --data files with text"),
    (["--data", "short"], "short is too short: it has 5 bytes", "Give more text, or a shorter context"),
    (["--data", "secret"], "cannot read secret: Permission denied", "that you may read"),
    (["--out", "text"], "cannot use text for the run: File exists", "that you may write to with --out"),
    (["--out", "closed/run"], "cannot use closed/run for the run: Permission denied", "with --out"),
    (["--out", "closed"], "cannot write closed/corpus.bin: Permission denied", "that you may write to"),
    (["--resume", "absent"], "no checkpoint at absent", "check the path given to --resume"),
    (["--width", "15"], "width 15 cannot be divided over 2 heads", "choose a width that is a multiple"),
    (["--width", "8192", "--layers", "64"], r"2 ranks need at least [\d.]+ TiB", r"Choose smaller --width"),
    (["--context", "65537"], "context is 65537", "must be 1 to 65536"),
    (["--sequences-per-shard", "99999999"], r"and [\d.]+ TiB of activations\)", "--sequences-per-shard"),
    (["--steps", "many"], "--steps: expected a number, got 'many'", "a number"),
    (["--storage", "float16"], "unrecognized arguments: --storage", "See zbmd train --help"),
]


@pytest.mark.parametrize(("arguments", "what", "then"), BAD_JOBS, ids=[" ".join(c[0]) for c in BAD_JOBS])
def test_a_job_that_cannot_start_says_so_once(
    launcher: Launcher, arguments: list[str], what: str, then: str
) -> None:
    directory = launcher.directory
    write_text(directory / "text")
    (directory / "empty").touch()
    (directory / "short").write_text("short")
    (directory / "secret").write_text("secret")
    (directory / "secret").chmod(0)
    (directory / "closed").mkdir(mode=0o500)
    ended = train(launcher, *arguments, starting=RECORDED)
    assert_one_paragraph(ended, what, then)
    assert not started(launcher), "a rank reported it"
    assert not [path for path in directory.rglob("corpus.bin") if "--resume" not in arguments], ended


def test_a_checkpoint_that_is_damaged_foreign_or_closed_is_not_gone_on_from(launcher: Launcher) -> None:
    write_text(launcher.directory / "text")
    assert train(launcher, starting=RECORDED).code == 0
    assert started(launcher), "who is started begins a record"
    checkpoint = launcher.directory / "run" / "checkpoint.json"
    shard, beside = sorted(checkpoint.parent.glob("checkpoint-6-*.safetensors"))
    assert min(one.stat().st_size for one in (shard, beside)) > SHARD_BYTES_MORE
    torn, other = launcher.directory / "torn", launcher.directory / "other"
    weights = checkpoint.with_name("weights.safetensors")
    for directory, kept in ((torn, shard.read_bytes()[:5000]), (other, weights.read_bytes())):
        directory.mkdir()
        (directory / shard.name).write_bytes(kept)
        (directory / beside.name).write_bytes(beside.read_bytes())
        (directory / checkpoint.name).write_bytes(checkpoint.read_bytes())
    copied = shutil.copytree(checkpoint.parent, launcher.directory / "copied")
    half = launcher.directory / "half"
    half.write_bytes(checkpoint.read_bytes()[:100])
    advice = "Give --resume a run's directory with a whole checkpoint"
    for resume, arguments, what in (
        (half, [], f"half cannot be read as a checkpoint: Input data was truncated. {advice}"),
        (torn, [], f"torn/{shard.name} cannot be read as a checkpoint: its header names .* {advice}"),
        (other, [], "checksum mismatch in its header: the shard was corrupted after it was written"),
        (weights, [], f"weights.safetensors cannot be read as a checkpoint: .* {advice}"),
        (checkpoint, ["--seed", "9"], r"Differences \(there, here\): training.seed \(0, 9\)\. Give the opt"),
        (checkpoint, [], "of step 6, and --steps is 6: no step is left. Give more --steps"),
        (checkpoint, ["--steps", "9"], r"training.horizon \(6, 9\)\. .* with --horizon 6 it does so here"),
        (copied, ["--out", "run"], "run/commits.zlog belongs to another run .* a directory of its own"),
    ):
        ended = train(launcher, "--resume", str(resume), *arguments, out="again")
        assert_one_paragraph(ended, what)
    longer = ("--steps", "8", "--horizon", "6")
    further = train(launcher, "--resume", str(checkpoint), *longer, out="further")
    assert digest(further) == digest(train(launcher, *longer, out="undisturbed"))
    checkpoint.chmod(0)
    ended = train(launcher, "--resume", str(checkpoint), out="again")
    assert re.search(
        "^left out: .* cannot be read as a checkpoint: Permission denied", "\n".join(ended.errors), re.M
    )
    assert ended.code == USAGE and "of step 6, and --steps is 6: no step is left" in ended.errors[-1], ended


# Recipes of `zbmd train`.

BAD_RECIPES = [
    (2, {"mesh": "tp=3"}, "a mesh of tp 3 has 3 ranks, and there are 2"),
    (3, {"mesh": "dp=-1,tp=2"}, "does not divide 3 ranks: start a multiple of 2"),
    (2, {"mesh": "ep=2"}, "unknown mesh axis ep; valid axes: dp, fsdp, pp, tp"),
    (2, {"mesh": "pp=2"}, "1 layers do not divide over 2 stages.*need a multiple of 2 layers"),
    (2, {"mesh": "pp=2", "layers": 2, "chunks": 0}, "chunks is 0"),
    (2, {"mesh": "pp=2", "layers": 2, "family": "gpt2"}, "the head of a gpt2 model is its embedding"),
    (4, {"mesh": "tp=4"}, "2 heads cannot be divided over 4"),
    (2, {"mesh": "tp=2", "context": 9}, "9 positions cannot be divided over 2"),
    (8, {"mesh": "dp=4,pp=2", "layers": 2, "shards": 3}, "3 logical shards are too few for dp=4 pipelines"),
    (2, {"width": 8192, "layers": 64}, "2 ranks need at least"),
    (2, {"zero": 3, "width": 8192, "layers": 64}, "2 ranks need at least.* higher --zero stage"),
    (2, {"zero": 3, "resume": "absent"}, "no checkpoint at absent: check the path given to --resume"),
    (2, {"zero": 1, "offload": "closed/state"}, "cannot be offloaded to closed/state, .*Permission denied"),
    (2, {"zero": 4}, "--zero: expected one of 0, 1, 2, 3, got 4"),
    (2, {"zero": 2, "mesh": "tp=2"}, "--zero shards the state along dp, and tp=2 has one rank there"),
    (
        4,
        {"zero": 2, "mesh": "dp=2,pp=2"},
        "1 layers do not divide over 2 stages.*need a multiple of 2 layers",
    ),
    (4, {"zero": 3, "mesh": "dp=2,tp=2", "chunks": 2}, "--zero has no stages to divide.* or give pp"),
    (
        8,
        {"zero": 3, "mesh": "dp=4,pp=2", "layers": 2, "shards": 3},
        "3 logical shards are too few for dp=4 pipelines",
    ),
    (2, {"zero": 2, "precision": "float64", "checkpoint_every": 0}, "--zero keeps states in float32"),
    (2, {"zero": 2, "chunks": 2}, "--zero has no stages to divide"),
    (4, {"mesh": "pp=4", "balance": "on"}, "cannot divide 3 layers into 4 parts: use fewer stages"),
    (1, {"data": "short"}, "short is too short"),
    (1, {"data": "short", "tokens": "bpe", "vocabulary": 300}, "the dataset short is too short"),
    (1, {"data": "short", "tokens": "bpe", "vocabulary": 3}, "a vocabulary of 3 cannot be trained"),
    (1, {"weights": "."}, "config.json must lie beside"),
    (1, {"resume": "absent"}, "no checkpoint at absent"),
    (2, {"offload": "closed/s"}, "cannot be offloaded to closed/s, .* a rank: Permission denied"),
    (2, {"offload": "s", "precision": "float64", "checkpoint_every": 0}, "--offload keeps states in float32"),
    (1, {"out": "closed/run"}, "cannot use closed/run for the run: Permission denied"),
]


@pytest.mark.parametrize(("ranks", "changes", "what"), BAD_RECIPES, ids=[str(c[1]) for c in BAD_RECIPES])
def test_a_recipe_that_cannot_be_is_told_before_any_rank_is_started(
    launcher: Launcher, ranks: int, changes: dict[str, str | int], what: str
) -> None:
    directory = launcher.directory
    write_text(directory / "text")
    (directory / "short").write_text("short")
    (directory / "closed").mkdir(mode=0o500)
    small = {"data": "text", "out": "run", "context": 8, "width": 16, "heads": 2, "layers": 1}
    found = merged({name: str(value) for name, value in {**small, **changes}.items()}, {}, None)
    # `zbmd train` looks at the mesh itself, too.
    values = {name: value for name, (value, _) in found.items()} | {"mesh": "dp=1"}
    recipe = msgspec.structs.replace(options_of(values), mesh=str(changes.get("mesh", "dp=-1")))
    ended = launcher.run("run", "-n", str(ranks), *RECORDED, "-m", "zbmd.training.sharded", recipe.encode())
    assert_one_paragraph(ended, what)
    assert not started(launcher), "a rank reported it"


# Settings.

BAD_SETTINGS = [
    (["-n", "1023"], "expected 1 to 1022 processes, auto, gpu or cpu, got '1023'"),
    (["-n", "0"], "expected 1 to 1022 processes, auto, gpu or cpu, got '0'"),
    (["-n", "x"], "expected 1 to 1022 processes, auto, gpu or cpu, got 'x'"),
    (["--config", "closed.toml"], "closed.toml: .* cannot be read: Permission denied. Give a readable"),
    (["--config", "type.toml"], "type.toml:2: max_restarts must be a text or a number, not True"),
    (["--config", "syntax.toml"], "syntax.toml: not valid TOML: .*line 1.* Correct that place"),
    (["--config", "key.toml"], "key.toml:1: unknown setting 'speed'. Known are: arena"),
    (["--arena", "1TiB", "-n", "2"], r"each need about 2\.0 TiB, but .* available\. Give --arena \d+MiB"),
    (["--log-dir", "closed", "-n", "2"], "cannot write logs to .*/closed: Permission denied. Give --log-dir"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "what"), BAD_SETTINGS, ids=[" ".join(c[0]) for c in BAD_SETTINGS])
def test_a_setting_that_cannot_be_is_told_once(launcher: Launcher, arguments: list[str], what: str) -> None:
    directory = launcher.directory
    (directory / "script.py").write_text("import asyncio, zbmd\nasync def main():\n"
        "    async with zbmd.join():\n        pass\nasyncio.run(main())\n")  # fmt: skip
    (directory / "closed").mkdir(mode=0o500)
    (directory / "closed.toml").touch(mode=0)
    (directory / "type.toml").write_text("arena = '1MiB'\nmax_restarts = true\n")
    (directory / "syntax.toml").write_text("arena = = '1MiB'\n")
    (directory / "key.toml").write_text("speed = 1\n")
    ended = launcher.run("run", *arguments, "script.py")
    assert_one_paragraph(ended, what)


# Scripts that fail.

REASON = "raise RuntimeError('the reason')"


FAILS = str(PROGRAMS / "launched" / "fails.py")


def failed(ended: Ended) -> str:
    """The paragraph that ends standard error, of a run that has failed with one traceback at most."""
    assert ended.code == 1, ended
    assert sum(line.endswith("Traceback (most recent call last):") for line in ended.errors) <= 1, ended
    assert ended.errors[-1].startswith("[zbmd]: the run failed: "), ended
    return ended.errors[-1]


def test_a_rank_that_raises_before_it_joins_ends_its_waiting_siblings(launcher: Launcher) -> None:
    path = "script.py"
    (launcher.directory / path).write_text(
        f"import os, signal\nif os.environ['RANK'] == '1':\n    {REASON}\nsignal.pause()\n"
    )
    ended = launcher.run("run", "-n", "3", path)
    told = failed(ended)
    assert "The first failure was rank 1's: exit code 1: RuntimeError: the reason. Its traceback" in told
    assert [line for line in ended.errors if line.startswith("[zbmd]")] == [told], ended
    assert after_threads(ended.errors)[:-1] == [
        "[rank1]: Traceback (most recent call last):",
        f'[rank1]:   File "{path}", line 3, in <module>',
        f"[rank1]:     {REASON}",
        "[rank1]: RuntimeError: the reason",
    ]


def test_all_ranks_failing_alike_at_import_is_told_once(launcher: Launcher) -> None:
    (launcher.directory / "script.py").write_text("import no_such_module\n")
    ended = launcher.run("run", "-n", "4", "script.py")
    assert "ModuleNotFoundError: No module named 'no_such_module'. Its traceback is above" in failed(ended)
    assert sum("ModuleNotFoundError" in line for line in ended.errors) == 2, ended


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_that_fails_each_time_alike_is_restarted_once(launcher: Launcher, how: str) -> None:
    ended = launcher.run("run", "-n", "3", "--max-restarts", "2", FAILS, how)
    told = failed(ended)
    assert "rank1 failed again as a rank did before, with no progress in between: " in told
    assert "The first failure was rank 1's: exit code " in told
    advice = "Its traceback is above: mend the script" if how == "raises" else "ended itself (sys.exit"
    assert advice in told
    assert sum("its replacement starts" in line for line in ended.errors) == 1, ended


def test_a_rank_that_fails_each_time_otherwise_is_restarted_so_often_and_no_more(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", "--max-restarts", "2", FAILS, "differs")
    told = ended.errors[-1]
    assert ended.code == 1 and "more than 2 restarts within 60 s" in told, ended
    assert "The first failure was rank 1's: exit code " in told
    assert sum("its replacement starts" in line for line in ended.errors) == 2, ended


def test_the_cause_is_named_and_not_the_siblings_that_lost_their_peer(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "3", "--on-loss", "shrink", FAILS, "reduces")
    assert "The first failure was rank 1's: exit code 1: RuntimeError: the reason." in ended.errors[-1], ended


def test_a_rank_that_raises_and_does_not_end_is_heard_all_the_same(launcher: Launcher) -> None:
    (launcher.directory / "script.py").write_text(
        f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{REASON}\n"
    )
    with launcher.start("run", "-n", "1", "script.py") as run:
        run.until(r"^\[rank0\]: RuntimeError: the reason$")
        os.kill(run.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM


# A disk that is full.

LIMITED = str(PROGRAMS / "training/limited_files.py")
NO_ROOM = r"cannot write run/checkpoint-\d-[0-9a-f]{16}-[01]\.safetensors: the disk is full"


@pytest.mark.parametrize(("limited_from", "advice"), [
    (1, "There is none yet"),
    # The checkpoint of step 4 is begun when that of step 2 is there; whether it is written by now is open.
    (5, r"There is none yet|The last one, run/checkpoint\.json, stays"),
])  # fmt: skip
def test_a_checkpoint_that_finds_no_room_ends_no_run_and_the_last_one_stays(
    launcher: Launcher, limited_from: int, advice: str
) -> None:
    """By the limit on the size of a file, which needs no privilege and holds for the rank alone."""
    write_text(launcher.directory / "text")
    limits = (LIMITED, str(limited_from), str(SHARD_BYTES_MORE))
    ended = launcher.run("run", "-n", "2", *limits, "--data", "text", "--out", "run", *SMALL)
    assert ended.code == 0, ended
    told = [line for line in ended.errors if "could not be written" in line]
    assert 1 <= len(told) <= 2, "once a rank"
    for line in told:
        said = rf"{NO_ROOM} \(File too large\).* ({advice}); the run goes on, and tries again\."
        assert re.search(said, line), ended
    names = [path.name for path in (launcher.directory / "run").glob("checkpoint*")]
    assert not list((launcher.directory / "run").glob(".checkpoint*")), "no part of a file is left"
    if "checkpoint.json" not in names:
        assert not names, "what was dropped is removed"
        return
    resumed = train(launcher, "--resume", "run/checkpoint.json", out="resumed")
    undisturbed = train(launcher, out="undisturbed")
    assert digest(resumed) == digest(undisturbed) == digest(ended)


def digest(ended: Ended) -> str:
    """The weights that a run has ended with."""
    assert ended.code == 0, ended
    found: str = json.loads(ended.out[-1].removeprefix("[rank0]: "))["weights_sha256"]
    return found


def may_mount() -> bool:
    """Whether this user may mount a file system in a name space of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=180, check=False).returncode == 0
    except FileNotFoundError:
        return False


# A real full disk where one can be had; the limit on file sizes above takes the same way through the job.
if may_mount():

    @pytest.mark.parametrize("disk_kib", [60, 200, 300])
    def test_a_full_disk_is_told_and_leaves_no_part_of_a_file(launcher: Launcher, disk_kib: int) -> None:
        write_text(launcher.directory / "text")
        (launcher.directory / "disk").mkdir()
        listing = launcher.directory / "listing"
        mount = f"mount -t tmpfs -o size={disk_kib}k none disk"
        commands = f'{mount} && "$@"; code=$?; ls -A disk/run >{listing}; exit $code'
        inside = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", commands, "sh")
        ended = train(launcher, out="disk/run", before=inside)
        before = (
            r"the dataset text takes [\d,]+ bytes in disk/run, and its disk has [\d,]+ free: free some space"
        )
        if disk_kib == 60:
            assert_one_paragraph(ended, before)
        else:  # a checkpoint that does not fit ends no run, and the run's own files do
            full = r"cannot write disk/run/\S+: the disk is full \(No space left on device\)"
            told = [line for line in ended.errors if not PROGRESS.match(line) and not THREADS.match(line)]
            of_ours = [line for line in told if "cannot write" in line]
            assert of_ours and all(re.search(full, line) for line in of_ours), ended
            assert ended.code in (0, USAGE), ended
        kept = {
            60: [],
            200: [
                "claim.lock",
                "commits.zlog",
                "corpus.bin",
                "data.json",
                "launches",
                "metrics.jsonl",
                "profile",
                "recipe.toml",
                "run.lock",
            ],
        }
        names = listing.read_text().split()
        whole = [name for name in names if not name.startswith("checkpoint")]
        weights = ["weights.safetensors"] if ended.code == 0 else []
        assert whole == sorted([*kept[min(disk_kib, 200)], *weights]), ended
        assert not [name for name in names if name.startswith(".")], ended
