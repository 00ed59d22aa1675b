"""`zbmd plan cluster`: known values, what must hold for any mesh, the real command, and bad input."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.tools.entry.zbmd import main
from zbmd.tools.plan.cluster import FAMILIES, ClusterPlan, tokens_per_s
from zbmd.tools.plan.layout import ModelShape, Strategy, held_parameters, rank_memory, shape_of
from zbmd.tools.plan.roofline import Cluster, candidates, ring_s, step_time
from zbmd.training.profiler.accelerators import ACCELERATORS, Accelerator, accelerator
from zbmd.transport.errors import UserError

GB = 1e9


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> ClusterPlan:
    assert main(["plan", "cluster", *arguments, "--json"]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=ClusterPlan)


def model(parameters: float = 7e9, *, context: int = 4_096, **more: int) -> ModelShape:
    layers, width = shape_of(parameters)
    return ModelShape(
        parameters=parameters,
        active=parameters,
        layers=layers,
        width=width,
        heads=width // 128,
        vocabulary=32_000,
        context=context,
        **more,
    )


def h100(accelerators: int = 64, *, network: float = 50 * GB) -> Cluster:
    chip = accelerator("H100")
    return Cluster(
        accelerators=accelerators,
        node=8,
        memory=chip.memory,
        peak=chip.peak["bf16"],
        bandwidth=chip.bandwidth,
        link=chip.link,
        network=network,
        efficiency=0.7,
    )


@pytest.mark.parametrize(
    ("parameters", "accelerators", "mfu", "tokens"),
    [("7B", 8, "60%", 113_074), ("70B", 64, "55%", 82_921), ("175B", 100, "50%", 47_114)],
)
def test_tokens_a_second_follow_from_mfu_by_6_flops_a_parameter(
    parameters: str, accelerators: int, mfu: str, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, "--parameters", parameters, "--accelerators", str(accelerators), "--mfu", mfu)
    assert plan.given_tokens == pytest.approx(tokens, abs=1)
    assert plan.flops_a_token == pytest.approx(6 * plan.parameters)
    assert plan.goodput is not None and plan.goodput.tokens < tokens


@pytest.mark.parametrize(("zero", "published_gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_state_of_a_parameter_takes_16_bytes_and_zero_divides_it(zero: int, published_gb: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    shape = model(7.5e9)
    fsdp, dp = (64, 1) if zero else (1, 64)
    found = rank_memory(shape, Strategy(dp=dp, fsdp=fsdp, zero=zero), 1)
    state = found.weights + found.gradients + found.optimizer
    if zero == 3:  # without the layers that are gathered
        state -= 2 * 2 * shape.parameters / shape.layers
    assert state / GB == pytest.approx(published_gb, abs=0.05)


def test_activations_of_gpt_3_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022: 34·s·b·h bytes a layer; 2·s·b·h with recomputation."""
    shape = ModelShape(
        parameters=175e9, active=175e9, layers=96, width=12_288, heads=96, vocabulary=1, context=2_048
    )
    kept = rank_memory(shape, Strategy(tp=8, pp=8), 64).activations
    assert kept == pytest.approx(96 * 34 * 2_048 * 12_288 / 8, rel=1e-3)
    again = rank_memory(shape, Strategy(tp=8, pp=8, recompute=True), 64).activations
    assert again == pytest.approx((96 * 2 + 34) * 2_048 * 12_288 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("parameters", "layers", "width"), [(7e9, 32, 4_096), (175e9, 96, 12_288), (1e6, 4, 128)]
)
def test_usual_shapes_follow_from_parameters(parameters: float, layers: int, width: int) -> None:
    assert shape_of(parameters) == (layers, width)


