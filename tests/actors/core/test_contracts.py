"""Contracts: ids, versions, fingerprints, closed schemas, and decoding what nobody can trust."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.contracts import (
    Contract,
    ContractDecoder,
    ContractMeta,
    check_fingerprints,
    contract_tag,
    fingerprint,
    fingerprints,
    registered,
)
from zbmd.actors.core import wire
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import ContractError, ContractMismatch, InvalidMessage, UnknownContract
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.identity import Identity
from zbmd.transport.memory.scattered import whole


class Plain(Contract):
    x: int


class Order1(Contract, id="test.order", version=1):
    item: str


class Order3(Contract, id="test.order", version=3, compatible_from=2):
    item: str
    count: int = 1
    note: str = ""


class Address(msgspec.Struct, array_like=True, frozen=True):
    street: str
    number: int


class Everything(Contract, id="test.everything"):
    flag: bool
    number: float
    text: str
    data: bytes
    items: list[int]
    table: dict[str, tuple[int, ...]]
    address: Address
    maybe: Address | None = None


def no_hook(_wanted: type, _value: Any) -> Any:
    raise NotImplementedError


DECODER = ContractDecoder(no_hook)


def encode(tag: object, *fields: object) -> bytes:
    return msgspec.msgpack.encode([tag, *fields])


def test_a_contract_is_an_array_that_begins_with_its_id_and_version() -> None:
    assert msgpack.unpackb(msgspec.msgpack.encode(Order3("tea", 2))) == ["test.order/3", "tea", 2, ""]
    assert contract_tag(Plain) == contract_tag(Plain(1)) and contract_tag(Plain).endswith(":Plain/1")
    assert registered()["test.order", 1] is Order1
    with pytest.raises(AttributeError):
        Plain(1).x = 2  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue]


def test_both_versions_of_one_id_are_live() -> None:
    assert DECODER.decode(encode("test.order/1", "tea")) == Order1("tea")
    assert DECODER.decode(encode("test.order/3", "tea", 4, "hot")) == Order3("tea", 4, "hot")


def test_an_older_version_is_decoded_by_what_says_it_can_and_added_fields_take_defaults() -> None:
    assert DECODER.decode(encode("test.order/2", "tea", 4)) == Order3("tea", 4, "")
    assert DECODER.decode(encode("test.order/2", "tea")) == Order3("tea", 1, "")
    with pytest.raises(InvalidMessage, match=r"test.order/2 does not fit test.order/3"):
        DECODER.decode(encode("test.order/2", 7))


def test_fields_that_a_newer_peer_added_are_skipped() -> None:
    assert DECODER.decode(encode("test.order/1", "tea", 5, {"x": [1]})) == Order1("tea")


def test_unknown_ids_and_versions_are_told_apart_from_misfits() -> None:
    with pytest.raises(UnknownContract, match=r"test.order/9 here; versions of it here: \[1, 3\]"):
        DECODER.decode(encode("test.order/9", "tea"))
    with pytest.raises(UnknownContract, match="imported"):
        DECODER.decode(encode("test.nobody/1"))
    with pytest.raises(InvalidMessage, match="Expected `str`, got `int`"):
        DECODER.decode(encode("test.order/1", 5))
    with pytest.raises(InvalidMessage):
        DECODER.decode(encode("test.order/1"))
    for junk in (b"", b"\xc1", encode(5), encode("test.order"), encode("test.order/x"), encode("x/1")[:3]):
        with pytest.raises(RemoteProtocolError):
            DECODER.decode(junk)


def test_a_contract_defined_later_is_decoded_too() -> None:
    with pytest.raises(UnknownContract):
        DECODER.decode(encode("test.later/1", 5))

    class Later(Contract, id="test.later"):
        x: int

    assert DECODER.decode(encode("test.later/1", 5)) == Later(5)


declared_meanwhile: list[type[Contract]] = []


def declare_another() -> type[int]:
    """Declare a contract, once, where a field's type is asked for: as a thread that imports one does."""
    if not declared_meanwhile:

        class Another(Contract, id="test.another"):
            x: int

        declared_meanwhile.append(Another)
    return int


