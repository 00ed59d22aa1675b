"""Any byte that changes in memory that outlives its rank is found and named, and no other version is lost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from structlog.testing import capture_logs

from zbmd.tools.runs.snapshots import DAMAGED, WHOLE, WRITTEN, verified
from zbmd.training.redundancy.left_memory import LeftMemory
from zbmd.training.redundancy.stamped import (
    NAME,
    NO_NOTE,
    SLOTS,
    StampedSlots,
    StateName,
    digest_of,
    slots_in,
)

STATE = StateName(run=7, place=1, ranks=3, elements=21, note=8)
VERSIONS = (14, 15)
LENGTH = 5
"""Numbers of a note, fewer than there may be."""


def written() -> NDArray[np.uint8]:
    """Return memory with two whole versions, with notes and records."""
    memory = np.zeros(STATE.nbytes, np.uint8)
    slots = StampedSlots(memory, STATE)
    for version in VERSIONS:
        slot = version % SLOTS
        slots.begin(slot)
        slots.slots[slot][:] = np.arange(STATE.elements) + 1000 * version
        slots.put_note(slot, np.full(LENGTH, version, np.float64))
        slots.end(slot, version, digest_of(slots.slots[slot]))
        slots.put_record(slot, np.full(LENGTH, -version, np.float64))
    return memory


def of(memory: NDArray[np.uint8], known: int = 0) -> LeftMemory | None:
    """Read it as one who goes on from it does; None: it has no header."""
    name = StateName.decoded(memory[: NAME.size].tobytes())
    fits = name is not None and name.run == STATE.run and name.nbytes == len(memory)
    return LeftMemory(memory, name, known) if fits and name is not None else None


def content(found: LeftMemory, slot: int) -> tuple[int | None, bytes, bytes]:
    version = found.version_in(slot)
    return version, b"" if version is None else found.slots[slot].tobytes(), found.noted(slot).tobytes()


def test_each_byte_that_changes_is_named_and_costs_no_other_version() -> None:
    """Whatever is used has the bits and the notes that were written, under the version that they are of."""
    whole = of(written())
    assert whole is not None
    wanted = [content(whole, slot) for slot in range(SLOTS)]
    records = [whole.recorded(slot).tobytes() for slot in range(SLOTS)]
    silent = list[int]()
    slots = [STATE.head_bytes + slot * STATE.slot_bytes for slot in range(SLOTS)]
    notes = range(STATE.head_bytes)[:640]  # what follows is not used, as is what follows a state
    for at in (*notes, *(begin + at for begin in slots for at in range(4 * STATE.elements))):
        memory = written()
        memory[at] ^= 0x11
        with capture_logs() as logged:
            found = of(memory)
            if found is None:
                assert at < NAME.size
                continue
            now = [content(found, slot) for slot in range(SLOTS)]
            kept = [found.recorded(slot).tobytes() for slot in range(SLOTS)]
        lost = [slot for slot in range(SLOTS) if now[slot] != wanted[slot]]
        assert all(now[slot] == (None, b"", b"") for slot in lost), at
        assert all(one in (record, b"") for one, record in zip(kept, records, strict=True)), at
        assert len(lost) <= 1 or at < NAME.size, "a byte of one slot costs the other one"
        if lost or kept != records:
            assert logged and all("damaged" in one["event"] for one in logged), at
        else:
            silent.append(at)
    for begin in slots:
        assert not set(silent) & set(range(begin, begin + 4 * STATE.elements)), "of a state"
    assert not set(silent) & set(range(NAME.size + SLOTS * 16)), "of the header and the stamps"


def test_a_header_that_changes_is_found_by_the_next_process_of_its_rank() -> None:
    for at in range(NAME.size):
        memory = written()
        memory[at] ^= 0x11
        with capture_logs() as logged:
            again = StampedSlots(memory, STATE)
        assert [again.version_in(slot) for slot in range(SLOTS)] == [None] * SLOTS
        assert "damaged" in logged[0]["event"] and logged[0]["expected"] == STATE.encoded().hex()


@given(at=st.integers(0, STATE.nbytes - 1), mask=st.integers(1, 255))
def test_what_is_listed_as_whole_is_what_was_written(at: int, mask: int) -> None:
    """As `zbmd snapshots` does, any change of a byte."""
    memory = written()
    memory[at] ^= mask
    found = slots_in(memoryview(memory.data).toreadonly())
    if found is None:
        assert at < NAME.size
        return
    _, slots = found
    truth = written()
    for slot, version in zip(range(SLOTS), VERSIONS, strict=True):
        listed, state = verified(slots, slot)
        if state == WHOLE:
            assert listed == version and slots.slots[slot].tobytes() == at_slot(truth, slot)
        else:
            assert state == DAMAGED or (state == WRITTEN and slots.stamp(slot)[0] == -1)


def at_slot(memory: NDArray[np.uint8], slot: int) -> bytes:
    begin = STATE.head_bytes + slot * STATE.slot_bytes
    return memory[begin : begin + 4 * STATE.elements].tobytes()


@pytest.mark.parametrize(("times", "place"), list(product((1, 2, 3), (0, LENGTH - 1))))
def test_a_note_may_be_amended_by_one_number_at_a_time(times: int, place: int) -> None:
    """A process that is killed between the new seal and the number leaves the note from before."""
    memory = written()
    slots = StampedSlots(memory, STATE)
    for number in range(times):
        before = slots.noted(0)
        slots.amend_note(0, place, 100.0 + number)
        after = slots.noted(0)
        assert after[place] == 100 + number and not slots.damage_in(0)
        torn = memory.copy()
        at = slots._note_at(0) + 24 + 8 * place
        torn[at : at + 8] = np.frombuffer(before[place].tobytes(), np.uint8)
        found = StampedSlots(torn, STATE)
        assert found.noted(0).tolist() == before.tolist()
    memory[slots._note_at(0) + 24] ^= 4
    with capture_logs():
        slots.amend_note(0, place, 7.0)
        assert slots.damage_in(0) == "the note of version 14" and slots.noted(0) is NO_NOTE