@given(st.floats(1e8, 1e12), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_each_axis_divides_what_a_rank_holds(parameters: float, tp: int, pp: int) -> None:
    shape = model(parameters)
    whole, part = rank_memory(shape, Strategy(), 1), rank_memory(shape, Strategy(tp=tp, pp=pp), 1)
    assert part.weights == pytest.approx(whole.weights / (tp * pp))
    assert part.optimizer == pytest.approx(whole.optimizer / (tp * pp))
    for zero in (1, 2, 3):
        smaller = rank_memory(shape, Strategy(fsdp=8, tp=tp, pp=pp, zero=zero), 1)
        assert smaller.total < part.total
    assert rank_memory(shape, Strategy(recompute=True), 1).activations < whole.activations


def test_experts_divide_over_their_axis() -> None:
    shape = replace(model(47e9), active=13e9, experts=8, top=2)
    assert shape.of_experts == pytest.approx(8 * 34e9 / 6)
    assert held_parameters(shape, Strategy(dp=8, ep=8)) == pytest.approx(47e9 - 7 * 34e9 / 6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([8, 16, 64, 96, 256]), st.floats(1e9, 2e11))
def test_every_candidate_uses_all_accelerators_and_is_slower_than_its_arithmetic(
    accelerators: int, parameters: float
) -> None:
    shape, cluster = model(parameters), h100(accelerators)
    sequences = 4 * accelerators
    for one in candidates(shape, cluster, sequences):
        mesh = one.strategy
        assert mesh.dp * mesh.fsdp * mesh.tp * mesh.pp * mesh.cp == accelerators
        assert one.microbatches * mesh.rows * mesh.data == sequences
        rate = sequences * shape.context / one.step.total
        mfu = rate * shape.flops_a_token / (accelerators * cluster.peak)
        assert 0 < mfu < cluster.efficiency
        assert one.fits == (one.memory.total <= cluster.memory)


@pytest.mark.parametrize(
    "mesh",
    [
        Strategy(dp=64),
        Strategy(fsdp=64, zero=3),
        Strategy(dp=8, fsdp=8, zero=3),
        Strategy(dp=8, tp=8),
        Strategy(fsdp=4, tp=8, pp=2, zero=1),
        Strategy(dp=32, cp=2),
    ],
)
def test_a_slower_network_never_makes_a_step_faster(mesh: Strategy) -> None:
    shape = model(70e9)
    slow = step_time(shape, mesh, h100(network=1 * GB), 4)
    fast = step_time(shape, mesh, h100(network=50 * GB), 4)
    assert slow.total > fast.total and slow.arithmetic == fast.arithmetic


def test_the_bubble_is_that_of_1f1b_and_a_ring_moves_its_share() -> None:
    found = step_time(model(), Strategy(dp=2, pp=4), h100(8), 8)
    work = found.arithmetic + found.tensor + found.expert + found.pipeline
    assert found.bubble == pytest.approx(work * 3 / 8)
    assert ring_s(8e9, 4, 2e9) == pytest.approx(3.0)
    assert ring_s(8e9, 1, 2e9) == 0.0


def test_the_kinds_that_fit_are_those_that_fit_in_practice(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--parameters", "70B", "--accelerators", "64")
    fits = {one.name: one.fits for one in plan.strategies}
    assert not fits["DP"] and not fits["ZeRO 1"] and not fits["TP"] and fits["ZeRO 3"]
    assert plan.best is not None and plan.best.fits
    assert plan.best.step_s == min(one.step_s for one in [*plan.strategies, plan.best] if one.fits)
    assert all(one.recomputed < one.kept for one in plan.strategies)
    small = planned(capsys, "--parameters", "1B", "--accelerators", "8")
    assert {one.name: one.fits for one in small.strategies}["DP"]
    moe = ("--parameters", "47B", "--active", "13B", "--experts", "8", "--top", "2", "--accelerators", "64")
    assert "EP" in {one.name for one in planned(capsys, *moe).strategies}
    long = ("--parameters", "8B", "--context", "131072", "--accelerators", "64")
    assert "CP" in {one.name for one in planned(capsys, *long).strategies}
    assert {name for name, _ in FAMILIES} >= {one.name for one in plan.strategies}


def test_a_model_that_fits_nowhere_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster", "--parameters", "405B", "--accelerators", "8"]) == 0
    told = capsys.readouterr().out
    assert "no strategy fits: use more accelerators" in told and "goodput" not in told


def test_the_command_prints_a_table_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "zbmd", "plan", "cluster"]
    done = subprocess.run(
        [*command, "--parameters", "7B", "--mfu", "60%"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "4.2e+10 FLOPs a token" in done.stdout
    assert "at an MFU of 60.0%: 113,074 tokens/s" in done.stdout
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and bad.stderr.startswith("error: --parameters: expected")


def test_every_accelerator_has_dense_peaks_and_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster", "--hardware", "--json"]) == 0
    table = msgspec.json.decode(capsys.readouterr().out, type=list[Accelerator])
    assert {one.name for one in table} == {"A100", "H100", "H200", "B200", "L4", "MI300X"}
    for one in table:
        assert "data sheet" in one.source
        assert one.peak["tf32"] < one.peak["bf16"]
        if "fp8" in one.peak:
            assert one.peak["fp8"] == pytest.approx(2 * one.peak["bf16"], rel=0.01)
    assert ACCELERATORS["h100"].peak["bf16"] == pytest.approx(989.4e12)
    with pytest.raises(UserError, match="expected one of A100, H100"):
        accelerator("V100")
    assert main(["plan", "cluster", "--hardware"]) == 0
    assert tokens_per_s(0.5, 1, 6e12, 1e9) == 500.0


BAD = [
    ((), "--parameters: expected the parameters of the model"),
    (("--parameters", "x"), "--parameters: expected a number of at least 1"),
    (("--parameters", "7B", "--accelerator", "V100"), "--accelerator: expected one of A100, H100"),
    (("--parameters", "7B", "--dtype", "int8"), "--dtype: expected one of fp32, tf32, bf16, fp8 for H100"),
    (("--parameters", "7B", "--accelerator", "A100", "--dtype", "fp8"), "for A100, got 'fp8'"),
    (("--parameters", "7B", "--accelerators", "0"), "--accelerators: expected 1 to 1,000,000, got 0"),
    (("--parameters", "7B", "--layers", "-1"), "--layers: expected at least 1, got -1"),
    (("--parameters", "7B", "--context", "0"), "--context: expected at least 1, got 0"),
    (("--parameters", "7B", "--tokens", "100"), "--tokens: expected at least one context (4,096)"),
    (("--parameters", "7B", "--experts", "8"), "--experts: expected --top below it"),
    (("--parameters", "7B", "--network", "fast"), "--network: expected a bandwidth"),
    (("--parameters", "7B", "--storage", "1GB"), "--storage: expected a bandwidth"),
    (("--parameters", "7B", "--memory", "0"), "--memory: expected a size above 0"),
    (("--parameters", "7B", "--efficiency", "0"), "--efficiency: expected a fraction"),
    (("--parameters", "7B", "--mfu", "160%"), "--mfu: expected a fraction above 0 and at most 1"),
    (("--parameters", "7B", "--mtbf", "never"), "--mtbf: 'never' is not a duration"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_of_a_cluster_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "cluster", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out
    assert told.err.count("\n") == 1
