"""Programs print, parse, encode and hash."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.errors import ProgramError
from zbmd.collectives.native._program import BLOCKED, DONE, NativeProgram, Stepper
from zbmd.collectives.programs.program import (
    BUFFERS,
    ENCODING_WIDTH,
    IN,
    MAX_RANKS,
    OUT,
    Copy,
    Finish,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
    chunk_extent,
    encode,
    format_program,
    parse_program,
)

numbers = st.integers(0, 2**31 - 1)
ranks = st.integers(0, MAX_RANKS - 1)
operands = st.builds(Operand, ranks, st.integers(0, BUFFERS - 1), numbers)
instructions = st.one_of(
    st.builds(Put, numbers, operands, operands),
    st.builds(Notify, ranks),
    st.builds(Wait, ranks, numbers),
    st.builds(Reduce, numbers, operands, operands, operands),
    st.builds(Copy, numbers, operands, operands),
    st.builds(Finish, numbers, operands, operands),
)
programs = st.builds(
    Program,
    algorithm=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20),
    n=numbers,
    rank=ranks,
    blocks=numbers,
    chunks=numbers,
    scratch_slots=numbers,
    inbox_slots=numbers,
    instructions=st.lists(instructions, max_size=12).map(tuple),
)


@given(programs)
def test_parse_undoes_format(program: Program) -> None:
    assert parse_program(format_program(program)) == program
    assert parse_program(str(program)).digest() == program.digest()


@given(programs, programs)
def test_the_digest_tells_programs_apart(a: Program, b: Program) -> None:
    assert (a.digest() == b.digest()) == (a == b)


@given(programs)
def test_the_encoding_has_one_row_an_instruction(program: Program) -> None:
    encoding = encode(program)
    assert encoding.shape == (len(program.instructions), ENCODING_WIDTH)
    assert encoding.dtype == np.int32


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 40))
def test_chunks_tile_every_block(count: int, blocks: int, per_block: int) -> None:
    end = count
    for chunk in range(blocks * per_block):
        block, first, stop = chunk_extent(chunk, count=count, blocks=blocks, chunks=blocks * per_block)
        if chunk % per_block == 0:
            assert end == count and first == 0
        else:
            assert first == end
        assert block == chunk // per_block
        end = stop
    assert end == count


HEADER = "program ring n=2 rank=0 blocks=1 chunks=2 scratch=0 inbox=1\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "programme x",
        HEADER + "jump 3",
        HEADER + "copy #0 out[0]@0 = in[0]",
        HEADER + "copy #0 out[0]@0 = in[0]@0 + in[0]@1",
        HEADER + "reduce #0 out[0]@0 = in[0]@0",
        HEADER + "copy #0 out[0]@0 = in0[0]@0",
        HEADER + "copy #0 out[0]@0 = in28[0]@0",
        HEADER + "wait 1",
        HEADER + "notify -1",
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_program(text)


def two_rank_program() -> Program:
    return parse_program(
        "program demo n=2 rank=0 blocks=1 chunks=1 scratch=1 inbox=1\n"
        "put #0 inbox[0]@1 = in[0]@0\n"
        "wait 1 x1\n"
        "reduce #0 out[0]@0 = inbox[0]@0 + in[0]@0\n"
    )


def test_the_stepper_holds_at_a_wait_until_the_count_is_reached() -> None:
    stepper = Stepper(encode(two_rank_program()))
    received = np.zeros(MAX_RANKS, np.uint64)
    assert stepper.next(received) == 0
    stepper.advance()
    assert stepper.next(received) == BLOCKED
    received[1] = 1
    assert stepper.next(received) == 1
    stepper.advance()
    assert stepper.next(received) == 2
    stepper.advance()
    assert stepper.next(received) == DONE
    with pytest.raises(ValueError, match="ended"):
        stepper.advance()


def test_the_stepper_refuses_what_is_no_program() -> None:
    with pytest.raises(ValueError, match="columns"):
        Stepper(np.zeros((1, 3), np.int32))
    bad = encode(two_rank_program())
    bad[1, 2] = MAX_RANKS
    with pytest.raises(ValueError, match="row 1"):
        Stepper(bad)
    with pytest.raises(ValueError, match="counts"):
        Stepper(encode(two_rank_program())).next(np.zeros(1, np.uint64))


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (0, 0, 5),
        (0, 1, 1),
        (0, 2, 2),
        (0, 4, OUT),
        (0, 5, 1),
        (0, 6, -1),
        (0, 7, BUFFERS),
        (1, 2, 7),
        (2, 4, IN),
        (2, 5, 1),
        (2, 8, 3),
        (2, 11, -4),
    ],
)
def test_native_execution_takes_no_operand_out_of_bounds(row: int, column: int, value: int) -> None:
    program = two_rank_program()
    encoding = encode(program)

    def native() -> NativeProgram:
        return NativeProgram(
            encoding, n=2, rank=0, blocks=1, chunks=1, scratch_slots=1, inbox_slots=1, eager=False, plan=0
        )

    assert len(native()) == 3
    assert native().kill_points == 6
    encoding[row, column] = value
    with pytest.raises(ValueError, match="row"):
        native()
