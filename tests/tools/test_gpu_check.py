"""`gpu_check` where there is no GPU, its verdicts, and the checks' own parts that need none."""

from __future__ import annotations

import pytest

from zbmd.tools.gpu_check import (
    EXIT_FAILED,
    EXIT_NONE_RAN,
    EXIT_OK,
    Check,
    Here,
    Needs,
    exit_code,
    main,
    run_checks,
)
from zbmd.tools.gpu_check_list import CHECKS
from zbmd.transport.cuda_runtime import visible_devices
from zbmd.transport.errors import UserError


def has_gpu() -> bool:
    try:
        return visible_devices() > 0
    except UserError:
        return False


@pytest.mark.skipif(has_gpu(), reason="could not import 'cupy': there is a GPU")
@pytest.mark.optional
def test_without_a_gpu_it_says_what_it_would_run_and_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([]) == EXIT_NONE_RAN
    told = capsys.readouterr().out
    for check in CHECKS:
        assert check.name in told and f"would run: {check.would}" in told
    assert "cupy" in told or "GPU" in told
    assert " ok " not in told


def test_verdicts_and_exit_codes() -> None:
    def broken() -> str:
        raise RuntimeError("the bus is gone")

    good = Check(name="good", needs=Needs(), would="be good", run=lambda: "1 GB/s")
    bad = Check(name="bad", needs=Needs(), would="break", run=broken)
    two = Check(name="two", needs=Needs(gpus=2), would="use both", run=broken)
    card = Check(name="card", needs=Needs(rdma=True), would="use a card", run=broken)
    here = Here(gpus=1, rdma_devices=0)
    rows = run_checks([bad, good, two, card], here)
    assert [row.verdict for row in rows] == ["failed", "ok", "not run", "not run"]
    assert "the bus is gone" in rows[0].told and "1 of 2" in rows[2].told and "RDMA" in rows[3].told
    assert exit_code(rows) == EXIT_FAILED
    assert exit_code(rows[1:]) == EXIT_OK and exit_code(rows[2:]) == EXIT_NONE_RAN


def test_names_are_told_apart_and_one_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert main(["--list", "--only", "gpt"]) == EXIT_OK
    told = capsys.readouterr().out
    assert "gpt" in told and "bandwidth" not in told
    assert main(["--only", "no such check"]) == EXIT_FAILED
