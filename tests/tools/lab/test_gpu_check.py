"""`tools.lab.gpu` where there is no GPU, its verdicts, and the checks' own parts that need none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices.device_worlds import model_host, of_device, on_device

import zbmd
from zbmd.tools.lab.gpu.__main__ import (
    EXIT_FAILED,
    EXIT_NONE_RAN,
    EXIT_OK,
    GpuMachine,
    by_itself,
    exit_code,
    main,
    run_checks,
)
from zbmd.tools.lab.gpu.checks import CHECKS, Check, CheckFailed, Needs
from zbmd.tools.lab.gpu.ranks import compare
from zbmd.transport.cuda.runtime import visible_devices
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
    other = Check(name="other", needs=Needs(module="no_such_module"), would="use it", run=broken)
    here = GpuMachine(gpus=1, rdma_devices=0)
    rows = run_checks([bad, good, two, card, other], here)
    assert [row.verdict for row in rows] == ["failed", "ok", "not run", "not run", "not run"]
    assert "the bus is gone" in rows[0].told and "1 of 2" in rows[2].told and "RDMA" in rows[3].told
    assert "no_such_module is not installed" in rows[4].told
    assert exit_code(rows) == EXIT_FAILED
    assert exit_code(rows[1:]) == EXIT_OK and exit_code(rows[2:]) == EXIT_NONE_RAN


def test_names_are_told_apart_and_one_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert main(["--list", "--only", "gpt"]) == EXIT_OK
    told = capsys.readouterr().out
    assert "gpt" in told and "bandwidth" not in told
    assert main(["--only", "no such check"]) == EXIT_FAILED


@pytest.mark.skipif(has_gpu(), reason="could not import 'cupy': there is a GPU")
@pytest.mark.optional
def test_a_check_in_a_process_of_its_own_tells_how_it_failed_and_has_a_limit() -> None:
    check = next(each for each in CHECKS if each.name == "facts")
    with pytest.raises(CheckFailed, match=r"UserError|CudaFault"):
        by_itself(check)
    with pytest.raises(CheckFailed, match="did not end"):
        by_itself(check, limit_s=1e-6)


async def test_the_comparison_of_collectives_finds_other_bits() -> None:
    """It runs here on a modelled device, of one rank."""
    process = model_host().process()

    def look(array: Any) -> np.ndarray:
        return of_device(array, np.dtype(array.span.typestr))

    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        known = lambda dtype: dtype.name in ("int32", "float16")  # noqa: E731
        told = await compare(group, lambda x: on_device(process, x), look, known)
        assert "results of 2 dtypes" in told and "float64" in told
        with pytest.raises(ValueError, match="is not the host's"):
            await compare(group, lambda x: on_device(process, x + x.dtype.type(1)), look, known)
        await group.close()
