"""Sizes, durations, the progress line and the recovery line, as users read and write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.rank.environment import RankEnvironment, parse_size
from zbmd.tools.cli.console import Progress, Recovery, format_progress, format_recovery
from zbmd.tools.cli.settings import SETTINGS, merge
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import UserError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2kb", 2000), ("1 tib", 1 << 40)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 parsec", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("1.5min", 90.0), ("250us", 0.00025), ("1h", 3600.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "s", "-1s", "0s", "1 fortnight", "8760h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UserError):
        parse_duration(text)


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_typed_error(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_size(text) >= 0


def test_the_merged_settings_can_be_read_back() -> None:
    settings = merge({"arena": "128MiB", "data": 'a "b"'}, {"ZBMD_ON_LOSS": "stop"}, None)
    assert settings["arena"] == 128 << 20
    lines = settings.lines()
    assert len(lines) == len(SETTINGS)
    assert "arena = 134217728  # --arena" in lines
    assert 'data = "a \\"b\\""  # --data' in lines
    assert "# log_dir is not set" in lines


def test_a_failure_domain_is_a_name_in_the_environment_or_an_option() -> None:
    assert merge({}, {"ZBMD_DOMAIN": "rack-7"}, None)["domain"] == "rack-7"
    assert merge({"domain": "row.2@north"}, {"ZBMD_DOMAIN": "rack-7"}, None)["domain"] == "row.2@north"
    for text in ("rack 7", "a,b", "a=1", "x" * 65):
        with pytest.raises(UserError, match=r"--domain: expected 1 to 64 letters, digits or _\.@-"):
            merge({"domain": text}, {}, None)


def test_the_environment_of_a_rank_reads_back() -> None:
    told = RankEnvironment(rank=2, world_size=4, incarnation=3, job=7, node_address="zbmd-0-1", ranks_min=2)
    assert RankEnvironment.read(told.variables()) == told
    assert RankEnvironment.read({"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_half_of_a_launchers_words_is_told() -> None:
    told = RankEnvironment(rank=2, world_size=4, incarnation=3, job=7, node_address="zbmd-0-1").variables()
    del told["RANK"]
    with pytest.raises(UserError, match="ZBMD_NODE is set but RANK is ''"):
        RankEnvironment.read(told)


def test_the_progress_line() -> None:
    progress = Progress(
        step=20,
        loss=3.2149,
        grad_norm=0.9051,
        memory_bytes=430_000_000,
        tokens_per_s=7443.4,
        tflops=0.031,
        mfu=0.0192,
    )
    assert (
        format_progress(progress)
        == "step 20 loss 3.21 grad_norm 0.91 mem 0.4GiB tok/s 7,443 tflops 0.03 mfu 1.9%"
    )
    assert format_progress(Progress(step=1, loss=5.5)) == "step 1 loss 5.50"


def test_the_recovery_line() -> None:
    recovery = Recovery(
        rank=2,
        how="was killed (SIGKILL)",
        step=103,
        detection_ns=310_000,
        recovery_ns=142_000_000,
        step_after=103,
    )
    assert format_recovery(recovery) == (
        "rank 2 was killed (SIGKILL) at step 103; noticed in 0.31 ms; "
        "back at step 103 after 142 ms; nothing lost"
    )
