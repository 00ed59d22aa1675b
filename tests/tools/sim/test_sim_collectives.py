"""`zbmd sim collectives`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.collectives.scale.roles import AT_SCALE
from zbmd.tools.entry.zbmd import main
from zbmd.tools.sim.collectives import ranks_up_to


def test_ranks_grow_by_eights() -> None:
    assert ranks_up_to(10_000) == [8, 64, 512, 4096, 10_000]
    assert ranks_up_to(64) == [8, 64] and ranks_up_to(5) == [5]


def test_a_table_of_all_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "collectives", "--ranks", "64", "--sizes", "1M", "--deaths", "2", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    names = ("ring", "tree", "double_tree", "hierarchical", "hierarchical_tree", "direct", "eager")
    for name in names:
        assert sum(line.split()[:2] == ["all_reduce", name] for line in out.splitlines()) == 2
    assert "recovered" in out and "seed 3: hosts of 8 ranks" in err and "14/14" in err
    assert "[1] not simulated: 1,048,576 bytes: with descriptors travel 1,408 at most" in out


def test_all_operations_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "collectives", "--operation", "all", "--ranks", "9", "--sizes", "1K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["operation"] for one in found} == {of.name.lower() for of in AT_SCALE}
    assert all(one["time_ns"] >= one["bound_ns"] and not one["why"] for one in found)


def test_json_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    asked = ["--ranks", "24", "--sizes", "64K,1M", "--algorithms", "ring,hierarchical", "--json"]
    # A process of its own: matplotlib keeps its fonts open.
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.entry.zbmd",
        "sim",
        "collectives",
        *asked,
        "--plot",
        str(picture),
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [(one["algorithm"], one["n"], one["nbytes"]) for one in found][:2] == [
        ("ring", 8, 1 << 16),
        ("hierarchical", 8, 1 << 16),
    ]
    assert len(found) == 8 and all(one["time_ns"] >= one["bound_ns"] for one in found)
    assert "<svg" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--ranks", "1"], "--ranks: expected 2 to 20,000, got 1"),
        (["--ranks", "8", "--deaths", "8"], "so that somebody is left"),
        (["--algorithms", "magic"], "'magic' is not simulated at scale"),
        (["--operation", "send"], "choose from all_reduce"),
        (["--ports", "9"], "at most a port for each"),
        (["--plot", "picture.doc"], "no name for a picture"),
    ],
)
def test_bad_input_is_told(asked: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "collectives", *asked]) == 2
    assert told in capsys.readouterr().err
