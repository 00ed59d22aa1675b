"""Keys of a session: of both ends, of every role, and of nobody else; stripes that join and that may not."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.handshake.hello import BytesReceived, HelloMachine, Opened, SendBytes
from zbmd.transport.handshake.session_setup import (
    DeclineReason,
    JoinRefused,
    MalformedSetup,
    PeerBusy,
    ProtectionDiffers,
    SessionAnswer,
    SessionDecline,
    SessionOffer,
    SetupError,
    StripeJoin,
    accept_answer,
    accept_offer,
    control_session,
    make_offer,
)
from zbmd.transport.identity import Identity, Side
from zbmd.transport.secure.protection import (
    STRIPES_MAX,
    Keys,
    Protection,
    Purpose,
    Secrets,
    Session,
    join_token,
)

COOKIE = b"0123456789abcdef" * 4
RANK0 = Identity(name="rank0", pid=100, uid=1000, incarnation=1, job=7)
RANK1 = Identity(name="rank1", pid=101, uid=0, incarnation=3, job=7)


def machine(side: Side, cookie: bytes = COOKIE, nonce: int = 0) -> HelloMachine:
    return HelloMachine(
        side=side,
        identity=RANK0 if side is Side.DIALER else RANK1,
        cookie=cookie,
        nonce=side.value[:1].encode() * 31 + bytes([nonce]),
        deadline_ns=1_000_000_000,
    )


def secrets_of_hello(nonce: int = 0, binding: bytes = b"") -> tuple[Secrets, Secrets]:
    """The two ends of a hello between hosts: the kernel has no word on the user there."""
    dialer, listener = machine(Side.DIALER, nonce=nonce), machine(Side.LISTENER, nonce=nonce)
    listener.handle(Opened(peer_uid=None), now_ns=0)
    said = dialer.handle(Opened(peer_uid=None), now_ns=0)
    for taker in (listener, dialer, listener, dialer):
        (data,) = [action.data for action in said if isinstance(action, SendBytes)]
        said = taker.handle(BytesReceived(data=data), now_ns=0)
    return (
        Secrets(dialer.session_secret(), Side.DIALER, binding=binding),
        Secrets(listener.session_secret(), Side.LISTENER, binding=binding),
    )


def raw_keys(keys: Keys) -> tuple[bytes, bytes]:
    return keys.send, keys.receive


def test_both_ends_derive_the_same_and_each_role_its_own() -> None:
    dialer, listener = secrets_of_hello()
    assert dialer.session_id == listener.session_id
    assert dialer.join_key() == listener.join_key()
    everything = [dialer.session_id, dialer.join_key()]
    for get in (Secrets.setup_keys, *(lambda s, p=p: s.keys(p) for p in Purpose)):
        send, receive = raw_keys(get(dialer))
        assert raw_keys(get(listener)) == (receive, send)
        everything += [send, receive]
    assert all(a != b for a, b in combinations(everything, 2))


def test_other_nonces_cookies_and_channels_give_other_keys() -> None:
    ends = [secrets_of_hello()[0], secrets_of_hello(nonce=1)[0], secrets_of_hello(binding=b"tls")[0]]
    ids = [end.session_id for end in ends]
    keys = [end.keys(Purpose.CONTROL).send for end in ends]
    assert len(set(ids)) == len(set(keys)) == 3


def test_the_expansion_is_that_of_rfc_5869() -> None:
    secret = bytes(range(32))
    block = hmac.digest(secret, b"zbmd session 1\0id\0channel\x01", "sha256")
    assert Secrets(secret, Side.DIALER, binding=b"channel").session_id == block[:16]


def test_no_secret_shows_in_what_is_printed() -> None:
    dialer, _ = secrets_of_hello()
    session = control_session(dialer, Protection.MAC, RANK1)
    assert session.keys is not None
    for text in (repr(session), repr(session.keys), repr(dialer)):
        for secret in (*raw_keys(session.keys), session.join_key):
            assert repr(secret)[2:-1] not in text
    assert "send" not in repr(session.keys)


@pytest.mark.parametrize("side", Side)
def test_there_is_no_secret_before_the_end_of_the_hello(side: Side) -> None:
    started = machine(side)
    with pytest.raises(LocalProtocolError, match="before"):
        started.session_secret()
    started.handle(Opened(peer_uid=None), now_ns=0)
    with pytest.raises(LocalProtocolError, match="before"):
        started.session_secret()
    with pytest.raises(LocalProtocolError, match="bytes"):
        Secrets(b"short", side)


# --- setup ----------------------------------------------------------------------------------------------


def no_stripes(control_id: bytes, stripe: int) -> Session | DeclineReason:
    del control_id, stripe
    return DeclineReason.NO_SESSION


def set_up(dialer: Protection, listener: Protection) -> tuple[Session, Session]:
    d, listens = secrets_of_hello()
    answer, at_listener = accept_offer(make_offer(d, dialer), listens, listener, RANK0, no_stripes)
    at_dialer = accept_answer(answer, d, dialer, RANK1)
    assert isinstance(at_listener, Session)
    return at_dialer, at_listener


@pytest.mark.parametrize("protection", Protection)
def test_both_ends_agree(protection: Protection) -> None:
    at_dialer, at_listener = set_up(
        protection,
        protection,
    )
    assert (at_dialer.peer, at_listener.peer) == (RANK1, RANK0)
    assert at_dialer.session_id == at_listener.session_id == at_listener.control_id
    assert at_dialer.purpose is at_listener.purpose is Purpose.CONTROL
    if protection is Protection.MAC:
        assert at_dialer.keys and at_listener.keys
        assert raw_keys(at_dialer.keys) == raw_keys(at_listener.keys)[::-1]
    else:
        assert at_dialer.keys is at_listener.keys is None


@pytest.mark.parametrize("ours", Protection)
@pytest.mark.parametrize("theirs", Protection)
def test_protection_is_never_talked_down(ours: Protection, theirs: Protection) -> None:
    if ours is theirs:
        return
    d, listens = secrets_of_hello()
    answer, refused = accept_offer(make_offer(d, theirs), listens, ours, RANK0, no_stripes)
    assert isinstance(refused, ProtectionDiffers)
    with pytest.raises(ProtectionDiffers, match=ours.value) as told:
        accept_answer(answer, d, theirs, RANK1)
    assert told.value.by_peer
    assert not refused.by_peer


def test_an_answer_that_was_not_offered_is_refused() -> None:
    d, _ = secrets_of_hello()
    answer = msgspec.msgpack.encode(SessionAnswer(protection=Protection.NONE))
    with pytest.raises(MalformedSetup, match="not offered"):
        accept_answer(answer, d, Protection.MAC, RANK1)


def test_a_listener_without_room_says_so() -> None:
    d, listens = secrets_of_hello()
    answer, refused = accept_offer(
        make_offer(d, Protection.MAC), listens, Protection.MAC, RANK0, no_stripes, has_room=False
    )
    assert isinstance(refused, PeerBusy)
    with pytest.raises(PeerBusy, match="try again"):
        accept_answer(answer, d, Protection.MAC, RANK1)


def joining(
    at_dialer: Session, at_listener: Session, *, stripe: int = 2, peer: Identity = RANK0
) -> tuple[bytes, Session | SetupError, Secrets]:
    d, listens = secrets_of_hello(nonce=9)
    open_sessions = {at_listener.session_id: at_listener}

    def lookup(control_id: bytes, number: int) -> Session | DeclineReason:
        return (
            DeclineReason.STRIPE_TAKEN
            if number == 1
            else open_sessions.get(control_id, DeclineReason.NO_SESSION)
        )

    return *accept_offer(
        make_offer(d, Protection.MAC, control=at_dialer, stripe=stripe), listens, Protection.MAC, peer, lookup
    ), d


def test_a_stripe_joins_with_keys_of_its_own() -> None:
    at_dialer, at_listener = set_up(Protection.MAC, Protection.MAC)
    answer, theirs, secrets = joining(at_dialer, at_listener)
    ours = accept_answer(answer, secrets, Protection.MAC, RANK1, control=at_dialer, stripe=2)
    assert isinstance(theirs, Session)
    assert ours.control_id == theirs.control_id == at_dialer.session_id != ours.session_id
    assert (ours.stripe, ours.purpose) == (theirs.stripe, theirs.purpose) == (2, Purpose.STRIPE)
    assert ours.keys and theirs.keys and at_dialer.keys
    assert raw_keys(ours.keys) == raw_keys(theirs.keys)[::-1]
    assert not {*raw_keys(ours.keys)} & {*raw_keys(at_dialer.keys)}


@pytest.mark.parametrize(
    ("change", "stripe", "peer", "why"),
    [
        (lambda s: replace(s, join_key=bytes(32)), 2, RANK0, "token"),
        (lambda s: replace(s, control_id=bytes(16)), 2, RANK0, "no-session"),
        (lambda s: s, 2, msgspec.structs.replace(RANK0, incarnation=2), "no-session"),
        (lambda s: s, 2, msgspec.structs.replace(RANK0, name="rank2"), "no-session"),
        (lambda s: s, 1, RANK0, "lane-taken"),
    ],
    ids=["forged", "unknown", "another incarnation", "another process", "taken"],
)
def test_a_stripe_that_may_not_join(
    change: Callable[[Session], Session], stripe: int, peer: Identity, why: str
) -> None:
    at_dialer, at_listener = set_up(Protection.MAC, Protection.MAC)
    answer, refused, secrets = joining(change(at_dialer), at_listener, stripe=stripe, peer=peer)
    assert isinstance(refused, JoinRefused)
    with pytest.raises(JoinRefused, match=why):
        accept_answer(answer, secrets, Protection.MAC, RANK1, control=at_dialer, stripe=stripe)


def test_a_token_is_good_for_one_connection_and_stripe() -> None:
    key = bytes(range(32))
    tokens = [
        join_token(key, stripe=stripe, stripe_session_id=bytes([n]) * 16) for stripe in (0, 1) for n in (0, 1)
    ]
    assert len(set(tokens)) == 4


JOINS = StripeJoin(control_id=bytes(16), stripe=0, token=bytes(32))
OFFER = SessionOffer(protection=Protection.MAC, joins=JOINS)


@given(
    data=st.one_of(
        st.binary(max_size=600),
        st.recursive(
            st.none() | st.integers(-1, 1 << 40) | st.binary(max_size=40) | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=5),
        ).map(lambda value: msgspec.msgpack.encode(["offer", "mac", value])),
        st.tuples(st.integers(0, 80), st.integers(0, 255)).map(
            lambda at: bytes(
                at[1] if i == at[0] else byte for i, byte in enumerate(msgspec.msgpack.encode(OFFER))
            )
        ),
    )
)
def test_whatever_a_peer_sends_as_setup_ends_typed(data: bytes) -> None:
    d, listens = secrets_of_hello()
    with contextlib.suppress(MalformedSetup):
        accept_offer(data, listens, Protection.MAC, RANK0, no_stripes)
    with pytest.raises(SetupError):
        accept_answer(data, d, Protection.MAC, RANK1)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(OFFER, joins=msgspec.structs.replace(JOINS, stripe=STRIPES_MAX)),
        msgspec.structs.replace(OFFER, joins=msgspec.structs.replace(JOINS, token=bytes(31))),
        SessionDecline(why=DeclineReason.BUSY, protection=Protection.MAC),
    ],
)
def test_bounds_of_an_offer(message: object) -> None:
    _, listens = secrets_of_hello()
    with pytest.raises(MalformedSetup):
        accept_offer(msgspec.msgpack.encode(message), listens, Protection.MAC, RANK0, no_stripes)
