"""Whatever a machine takes or answers can be written down and read back; instances come from the types."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.supervision import machine as supervision
from zbmd.training.redundancy import machine as mirror
from zbmd.transport.capture.codec import UnionCodec, captured_name
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.handshake import hello

RANK_EVENTS = jobs.Forked | jobs.ForkFailed | jobs.Joined | jobs.Linked | jobs.LossProven | jobs.Exited
"""Events of a node's jobs that may hold any values."""
UNIONS = {
    "jobs.Event": RANK_EVENTS,
    "jobs.Action": jobs.Action,
    "supervision.Event": supervision.Event,
    "supervision.Action": supervision.Action,
    "mirror.Event": mirror.Event,
    "mirror.Action": mirror.Action,
    "hello.Event": hello.HelloEvent,
    "hello.Action": hello.HelloAction,
}
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def instances(wanted: Any) -> st.SearchStrategy[Any]:
    """Values of a type, made from its annotations alone."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return _annotated(arguments[0], arguments[1])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(instances, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(instances(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(instances, arguments))
    if origin in (list, set, frozenset):
        return st.lists(instances(arguments[0]), max_size=4).map(origin)
    if origin is dict:
        return st.dictionaries(instances(arguments[0]), instances(arguments[1]), max_size=4)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: INTEGERS,
        bool: st.booleans(),
        str: TEXTS,
        bytes: st.binary(max_size=40),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
        Path: st.just(Path("a/b")),
    }
    if wanted in plain:
        return plain[wanted]
    if issubclass(wanted, Enum):
        return st.sampled_from(list(wanted))
    if issubclass(wanted, BaseException):
        return _errors(wanted)
    hints = typing.get_type_hints(wanted, include_extras=True)
    if dataclasses.is_dataclass(wanted):
        names = [item.name for item in dataclasses.fields(wanted)]
    else:
        assert issubclass(wanted, msgspec.Struct), wanted
        names = list(wanted.__struct_fields__)
    make = cast("Callable[..., Any]", wanted)
    return st.builds(make, **{name: instances(hints[name]) for name in names})


def _annotated(wanted: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if meta.pattern is not None:
        return st.from_regex(meta.pattern.replace("\\Z", r"\Z"))
    return instances(wanted) if meta.ge is None else st.integers(int(meta.ge), (1 << 64) - 1)


def _errors(base: type[BaseException]) -> st.SearchStrategy[BaseException]:
    kinds = [base, *base.__subclasses__()] if base is not hello.HelloError else base.__subclasses__()
    return st.builds(
        lambda kind, text, story: kind(text, story=tuple(story)),
        st.sampled_from(kinds),
        TEXTS,
        st.lists(TEXTS, max_size=3),
    )


def decode_all(codec: UnionCodec[Any], encoded: bytes) -> list[Any]:
    pairs = msgspec.msgpack.decode(encoded, type=list[tuple[str, msgspec.Raw]])
    return [codec.decode(tag, fields) for tag, fields in pairs]


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
def test_every_event_and_action_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    codec: UnionCodec[Any] = UnionCodec(UNIONS[name])
    drawn = [data.draw(instances(cls), label=tag) for tag, cls in codec.members.items()]
    again = decode_all(codec, codec.encode_all(drawn))
    assert [type(instance) for instance in again] == [type(instance) for instance in drawn]
    assert codec.encode_all(again) == codec.encode_all(drawn)
    for before, after in zip(drawn, again, strict=True):
        if not isinstance(before, hello.Reject):  # errors are equal only to themselves
            assert after == before
        else:
            assert isinstance(after, hello.Reject)
            assert type(after.error) is type(before.error)
            assert (after.error.args, after.error.story) == (before.error.args, before.error.story)


def test_a_union_has_one_fingerprint_in_every_process_and_order() -> None:
    prints = {name: UnionCodec[Any](union).fingerprint for name, union in UNIONS.items()}
    assert len(set(prints.values())) == len(UNIONS)
    code = (
        "from zbmd.actors.cluster.jobs import node_events as jobs\n"
        "from zbmd.transport.capture.codec import UnionCodec\n"
        "print(UnionCodec(jobs.Action).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == prints["jobs.Action"]
    assert UnionCodec[Any](Held | Tally).fingerprint == UnionCodec[Any](Tally | Held).fingerprint


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    names: frozenset[str]
    path: Path
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    count: int


def test_sets_are_written_in_one_order() -> None:
    codec = UnionCodec[Held](Held)
    names = [f"n{i}" for i in range(50)]
    one = codec.encode(Held(names=frozenset(names), path=Path("x")))
    other = codec.encode(Held(names=frozenset(reversed(names)), path=Path("x")))
    assert one == other
    assert codec.decode("Held", one) == Held(names=frozenset(names), path=Path("x"))


class Paint(Enum):
    """`Colour` under a new name."""

    captured_as = enum.nonmember("Colour")
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Possessed:
    """`Held` under a new name."""

    captured_as: ClassVar[str] = "Held"

    names: frozenset[str]
    path: Path
    colour: Paint = Paint.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Holds an error."""

    error: Exception