def declared_with(name: str, kind: str) -> Any:
    """Declare a contract with a field `x` of that type, a name that its module has or will have."""
    body = {"__module__": __name__, "__qualname__": name, "__annotations__": {"x": kind}}
    return ContractMeta(name, (Contract,), body, id=f"test.{name}")


def test_a_contract_that_is_declared_while_a_decoder_looks_is_decoded() -> None:
    first = declared_with("first", "declare_another()")
    assert DECODER.decode(encode("test.first/1", 5)) == first(5)
    assert DECODER.decode(encode("test.another/1", 6)) == declared_meanwhile[0](6)  # type: ignore[call-arg]


def test_a_contract_whose_module_is_still_imported_is_decoded_once_it_is() -> None:
    early = declared_with("early", "NotThereYet")
    with pytest.raises(InvalidMessage, match=r"its field types cannot be read.*NotThereYet"):
        DECODER.decode(encode("test.early/1", 5))
    globals()["NotThereYet"] = int
    assert DECODER.decode(encode("test.early/1", 5)) == early(5)
    with pytest.raises(InvalidMessage, match="Expected `int`, got `str`"):
        DECODER.decode(encode("test.early/1", "five"))


def test_threads_may_declare_contracts_while_others_decode() -> None:
    """One is decoded as soon as it is declared, and no message is lost meanwhile."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    made: list[Any] = []
    declares = threading.Thread(
        target=lambda: made.extend(declared_with(f"made{number}", "int") for number in range(100))
    )
    try:
        declares.start()
        while declares.is_alive():
            assert DECODER.decode(encode("test.order/2", "tea", 4)) == Order3("tea", 4, "")
            for newest in made[-1:]:
                assert DECODER.decode(encode(contract_tag(newest), 5)) == newest(5)
    finally:
        declares.join()
        sys.setswitchinterval(interval)
    assert [DECODER.decode(encode(contract_tag(each), 5)) for each in made] == [each(5) for each in made]


def test_ids_are_checked_and_unique() -> None:
    with pytest.raises(ContractError, match="already"):

        class Other(Contract, id="test.order", version=1):  # pyright: ignore[reportUnusedClass]
            pass

    for bad in ("", "a b", "x" * 59, "a/b"):
        with pytest.raises(ContractError):

            class Bad(Contract, id=bad):  # pyright: ignore[reportUnusedClass]
                pass

    for version, oldest in ((0, None), (70_000, None), (2, 3), (2, 0)):
        with pytest.raises(ContractError):

            class Worse(  # pyright: ignore[reportUnusedClass]
                Contract, id="test.worse", version=version, compatible_from=oldest
            ):
                pass


def make(**annotations: Any) -> type[Contract]:
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__qualname__": "Made",
        "__annotations__": annotations,
    }
    made: Any = ContractMeta("Made", (Contract,), namespace, id="test.made")
    return made  # type: ignore[no-any-return]


def test_fingerprints_see_every_change_of_the_schema() -> None:
    schemas: list[dict[str, Any]] = [
        {"a": int},
        {"b": int},
        {"a": str},
        {"a": int, "b": int},
        {"a": list[int]},
        {"a": list[str]},
        {"a": tuple[int, str]},
        {"a": dict[str, int]},
        {"a": Address},
        {"a": int | None},
        {"a": Ref},
    ]
    prints = [fingerprint(make(**s)) for s in schemas]
    assert len(set(prints)) == len(prints)
    assert fingerprint(make(a=int)) == prints[0]
    assert fingerprint(Order1) != fingerprint(Order3)
    make(a=int)


@pytest.mark.parametrize("field", [Any, object, msgspec.Raw, list[Any], memoryview])
def test_schemas_are_closed(field: Any) -> None:
    open_one = make(a=field)
    with pytest.raises(ContractError, match=r"test.made/1.a"):
        fingerprint(open_one)
    decoder = ContractDecoder(no_hook)
    assert decoder.decode(encode("test.order/1", "tea")) == Order1("tea")
    with pytest.raises(InvalidMessage):
        decoder.decode(encode("test.made/1", 5))
    make(a=int)


class Chain(msgspec.Struct):
    next: Chain | None


def test_schemas_do_not_recurse_or_nest_without_end() -> None:
    with pytest.raises(ContractError, match="recursive"):
        fingerprint(make(a=Chain))
    deep: Any = int
    for _ in range(20):
        deep = list[deep]
    with pytest.raises(ContractError, match="deeper than 16"):
        fingerprint(make(a=deep))
    make(a=int)


def test_peers_compare_fingerprints() -> None:
    ours = fingerprints()
    assert ours["test.order/1"] == fingerprint(Order1)
    check_fingerprints("rank1", ours)
    check_fingerprints("rank1", {"test.unknown/1": "00"})
    with pytest.raises(ContractMismatch, match=r"rank1 has another schema for test.order/1"):
        check_fingerprints("rank1", ours | {"test.order/1": "0123456789abcdef"})
    Identity(name="x", pid=1, uid=1, incarnation=1, contracts=ours)
    assert all(len(tag) <= 64 for tag in ours)


def test_hostile_sizes_and_depths_allocate_nothing() -> None:
    head = b"\x92\xaftest.everything/1"[:1] + b"\xb1test.everything/1"
    bombs = [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 500_000,
        b"\xdd\x00\x00\xff\xff" * 1000,
    ]
    for bomb in bombs:
        with pytest.raises((InvalidMessage, RemoteProtocolError)):
            DECODER.decode(head + bomb)
        with pytest.raises(RemoteProtocolError):
            DECODER.decode(bomb)
        # Within a field that is skipped because a newer peer added it.
        with pytest.raises((InvalidMessage, RemoteProtocolError)):
            DECODER.decode(b"\x93\xactest.order/1\xa3tea" + bomb)


async def test_fuzzed_envelopes_are_refused_or_understood(system: ActorSystem) -> None:
    codec = system.codec
    message = Everything(True, 1.5, "x", b"y", [1, 2], {"k": (1, 2)}, Address("s", 1))
    valid = [
        wire.encode_tell("a", 0, "", message),
        wire.encode_ask(1, "a", 2, 3, "b", message),
        wire.encode_reply(4, message),
        wire.encode(wire.Fail(1, "dead_actor", "x")),
        wire.encode(wire.Watch(1, "a", 0)),
        wire.encode(wire.Spawn(1, 2, "m:C", "", None, [1, "x", None])),
    ]

    @given(data=st.data())
    def mutate(data: st.DataObject) -> None:
        payload = bytearray(whole(data.draw(st.sampled_from(valid))))
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(payload) - 1))
            how = data.draw(st.sampled_from(["set", "cut", "insert"]))
            if how == "set":
                payload[at] = data.draw(st.integers(0, 255))
            elif how == "cut" and len(payload) > 1:
                del payload[at:]
            else:
                payload[at:at] = data.draw(st.binary(max_size=6))
            if not payload:
                return
        try:
            envelope = codec.decode(bytes(payload))
            if isinstance(envelope, wire.Tell | wire.Ask | wire.Reply):
                codec.decode_reply(envelope.body)
        except (RemoteProtocolError, UnknownContract, InvalidMessage):
            pass

    @given(st.binary(max_size=300))
    def noise(payload: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            codec.decode(payload)

    mutate()
    noise()
    await asyncio.sleep(0)
    with pytest.raises(RemoteProtocolError, match="at most"):
        codec.decode(bytes(MAX_PAYLOAD_BYTES + 1))


async def test_references_travel_in_contracts(system: ActorSystem) -> None:
    class Carry(Contract, id="test.carry"):
        ref: Ref
        more: list[Ref] = []  # noqa: RUF012

    globals()["Carry"] = Carry
    ref = Ref(system, "rank1", 3, "counter", 7)
    payload = whole(wire.encode_reply(1, Carry(ref, [system.ref("a")])))
    reply = system.codec.decode(payload)
    assert isinstance(reply, wire.Reply)
    assert system.codec.decode_reply(reply.body) == Carry(ref, [system.ref("a")])
    for bad in (
        5,
        ["rank1", 3, "counter"],
        ["rank1", -1, "counter", 7],
        ["rank1", 3, "a b", 7],
        ["", 3, "a", 7],
    ):
        with pytest.raises(InvalidMessage):
            system.codec.decode_contract(encode("test.carry/1", bad))
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        wire.encode_tell("a", 0, "", Plain(object()))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidMessage, match="region"):
        wire.encode_tell("a", 0, "", Order1("x" * MAX_PAYLOAD_BYTES))
