"""Spans: exclusive categories that add up, nesting, threads, operations beside the work, and bounds."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.flight._flight import COMPLETE, FlightRing
from zbmd.training.autograd import spans
from zbmd.training.autograd._spans import CATEGORIES, RECORD_BYTES, TRACK_STEP, SpanRecorder
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.profiler.ring import RECORD
from zbmd.training.step.reduction import AccumulationPlan, Add
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.native._native import now_ns

MODEL = GPTConfig(context=8, width=16, heads=2, layers=2)


def recorder(units: int = 4, records: int = 64) -> tuple[SpanRecorder, bytearray]:
    buffer = bytearray(8 + records * RECORD_BYTES)
    return SpanRecorder(buffer, units), buffer


def records_in(buffer: bytearray) -> np.ndarray[Any, Any]:
    count = int.from_bytes(buffer[:8], "little")
    return np.frombuffer(buffer, RECORD, offset=8)[:count]


def busy_until(at_ns: int) -> None:
    while now_ns() < at_ns:
        pass


def test_the_innermost_span_has_the_time_and_all_of_it_adds_up() -> None:
    made, buffer = recorder()
    with made.recording():
        made.begin_step(7)
        with spans.FORWARD[2]:
            with spans.COMM:
                busy_until(now_ns() + 50_000)
            with spans.DATA:
                pass
        with spans.BACKWARD[1], spans.RECOMPUTE:
            pass
        ended = made.end_step()
    assert ended is not None
    step, begin_ns, end_ns, totals, by_unit, overlap = ended
    kept = records_in(buffer)
    own = {name: int(kept["amount"][kept["category"] == i].sum()) for i, name in enumerate(CATEGORIES)}
    assert step == 7 and dict(zip(CATEGORIES, totals, strict=True)) == own
    top = kept[kept["depth"] == 0]
    assert sum(totals) == int((top["end_ns"] - top["begin_ns"]).sum()) <= end_ns - begin_ns
    assert own["comm"] >= 50_000 and own["forward"] < own["comm"]
    # A span of no unit is of the one around it; a pass is counted where it is named.
    assert [CATEGORIES[r["category"]] for r in kept] == ["comm", "data", "forward", "recompute", "backward"]
    assert kept["unit"].tolist() == [2, 2, 2, 1, 1] and overlap == (0, 0, 0)
    forward, backward, recompute = by_unit
    assert forward[1] == [0, 0, 1, 0] and backward[1] == [0, 1, 0, 0] and recompute[1] == [0, 1, 0, 0]
    assert forward[0][2] == own["forward"]


def test_only_the_thread_that_records_is_recorded() -> None:
    made, buffer = recorder()
    others, others_buffer = recorder()

    def work() -> None:
        with others.recording(), spans.OPTIMIZER:
            pass
        with spans.DATA:
            pass

    with made.recording():
        made.begin_step(1)
        others.begin_step(1)
        with spans.FORWARD:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        with others.recording(), spans.GRAD_CLIP:
            pass
        with spans.BACKWARD:
            pass
    with spans.DATA:
        pass
    assert [CATEGORIES[r["category"]] for r in records_in(buffer)] == ["forward", "backward"]
    assert [CATEGORIES[r["category"]] for r in records_in(others_buffer)] == ["optimizer", "grad_clip"]


def test_operations_are_told_apart_by_what_the_rank_did_meanwhile() -> None:
    made, buffer = recorder()
    ring = FlightRing(8)
    call = ring.number("all_reduce", "direct")
    assert made.follow(ring) == 0
    origin = now_ns()
    made.begin_step(3, origin)
    at = origin + 1_000
    made.add(spans.BACKWARD.category, at, at + 100)
    made.add(spans.COMM.category, at + 100, at + 150)
    for sequence, (begin, end) in enumerate([(50, 120), (90, 130), (140, 180), (-2_000, -1_500)], 1):
        ring.begin(call, sequence, 1024, at + begin)
        ring.end(COMPLETE, 0, at + end)
    ring.begin(call, 9, 1024, at + 500)  # still under way: it is of the step in which it ends
    ended = made.begin_step(4, at + 1_000)
    assert ended is not None
    # Under way: 50 to 130 and 140 to 180; waited for: 100 to 130 and 140 to 150; beside work: 50 to 100.
    assert ended[5] == (120, 40, 50)
    kept = records_in(buffer)
    assert made.names == ["all_reduce"] and (kept["track"] != TRACK_STEP).sum() == 4
    ring.end(COMPLETE, 0, at + 1_200)
    ended = made.end_step(at + 2_000)
    assert ended is not None and ended[5] == (200, 0, 0)
    made.forget(0)
    ring.begin(call, 10, 1, at + 2_100)
    ring.end(COMPLETE, 0, at + 2_200)
    made.begin_step(5, at + 2_050)
    ended = made.end_step(at + 3_000)
    assert ended is not None and ended[5] == (0, 0, 0)


def test_what_is_bounded_and_what_is_refused() -> None:
    made, buffer = recorder(records=4)
    with made.recording():
        made.begin_step(1)
        for unit in range(10):
            with spans.FORWARD[unit]:
                pass
        assert int.from_bytes(buffer[:8], "little") == 10
        assert sorted(np.frombuffer(buffer, RECORD, offset=8)["unit"].tolist()) == [6, 7, 8, 9]
        open_spans = [spans.DATA] * 40  # deeper than is kept: the time is the innermost kept one's
        for one in open_spans:
            one.__enter__()
        with pytest.raises(LocalProtocolError, match="middle of a span"):
            made.begin_step(2)
        with pytest.raises(LocalProtocolError):
            made.release()
        with pytest.raises(LocalProtocolError, match="spans are open"):
            made.add(spans.COMM.category, 1, 2)
        for one in open_spans:
            one.__exit__(None, None, None)
        ended = made.end_step()
    assert ended is not None and sum(ended[3]) <= ended[2] - ended[1]
    assert made.end_step() is None
    made.release()
    made.release()
    with pytest.raises(LocalProtocolError, match="released"):
        made.begin_step(2)
    with pytest.raises(ValueError, match="units"):
        SpanRecorder(bytearray(1024), -1)
    with pytest.raises(ValueError, match="one record"):
        SpanRecorder(bytearray(8), 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_marks_its_units_both_ways(recompute: bool) -> None:
    model = GPT(MODEL, recompute=recompute)
    params = model.init(0)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9))
    made, _ = recorder(units=4, records=256)
    with made.recording():
        made.begin_step(1)
        model.loss_and_grads(params, np.empty_like(params), tokens, global_batch=2)
        with spans.EVALUATE:
            model.loss(params, tokens)
        AccumulationPlan.perform((Add(0, 1),), [params, params], slice(0, 4))
        ended = made.end_step()
    assert ended is not None
    forward, backward, again = (counts for _, counts in ended[4])
    assert forward == backward == [1, 1, 1, 1] and again == ([0, 1, 1, 0] if recompute else [0] * 4)
    assert ended[3][spans.EVALUATE.category] > 0
