"""The state of a loop as bytes: what comes back, what is refused, and that no bytes do harm."""

from __future__ import annotations

import contextlib
import importlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

encoding: Any = importlib.import_module("zbmd.training.torch.encoding")
votes: Any = importlib.import_module("zbmd.training.torch.votes")
transfer: Any = importlib.import_module("zbmd.training.torch.transfer")
checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
continuity: Any = importlib.import_module("zbmd.collectives.torch.continuity")
Ballot: Any = importlib.import_module("zbmd.training.torch.ballots").Ballot

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False), st.text(), st.binary()
)
keys = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.frozensets(st.integers()),
    ),
    max_leaves=20,
)


@given(state=states)
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_comes_back(state: Any) -> None:
    data, tensors = encoding.encode(state, "the state")
    back = encoding.decode(data, tensors)
    assert back == state
    assert repr(back) == repr(state) or isinstance(state, frozenset | list | tuple | dict)


@pytest.mark.parametrize("cut", [slice(3, 4), slice(0, 1), slice(2, 2), slice(0, 6, 5), slice(None)])
def test_the_bytes_of_a_tensor_of_any_strides(cut: slice) -> None:
    """A tensor of one element keeps any stride, and counts as contiguous."""
    tensor = torch.arange(12.0, dtype=torch.float64)[::2][cut]
    assert continuity._bytes_of(tensor) == tensor.clone().numpy().tobytes()
    data, tensors = encoding.encode({"x": tensor}, "the state")
    assert torch.equal(encoding.decode(data, tensors)["x"], tensor)


def test_tensors_dtypes_and_arrays_come_back() -> None:
    state = {
        "a": torch.arange(6).view(2, 3),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "array": np.arange(3.0),
        "scalar": np.float32(1.5),
        "complex": 1 + 2j,
        3: (torch.tensor(7.0),),
    }
    data, tensors = encoding.encode(state, "the state")
    back = encoding.decode(data, tensors)
    assert back["a"] is state["a"] and back[3][0].item() == 7.0
    assert (back["dtype"], back["device"], back["size"]) == (torch.bfloat16, torch.device("cpu"), (2, 3))
    assert np.array_equal(back["array"], state["array"]) and back["scalar"] == np.float32(1.5)
    assert back["complex"] == 1 + 2j


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.arange(12.0).view(3, 4).T,
    ],
)
def test_a_small_tensor_is_bytes(tensor: Any) -> None:
    back = encoding.from_bytes(*encoding.to_bytes(tensor))
    assert back.dtype is tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UserError, match=r"the scheduler\['f'\]\[1\] is a builtins\.function"):
        encoding.encode({"f": [1, lambda: 1]}, "the scheduler")


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_state_or_a_typed_error(data: bytes) -> None:
    for decode in (
        lambda: encoding.decode(data, []),
        lambda: votes.own_of(data),
        lambda: votes.ballot_of(data),
        lambda: votes.means_of([data], ["a"]),
        lambda: votes.noted_of(data, 2),
        lambda: votes.samples_of([data]),
        lambda: transfer.decode_header(data),
        lambda: continuity.decode_records(data),
    ):
        with contextlib.suppress(RemoteProtocolError):
            decode()


@given(tree=states)
@settings(max_examples=100, deadline=None)
def test_any_tree_is_a_state_or_a_typed_error(tree: Any) -> None:
    try:
        data = msgspec.msgpack.encode(tree)
    except (OverflowError, TypeError):
        return
    with contextlib.suppress(RemoteProtocolError):
        encoding.decode(data, [])


def test_a_vote_carries_means_and_what_is_a_ranks_own() -> None:
    rows = [
        votes.pack(
            Ballot(version=3, digests=(2**64 - 1,)), [{"b": 1.0 + rank, "a": 4.0}], {"x": torch.ones(rank)}
        )
        for rank in range(3)
    ]
    assert votes.ballot_of(rows[1]) == Ballot(version=3, digests=(2**64 - 1,))
    assert votes.means_of(rows, ["a", "b"]) == {"a": 4.0, "b": 2.0}
    assert torch.equal(votes.own_of(rows[2])["x"], torch.ones(2))
    compared = Ballot(version=64, holds=True, digests=(1, 2**64 - 1), copy=(3,))
    row = votes.pack(compared, [{"a": 4.0}], {"x": torch.ones(2)})
    assert votes.ballot_of(row) == compared and votes.means_of([row], ["a"]) == {"a": 4.0}
    assert torch.equal(votes.own_of(row)["x"], torch.ones(2)) and votes.noted_of(row, 2) is None
    with pytest.raises(RemoteProtocolError, match=r"\[2, 2, 2\] values"):
        votes.means_of(rows, ["a"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_threads_that_save_beside_a_loop_are_known_by_their_name(tmp_path: Path) -> None:
    """Under another name, which PyTorch may choose, their operations would count as the loop's."""
    names: list[str] = []

    class Noting(checkpoint.FileSystemWriter):  # type: ignore[misc, name-defined]
        def write_data(self, plan: Any, planner: Any) -> Any:
            names.append(threading.current_thread().name)
            return super().write_data(plan, planner)

    checkpoint.async_save({"x": torch.ones(2)}, storage_writer=Noting(tmp_path)).result()
    assert len(names) == 1 and names[0].startswith(continuity.SAVERS), names
