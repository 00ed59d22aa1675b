"""`zbmd plot`: what it takes from the files of a run, and the picture that it draws of it."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.tools.demo.command import Kill
from zbmd.tools.entry.zbmd import main
from zbmd.tools.runs.plot_data import POINTS_MAX, RunPicture, Stay, picture_of, read_picture
from zbmd.tools.runs.plot_draw import DARK, PICTURE_NAME, headline, plot_run, render, subline, told
from zbmd.tools.runs.result import RESULT_NAME, Death, RunResult, load_result, save_result
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.run.ledger import LOG_FORMAT, LOG_NAME, CommitLog, CommitRecord, LogHeader
from zbmd.transport.errors import UserError

pytestmark = pytest.mark.usefixtures("fonts")

MS = 1_000_000
SVG_BYTES_MAX = 120_000
RANK, STEP, STEPS = 2, 40, 90
ALL = (0, 1, 2, 3)


def record(
    version: int,
    *,
    epoch: int = 1,
    members: tuple[int, ...] = ALL,
    at_ms: float = 0.0,
    held_out: float | None = None,
) -> CommitRecord:
    return CommitRecord(
        version=version,
        epoch=epoch,
        members=members,
        shards={},
        losses={0: 2.0 / version, 1: 1.0},
        rng_key=(0, version - 1),
        digest=f"{version:032x}",
        at_ns=round(at_ms * MS),
        held_out_loss=held_out,
    )


def killed_run() -> list[CommitRecord]:
    """100 ms a step; rank 2 is killed 30 ms into step 40, which is committed 250 ms later."""
    return [
        record(
            version,
            epoch=1 if version < STEP else 2,
            at_ms=100.0 * version + (180.0 if version >= STEP else 0.0),
            held_out=5.0 / version if version % 10 == 1 else None,
        )
        for version in range(1, STEPS + 1)
    ]


def kill() -> Kill:
    at_ns = round(100.0 * (STEP - 1) * MS) + 30 * MS
    return Kill(
        rank=RANK,
        incarnation=1,
        step=STEP,
        epoch=1,
        at_ns=at_ns,
        survivors=3,
        notices_ns=[at_ns + 100_000, at_ns + 180_000, at_ns + 120_000],
        recovered_ns=at_ns + 250 * MS,
        step_after=STEP,
    )


FOUND = {
    "steps": STEPS,
    "parameters": 1_049_984,
    "heldout_loss_last": 1.37,
    "heldout_loss_bigram": 2.44,
    "steps_lost": 0,
    "samples_skipped": 0,
    "samples_repeated": 0,
}


def write_log(directory: Path, records: list[CommitRecord]) -> None:
    header = LogHeader(format=LOG_FORMAT, run_id="run", base_version=0, plan="{}", seed=0)
    with closing(CommitLog(directory / LOG_NAME, header)) as log:
        for each in records:
            log.append(each)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_log(tmp_path, killed_run())
    save_result(tmp_path, FOUND, [kill().death()])
    return tmp_path


def texts(svg: bytes) -> str:
    """The words of a picture, a line each."""
    root = ElementTree.fromstring(svg)
    return "\n".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))


# ---- what is read


def test_a_death_is_read_with_its_notice_its_recovery_and_its_replacement(run: Path) -> None:
    picture = read_picture(run)
    (change,) = picture.changes
    assert (change.step, change.epoch_before, change.epoch) == (STEP, 1, 2)
    assert change.step_ms == pytest.approx(280.0)
    assert change.deaths == (
        Death(rank=RANK, incarnation=1, step=STEP, epoch=1, detection_ms=0.18, recovery_ms=250.0),
    )
    assert [stay for stay in picture.stays if stay.rank == RANK] == [
        Stay(rank=RANK, incarnation=1, first=1, last=STEP - 1),
        Stay(rank=RANK, incarnation=2, first=STEP, last=STEPS),
    ]
    assert [stay for stay in picture.stays if stay.rank == 0] == [
        Stay(rank=0, incarnation=1, first=1, last=STEPS)
    ]
    assert picture.step_ms_median == pytest.approx(100.0)


def test_a_held_out_loss_belongs_to_the_step_whose_weights_it_judged(run: Path) -> None:
    picture = read_picture(run)
    assert picture.held_out.steps.tolist() == [*range(0, STEPS, 10), STEPS]
    assert picture.held_out.values[-1] == 1.37
    assert picture.evaluated.steps.tolist() == [float(version) for version in range(11, STEPS, 10)]


def test_without_a_result_the_ledger_alone_tells_who_left_and_came_back(tmp_path: Path) -> None:
    three = (0, 1, 3)
    epochs = [(1, ALL)] * 5 + [(2, three)] * 5 + [(3, ALL)] * 5
    write_log(
        tmp_path,
        [
            record(i + 1, epoch=epoch, members=members, at_ms=10.0 * i)
            for i, (epoch, members) in enumerate(epochs)
        ],
    )
    picture = read_picture(tmp_path)
    assert [told(change) for change in picture.changes] == [
        ["epoch 2", "rank 2 left"],
        ["epoch 3", "rank 2 joined"],
    ]
    assert [(s.first, s.last) for s in picture.stays if s.rank == 2] == [(1, 5), (11, 15)]
    assert headline(picture) == "15 steps on 4 ranks, through 3 epochs"
    assert "epoch 2" in texts(render(picture, ".svg"))


@given(st.lists(st.tuples(st.integers(1, 6), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=6))
def test_the_strip_shows_every_member_of_every_step_once(epochs: list[tuple[int, set[int]]]) -> None:
    records: list[CommitRecord] = []
    for number, (length, members) in enumerate(epochs, 1):
        for _ in range(length):
            records.append(record(len(records) + 1, epoch=number, members=tuple(sorted(members))))
    deaths = tuple(
        Death(rank=min(members), incarnation=number, step=1, epoch=number)
        for number, (_, members) in enumerate(epochs, 1)
    )
    stays = picture_of(records, RunResult(deaths=deaths)).stays
    shown = [(stay.rank, version) for stay in stays for version in range(stay.first, stay.last + 1)]
    assert sorted(shown) == sorted((rank, each.version) for each in records for rank in each.members)


@given(
    st.integers(1, 5 * POINTS_MAX),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_a_long_run_is_binned_without_losing_its_slowest_step_or_its_mean(length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    at_ms = np.cumsum(rng.uniform(1.0, 100.0, length))
    records = [record(i + 1, at_ms=float(at_ms[i])) for i in range(length)]
    picture = picture_of(records, RunResult())
    assert picture.loss.steps.size == min(length, POINTS_MAX)
    assert picture.step_ms.steps.size == min(length - 1, POINTS_MAX)
    assert (np.diff(picture.loss.steps) > 0).all()
    assert (np.diff(picture.step_ms.steps) > 0).all()
    low, high = min(1.0 + 2.0 / length, 3.0), 3.0
    assert ((picture.loss.values >= low - 1e-9) & (picture.loss.values <= high + 1e-9)).all()
    if length > 1:
        times = np.diff(np.array([each.at_ns for each in records])) / MS
        assert picture.step_ms.values.max() == pytest.approx(times.max())


# ---- what is drawn


def test_the_picture_says_who_died_and_what_it_cost(run: Path) -> None:
    words = texts(plot_run(run).read_bytes())
    for line in (
        "One of 4 ranks is killed; training goes on 250 ms later",
        "byte-level GPT of 1,049,984 parameters · 90 steps · no step lost, no sample skipped or repeated",
        "rank 2 killed",
        "noticed after 0.18 ms",
        "next step after 250 ms",
        "held-out text, 1.37 at the end",
        "bigram table, 2.44",
        "replacement: incarnation 2",
        "epoch 1",
        "epoch 2",
        "recovery",
    ):
        assert line in words


def test_a_calm_run_shows_no_death() -> None:
    picture = picture_of([record(version, at_ms=10.0 * version) for version in range(1, 9)], RunResult())
    words = texts(render(picture, ".svg"))
    assert "8 steps on 4 ranks" in words
    assert "killed" not in words
    assert "recovery" not in words
    assert "bigram" not in words


def test_losses_of_samples_and_a_proof_of_the_bits_are_told() -> None:
    records = [record(1)]
    lossy = RunResult(steps_lost=0, samples_skipped=3, samples_repeated=0)
    assert subline(picture_of(records, lossy)) == "0 steps lost, 3 samples skipped, 0 repeated"
    proven = picture_of(records, RunResult(verified=True))
    assert subline(proven) == "the same weights, bit for bit, as undisturbed"


def test_the_same_run_gives_the_same_bytes_in_any_process(run: Path) -> None:
    pictures: list[bytes] = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "zbmd.tools.entry.zbmd",
            "plot",
            str(run),
            "-o",
            str(run / f"{seed}.svg"),
        ]
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.DEVNULL
        )
        pictures.append((run / f"{seed}.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_every_colour_has_one_for_dark_pages(run: Path) -> None:
    svg = plot_run(run).read_text()
    body = svg[svg.index("</style>") :]
    assert set(re.findall(r"#[0-9a-f]{6}\b", body)) <= set(DARK)
    for light, dark in DARK.items():
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in svg


def test_the_picture_of_a_long_run_stays_small() -> None:
    rng = np.random.default_rng(7)
    records = [
        record(
            version,
            epoch=1 + version // 1_500,
            at_ms=100.0 * version + float(rng.uniform(0, 50)),
            held_out=float(rng.uniform(1, 2)) if version % 5 == 0 else None,
        )
        for version in range(1, 6_001)
    ]
    deaths = tuple(Death(rank=k % 4, incarnation=1, step=1_500 * k, epoch=k) for k in range(1, 5))
    svg = render(picture_of(records, RunResult(deaths=deaths)), ".svg")
    assert len(svg) <= SVG_BYTES_MAX
    assert "4 ranks" in texts(svg)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0, -1.0])
def test_a_loss_that_no_axis_can_show_is_left_out(loss: float) -> None:
    records = [msgspec.structs.replace(record(version), losses={0: loss}) for version in (1, 2, 3)]
    assert "3 steps on 4 ranks" in texts(render(picture_of(records, RunResult()), ".svg"))


def test_a_png_is_written_where_it_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run / "pictures" / "run.png"
    assert main(["plot", str(run), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 500


# ---- what goes wrong


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plot", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_bad_input_is_refused_in_one_line(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "no commit log at" in complaint(capsys, str(empty))
    write_log(empty, [record(1)])
    whole = (empty / LOG_NAME).read_bytes()
    (empty / LOG_NAME).write_bytes(whole[: len(whole) - 1])
    assert "no committed step yet" in complaint(capsys, str(empty))
    assert ".svg or .png" in complaint(capsys, str(run), "-o", str(run / "run.pdf"))
    (run / "taken.svg").mkdir()
    assert "cannot write" in complaint(capsys, str(run), "-o", str(run / "taken.svg"))
    for damaged in (b"", b"{", b"[]", b'{"deaths": [{"rank": "two"}]}', b"[" * 100_000, b" " * (2 << 20)):
        (run / RESULT_NAME).write_bytes(damaged)
        assert "is not the result of a run" in complaint(capsys, str(run))
    assert not (run / PICTURE_NAME).exists()


def test_without_matplotlib_the_error_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'zbmd[plot]'" in complaint(capsys, str(run))


def test_the_command_loads_matplotlib_only_to_draw() -> None:
    check = "import sys, zbmd.tools.runs.commands; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_result_is_kept_as_it_was_printed(tmp_path: Path) -> None:
    assert load_result(tmp_path) == RunResult()
    save_result(tmp_path, FOUND, [])
    assert json.loads((tmp_path / RESULT_NAME).read_text()) == {**FOUND, "deaths": []}
    with pytest.raises(UserError, match="cannot write"):
        save_result(tmp_path / RESULT_NAME, FOUND, [])


def test_a_run_on_a_mesh_is_drawn_from_its_metrics(tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step":1,"loss":6.5}\n{"step":2,"loss":6.0}\n')
    assert "nats per token" in texts(plot_run(tmp_path).read_bytes())


# ---- a real run


def test_the_demo_leaves_all_that_the_picture_shows(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a small text, {i * i}\n" for i in range(400)))
    options = ["-n", "2", "--quick", "--steps", "8", "--kill-seed", "3", "--data", str(text)]
    command = [sys.executable, "-m", "zbmd", "demo", *options, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    picture: RunPicture = read_picture(tmp_path / "run")
    (death,) = picture.result.deaths
    assert [death.detection_ms] == printed["detection_ms"]
    assert [death.recovery_ms] == printed["recovery_ms"]
    assert [change.deaths for change in picture.changes] == [(death,)]
    assert sorted(stay.incarnation for stay in picture.stays) == [1, 1, 2]
    assert picture.held_out.steps.tolist() == [0.0, 8.0]
    assert f"rank {death.rank} killed" in texts(plot_run(tmp_path / "run").read_bytes())