class Broken(Exception):
    """An error under its old name."""


class Mended(Exception):
    """The same error under a new name."""

    captured_as: ClassVar[str] = "Broken"


def test_a_renamed_class_is_captured_under_its_old_name() -> None:
    before, after = UnionCodec[Any](Held | Tally), UnionCodec[Any](Possessed | Tally)
    assert after.fingerprint == before.fingerprint
    assert set(after.members) == {"Held", "Tally"}
    written = before.encode_all([Held(names=frozenset({"a"}), path=Path("x"))])
    (read,) = decode_all(after, written)
    assert read == Possessed(names=frozenset({"a"}), path=Path("x"))
    assert after.encode_all([read]) == written
    with pytest.raises(LocalProtocolError, match="two members of one union are called Held"):
        UnionCodec[Any](Held | Possessed)


def test_a_renamed_error_and_a_subclass_of_a_renamed_class_have_the_right_names() -> None:
    class Further(Mended):
        """Does not inherit the name."""

    assert [captured_name(cls) for cls in (Broken, Mended, Further)] == ["Broken", "Broken", "Further"]
    codec = UnionCodec[Rejected](Rejected)
    (read,) = decode_all(codec, codec.encode_all([Rejected(error=Further("why"))]))
    assert type(read.error) is Further
    assert codec.encode_all([Rejected(error=Mended("why"))]) == codec.encode_all(
        [Rejected(error=Broken("why"))]
    )


def test_a_changed_field_changes_the_fingerprint() -> None:
    def of(annotation: Any) -> str:
        made = dataclasses.make_dataclass("Made", [("field", annotation)], frozen=True)
        return UnionCodec[Any](made).fingerprint

    prints = [
        of(annotation) for annotation in (int, str, int | None, tuple[int, ...], Colour, dict[str, int])
    ]
    assert len(set(prints)) == len(prints)
    assert of(int | None) == of(typing.Optional[int])  # noqa: UP045 (the old spelling is the point)


@dataclass
class Loose:
    field: int


@dataclass(frozen=True)
class Hidden:
    _field: int


@dataclass(frozen=True)
class Strange:
    field: object


@pytest.mark.parametrize("union", [Loose, Hidden, Strange, int, Held | int])
def test_a_union_that_no_log_can_hold_is_refused_at_once(union: object) -> None:
    with pytest.raises(LocalProtocolError):
        UnionCodec[Any](union)


@pytest.mark.parametrize("tag", ["Forked", "Unknown"])
@given(
    data=st.binary(max_size=60)
    | st.recursive(st.none() | INTEGERS | TEXTS, st.lists).map(msgspec.msgpack.encode)
)
def test_what_is_no_event_gives_a_typed_error(data: bytes, tag: str) -> None:
    codec: UnionCodec[jobs.Event] = UnionCodec(jobs.Event)
    with pytest.raises(CaptureMismatch):
        codec.decode(tag, data)


@pytest.mark.parametrize(
    "error",
    [
        ["SystemExit", [], {}],
        ["HelloTimeout", ["x"], {"__class__": "y"}],
        ["HelloTimeout", ["x"] * 17, {}],
        ["HelloTimeout"],
        "HelloTimeout",
    ],
)
def test_an_error_is_only_built_of_the_declared_kind(error: object) -> None:
    codec: UnionCodec[hello.HelloAction] = UnionCodec(hello.HelloAction)
    with pytest.raises(CaptureMismatch):
        codec.decode("Reject", msgspec.msgpack.encode({"error": error}))


def test_what_does_not_fit_into_a_log_is_told() -> None:
    codec: UnionCodec[jobs.Event] = UnionCodec(jobs.Event)
    with pytest.raises(CaptureMismatch):
        codec.encode(jobs.Forked(key=RankKey(1, 1 << 70, 1)))
    with pytest.raises(CaptureMismatch):
        codec.encode(jobs.ForkFailed(key=RankKey(1, 1, 1), reason="\udc80"))
    stranger: Any = supervision.ChildStarted(child="x")
    with pytest.raises(CaptureMismatch):
        codec.tag(stranger)
