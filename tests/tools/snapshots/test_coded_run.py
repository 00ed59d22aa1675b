"""A run with an erasure code: as many ranks as it has parities are lost, and the bits stay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support.jobs.by_words import plain_by

from zbmd.transport import kill_points

if TYPE_CHECKING:
    from support.processes.launcher import Ended, Launcher

OPTIONS = (
    *("--data", "text", "--steps", "8", "--context", "16", "--width", "16", "--heads", "2", "--layers", "4"),
    *("--sequences-per-shard", "1", "--shards", "4", "--evaluate-every", "0"),
)
APART = {"ZBMD_LINKS": "tcp", "ZBMD_KEEP_MEMORY": "off", "ZBMD_ARENA": "8MiB"}
"""Each rank is as if on a host of its own, and its memory is lost with it."""


def trained(launcher: Launcher, ranks: int, out: str, *more: str, **variables: str) -> Ended:
    if not (launcher.directory / "text").exists():
        text = "".join(f"line {i} of some text that is to be learnt\n" for i in range(2000))
        (launcher.directory / "text").write_text(text)
    job = (
        "run",
        "-n",
        str(ranks),
        "--max-restarts",
        "9",
        "-m",
        "zbmd",
        "train",
        *OPTIONS,
        "--out",
        out,
        *more,
    )
    return launcher.run(*job, **variables)


def weights(ended: Ended) -> str:
    assert ended.code == 0, ended
    return re.findall(r'"weights_sha256":"([0-9a-f]+)"', "\n".join(ended.out))[-1]


@pytest.mark.parametrize(
    ("mesh", "redundancy", "faults"),
    [
        (("--mesh", "pp=4"), "ec:2+2", "rank1:job.begin:4+rank3:job.begin:4"),
        (("--mesh", "pp=4"), "ec:3+1", "rank2:mirror.middle:3"),
        (("--zero", "3"), "ec:2+2", "rank0:job.begin:5+rank2:job.begin:5"),
        (("--zero", "3"), "ec:2+2", "rank1:job.begin:3,rank1#2:mirror.restore_middle,rank3:mirror.middle:3"),
    ],
    ids=["stages", "one_in_a_copy", "sharded", "again_in_a_rebuild"],
)
def test_lost_shards_are_rebuilt_to_the_same_bits(
    launcher: Launcher, mesh: tuple[str, ...], redundancy: str, faults: str
) -> None:
    ended = trained(launcher, 4, "lost", *mesh, "--redundancy", redundancy, ZBMD_FAULT=faults, **APART)
    data = ("--data", str(launcher.directory / "text"))
    calm = plain_by([*OPTIONS, *data, "--out", str(launcher.directory / "calm")])
    assert weights(ended) == calm.weights_sha256, ended
    assert any(f"redundancy {redundancy}: it was asked for" in line for line in ended.errors), ended
    failed = re.findall(
        r"^\[zbmd\]: rank (\d) \(pid \d+, incarnation (\d)\) failed", "\n".join(ended.errors), re.M
    )
    assert len(failed) == len(kill_points.parse(faults)), ended


def test_more_losses_than_parities_end_the_run_with_the_last_checkpoint_named(launcher: Launcher) -> None:
    """The second is lost before the first one's replacement has its shard; the checkpoint is older."""
    more = ("--mesh", "pp=4", "--redundancy", "ec:3+1", "--curve", "constant")
    assert trained(launcher, 4, "lost", *more, "--steps", "3", **APART).code == 0
    faults = "rank1:job.begin:3,rank3:job.meet:2"
    ended = trained(launcher, 4, "lost", *more, "--resume", "lost", ZBMD_FAULT=faults, **APART)
    assert ended.code != 0, ended
    told = "\n".join(ended.errors)
    assert "more than the 1 of 3 + 1 that may be lost at once" in told, ended
    assert "lost/checkpoint.json" in told, ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--redundancy", "ec:2+0"), "expected auto, replica, buddy, ec:K+M"),
        (("--redundancy", "ec:2+1"), "ranks along dp of dp=2 hold the same already"),
        (
            ("--mesh", "pp=2", "--redundancy", "ec:2+1"),
            "needs 2 to 3 failure domains, there is 1: host 0",
        ),
        (("--mesh", "pp=2", "--redundancy", "replica"), "no two ranks of"),
        (("--redundancy", "buddy"), "hold the same already"),
        (("--offload", "files", "--redundancy", "none"), "the state is in files"),
    ],
)
def test_what_a_mesh_does_not_have_is_refused(
    launcher: Launcher, options: tuple[str, ...], words: str
) -> None:
    ended = trained(launcher, 2, "refused", *options)
    assert ended.code == 2 and words in "\n".join(ended.errors), ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "redundancy replica: ranks along dp hold the same"),
        (("--mesh", "pp=2"), "redundancy buddy: each state is on one rank: another rank has a copy"),
        (("--mesh", "pp=2", "--redundancy", "none"), "redundancy none: it was asked for"),
    ],
)
def test_the_choice_is_stated_with_its_reason(
    launcher: Launcher, options: tuple[str, ...], words: str
) -> None:
    ended = trained(launcher, 2, "out", *options)
    assert ended.code == 0 and any(words in line for line in ended.errors), ended
