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
