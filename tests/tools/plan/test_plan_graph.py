"""`zbmd plan graph`: nodes, decisions and memory as text and JSON, and errors of bad input."""

from __future__ import annotations

import msgspec
import pytest

from zbmd.tools.entry.zbmd import main

SMALL = ("--layers", "2", "--width", "64", "--heads", "1", "--context", "16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "graph", *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_has_nodes_decisions_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys)
    assert text.startswith("zbmd: 2 layers of 64, bf16, 2 windows of 16 tokens\n")
    assert "embedding(tokens, embed.weight)" in text
    assert "attention(%21, distance_bias)  [scores + softmax + mix]" in text
    assert "matmul + squared_relu_grad: applied before the product is stored, rounded once" in text
    assert "blocks.1" not in text and "the other blocks are like blocks.0" in text
    assert "blocks.1" in run(capsys, "--nodes")
    traced, fused = text.splitlines()[-2:]
    assert int(traced.split()[1]) > int(fused.split()[1])


def test_the_kernels_of_each_gpu_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that a modelled job of these shapes launches; see tests/training/model/graph."""
    text = run(capsys)
    assert "matmul_nn_bf16: mma.sync: wgmma needs compute capability 9.0" in text
    assert "tma_nn_bf16: wgmma, with tiles brought by tensor maps" in text
    assert "attention_64: mma.sync: sequences of at most 64 tokens leave half of a tile" in text
    kernels = msgspec.json.decode(run(capsys, "--context", "80", "--json"))["kernels"]
    by_gpu = {gpu: {one["kernel"] for one in kernels if one["gpu"] == gpu} for gpu in ("sm_80", "sm_90a")}
    assert {"attention_wgmma_64", "attention_wgmma_keys_grad_64", "tma_tn_bf16", "matmul_tn_bf16"} <= by_gpu[
        "sm_90a"
    ]
    assert not [one for one in by_gpu["sm_80"] if "wgmma" in one or "tma" in one.split("_")[0]]
    assert msgspec.json.decode(run(capsys, "--json", "--device", "cpu"))["kernels"] == []


def test_products_in_fp8_are_named_and_so_is_why_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--matmul-precision", "fp8", "--vocabulary", "264")
    assert "nn fp8(" in text
    assert "fp8_blocks_bf16: wgmma of E4M3, with a scale for each block of both operands" in text
    assert "fp8_of_rows_bf16: wgmma of E4M3" in text
    assert "tma_nn_bf16: wgmma, with tiles brought by tensor maps" in text, "that of the logits"
    assert "matmul_nn_bf16: FP8 needs compute capability 9.0: bf16, by mma.sync" in text
    text = run(capsys, "--matmul-precision", "fp8", "--context", "20", "--sequences-per-shard", "1")
    assert "FP8 needs sums over a multiple of 16 elements, not 20: bf16, by mma.sync" in text
    assert "fp8_blocks_bf16" in text and "fp8_of_rows" not in text


def test_json_has_the_whole_graph(capsys: pytest.CaptureFixture[str]) -> None:
    plan = msgspec.json.decode(run(capsys, "--json", "--device", "cpu", "--precision", "float32"))
    assert plan["traffic"] < plan["traced"]["traffic"]
    assert plan["memory"]["fused"]["arena"] <= plan["memory"]["traced"]["arena"]
    assert len(plan["graph"]["nodes"]) < plan["traced"]["nodes"]
    assert {one["is_fused"] for one in plan["decisions"]} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--layers", "0"), "--layers: expected 1 to 128, got 0"),
        (("--precision", "float32"), "--precision: expected bf16 with --device cuda"),
        (("--sequences-per-shard", "0"), "--sequences-per-shard: expected 1 to 65536, got 0"),
        (("--heads", "3"), "cannot be divided over 3 heads"),
    ],
)
def test_bad_input_is_named(
    arguments: tuple[str, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "graph", *SMALL, *arguments]) == 2
    assert found in capsys.readouterr().err
