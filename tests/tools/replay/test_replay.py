"""A captured job is played again: identical, kill included; a mutated machine diverges, and is named."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from zbmd.tools.chaos.small_job import run_small_job, write_text
from zbmd.tools.entry import zbmd as cli
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.machine import Mirror
from zbmd.transport.capture import merged, open_log

KILLED_IN_STEP = 3
FAULT = f"rank1:job.begin:{KILLED_IN_STEP}"

OF_RANKS = {"mirror", "pipeline-stage", "operations", "directory", "upgrade-ledger"}
"""The machines of each rank of the job."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The capture of a small training job of three ranks, one of which is killed and replaced."""
    directory = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZBMD_COOKIE_FILE", str(directory / "cookie"))
        patch.setenv("ZBMD_CAPTURE", str(directory / "run.zlog"))
        outcome = uvloop.run(run_small_job(directory / "out", write_text(directory / "text"), fault=FAULT))
        assert outcome.deaths == 1
        yield directory / "run.zlog"


def replay(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["replay", *map(str, arguments)])
    return code, capsys.readouterr().out


def replay_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code, out = replay(capsys, *arguments, "--json")
    return code, json.loads(out)


def verdicts(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [verdict for process in document["processes"] for verdict in process["verdicts"]]


def commit_unseen(self: Mirror, votes: tuple[tuple[int, int], ...]) -> list[zm.Action]:
    """`_voted` that commits whatever the others voted for."""
    self._expect(zm.Voted(votes=votes), zm.State.PREPARED)
    self.state, self.version = zm.State.HOLDING, self.version + 1
    self.known = self.version
    return [zm.Commit(version=self.version, digests=(votes[0][0],))]


# ---- the job


def test_the_job_is_identical_kill_included(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replay_json(capsys, job)
    assert code == 0
    assert [v for v in verdicts(found) if v["verdict"] != "identical"] == []
    assert [p["process"] for p in found["processes"]] == [
        "node#1",
        "rank0#1",
        "rank1#1",
        "rank1#2",
        "rank2#1",
    ]
    kinds = {v["kind"] for v in verdicts(found)}
    assert kinds == {"jobs", "hello", *OF_RANKS}
    assert sum(v["events"] for v in verdicts(found)) > 100
    endings = {p["process"]: p["ending"] for p in found["processes"]}
    assert [process for process, ending in endings.items() if ending] == ["rank1#1"]


def test_what_it_prints(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = replay(capsys, job)
    assert code == 0
    assert "5 processes" in out and "steps 1 to 5" in out
    assert "  rank2#1  mirror                   identical (" in out
    assert "cut off" in out
    assert out.splitlines()[-1].startswith("identical: ")


def test_the_logs_hold_deaths_frames_both_ways_and_steps(job: Path) -> None:
    logs = {log.name: log for log in open_log(job).processes}
    kinds = {name: {e.record.kind.name for e in log.entries()} for name, log in logs.items()}
    for name in ("node#1", "rank0#1", "rank2#1"):
        assert {"FRAME_IN", "FRAME_OUT", "DEATH"} <= kinds[name], name
    assert logs["rank0#1"].steps == (1, 5)
    assert logs["rank1#2"].steps is not None and logs["rank1#2"].steps[1] == 5


def test_a_mutated_machine_diverges_at_its_step(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mirror, "_voted", commit_unseen)
    code, found = replay_json(capsys, job)
    assert code == 1
    diverged = [v for v in verdicts(found) if v["verdict"] == "divergence"]
    assert {v["stream"] for v in diverged} == {"mirror"}
    first = diverged[0]
    assert first["step"] == 1
    assert "Voted" in first["event"]
    assert "Commit" in first["difference"] and first["story"]
    code, out = replay(capsys, job)
    assert code == 1
    assert "rank0#1 mirror diverges: step 1" in out
    assert out.splitlines()[-1].startswith("DIFFERENT: ")


# ---- its parts


def test_one_rank_and_one_group(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replay_json(capsys, job, "--rank", "1", "--group", "group0/2", "--show")
    assert code == 0
    assert [(v["process"], v["stream"]) for v in verdicts(found)] == [("rank1#2", "group0/2")]
    assert {line["stream"] for line in found["story"]} == {"group0/2"}


def test_around_a_step_the_story_tells_that_of_all(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replay_json(capsys, job, "--around", str(KILLED_IN_STEP), "--show")
    assert code == 0
    steps = [line["text"] for line in found["story"] if line["text"].startswith("== step")]
    assert {f"== step {step}" for step in range(KILLED_IN_STEP - 1, KILLED_IN_STEP + 2)} <= set(steps)
    assert "== step 1" not in steps
    texts = [line["text"] for line in found["story"]]
    assert any("rank1#1 died" in text for text in texts)
    assert any("tell host zbmd.host.report/1(" in text for text in texts)


def test_the_story_is_causal(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = replay_json(capsys, job, "--show")
    lines = [(line["process"], line["text"]) for line in found["story"]]
    sent = lines.index(
        next(x for x in lines if x[0] == "rank0#1" and x[1].startswith("-> tell host zbmd.host.report"))
    )
    text = "<-" + lines[sent][1][2:]
    assert any(process != "rank0#1" and told == text for process, told in lines[sent:])
    assert not any(told == text for _, told in lines[:sent])


def half_of(job: Path) -> str:
    """Return half of the time that a job took, as `--until` takes it."""
    times = [entry.wall_ns for entry in merged(open_log(job).processes)]
    return f"+{(max(times) - min(times)) / 2e9:.6f}s"


@pytest.mark.parametrize("when", ["EpochOver", "half of it"])
def test_until_an_event_or_a_time(job: Path, capsys: pytest.CaptureFixture[str], when: str) -> None:
    _, everything = replay_json(capsys, job)
    until = half_of(job) if when == "half of it" else when
    code, found = replay_json(capsys, job, "--until", until)
    assert code == 0
    assert sum(v["events"] for v in verdicts(found)) < sum(v["events"] for v in verdicts(everything))


def test_a_job_that_finished_does_not_hang(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = replay(capsys, job, "--until", "hang")
    assert code == 0
    assert out.splitlines()[-1].startswith("no hang")


# ---- what it writes


def load_test(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.test_a_vote_is_answered_as_recorded


def test_as_test_passes_now_and_fails_on_a_mutated_machine(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_a_vote.py"
    code, _ = replay(capsys, job, "--rank", "0", "--as-test", path)
    assert code == 0
    run = load_test(path)
    run()
    (log,) = open_log(path.with_suffix(".zlog")).processes
    machines = {declared.machine for declared in log.streams.values()}
    assert machines == OF_RANKS
    monkeypatch.setattr(Mirror, "_voted", commit_unseen)
    with pytest.raises(AssertionError, match="Divergence"):
        run()


def test_as_test_overwrites_nothing(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_a_vote.py"
    path.write_text("mine")
    assert replay(capsys, job, "--as-test", path)[0] == 2
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


def test_a_trace_has_a_track_a_stream_and_flows_with_two_ends(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert replay(capsys, job, "--export", "perfetto", path)[0] == 0
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["node#1", "rank0#1", "rank1#1", "rank1#2", "rank2#1"]
    assert all((e["pid"], e["tid"]) in tracks for e in events if "ts" in e)
    steps = [e["name"] for e in events if e["ph"] == "X" and processes[e["pid"]] == "rank0#1"]
    assert [name for name in steps if name.startswith("step ")][:2] == ["step 1", "step 2"]
    assert "all_reduce_shards" in steps
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and starts
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] != end["pid"], (start, end)
        # Each end is on the track of the link to the process at the other end, in a slice of its own.
        assert tracks[start["pid"], start["tid"]] == f"link {processes[end['pid']]}"
        assert tracks[end["pid"], end["tid"]] == f"link {processes[start['pid']]}"
        assert {(e["pid"], e["tid"], e["ts"]) for e in (start, end)} <= slices


# ---- what cannot be asked for, and what is damaged


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rank", "9"),
        ("--around", "99"),
        ("--until", "Nothing"),
        ("--group", "no"),
        ("--export", "pdf", "x"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    job: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert cli.main(["replay", str(job), *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_what_is_no_capture_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "holds no capture" in capsys.readouterr().err


def test_a_damaged_log_is_replayed_up_to_the_damage(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = job / "rank0#1" / "000000.zlog"
    data = bytearray(source.read_bytes())
    data[-4] ^= 0x20  # in the last block: how many come before it depends on how long the job took
    damaged = tmp_path / "rank0#1"
    damaged.mkdir()
    (damaged / source.name).write_bytes(data)
    code, out = replay(capsys, tmp_path)
    assert code == 1
    assert "is damaged at byte" in out and "identical (" in out
