"""The hello as a pair of machines: who may enter, who may not and with which error; fuzzed and simulated."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.handshake.hello import (
    HELLO_VERSION,
    MAX_BODY_BYTES,
    NONCE_BYTES,
    Accept,
    BytesReceived,
    ContractsDiffer,
    Garbage,
    HelloAction,
    HelloError,
    HelloEvent,
    HelloMachine,
    HelloState,
    HelloTimeout,
    HungUp,
    Opened,
    Oversized,
    PeerClosed,
    RefusalReason,
    Reject,
    SendBytes,
    WrongCookie,
    WrongJob,
    WrongUser,
    WrongVersion,
)
from zbmd.transport.identity import Identity, Side
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.sim import (
    Arrived,
    Conditions,
    Effect,
    MachineProcess,
    Note,
    PeerEnded,
    Process,
    Send,
    Simulation,
    Started,
    Stimulus,
)
from zbmd.transport.sim import SetTimer as SimSetTimer
from zbmd.transport.sim import TimerFired as SimTimerFired

COOKIE = b"0123456789abcdef" * 4
DEADLINE_NS = 5_000_000_000
CONTRACTS = {"counter.Add/1": "aa", "counter.Add/2": "bb"}
RANK0 = Identity(name="rank0", pid=100, uid=1000, incarnation=1, job=7, contracts=CONTRACTS)
RANK1 = Identity(name="rank1", pid=101, uid=1000, incarnation=3, job=7, contracts={"counter.Total/1": "cc"})
HEADER = struct.Struct("<4sHHI")


def dialer(identity: Identity = RANK0, cookie: bytes = COOKIE, nonce: bytes = b"d" * 32) -> HelloMachine:
    return HelloMachine(
        side=Side.DIALER, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=DEADLINE_NS
    )


def listener(identity: Identity = RANK1, cookie: bytes = COOKIE, nonce: bytes = b"l" * 32) -> HelloMachine:
    return HelloMachine(
        side=Side.LISTENER, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=DEADLINE_NS
    )


class Pair:
    """Two machines over a perfect stream; `cut` cuts it into pieces, `tamper` may change what is sent."""

    def __init__(
        self,
        left: HelloMachine,
        right: HelloMachine,
        *,
        cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data],
        tamper: Callable[[int, bytes], bytes] = lambda index, data: data,
        listener_sees_uid: int | None = None,
    ) -> None:
        self.machines = (left, right)
        self.cut, self.tamper = cut, tamper
        self.uids = (None, listener_sees_uid)
        self.ends: list[list[Accept | Reject]] = [[], []]
        self.sent: list[tuple[int, bytes]] = []

    def run(self) -> Pair:
        queue: list[tuple[int, HelloEvent]] = [(i, Opened(peer_uid=self.uids[i])) for i in (1, 0)]
        while queue:
            side, event = queue.pop(0)
            for action in feed(self.machines[side], event):
                match action:
                    case SendBytes(data=data):
                        data = self.tamper(len(self.sent), data)
                        self.sent.append((side, data))
                        queue += [(1 - side, BytesReceived(data=piece)) for piece in self.cut(data)]
                    case Accept():
                        self.ends[side].append(action)
                    case Reject():
                        self.ends[side].append(action)
                        queue.append((1 - side, PeerClosed()))
                    case SetTimer(at_ns=at_ns):
                        assert at_ns == DEADLINE_NS
        return self

    def errors(self) -> tuple[HelloError, HelloError]:
        ((left,), (right,)) = self.ends
        assert isinstance(left, Reject)
        assert isinstance(right, Reject)
        return left.error, right.error


def feed(machine: HelloMachine, event: HelloEvent, now_ns: int = 0) -> list[HelloAction]:
    """Do what a driver does: nothing more for a machine that is done."""
    if machine.state is HelloState.ACCEPTED and isinstance(event, BytesReceived):
        return []
    actions = machine.handle(event, now_ns=now_ns)
    machine.check_invariants()
    return actions


def one_reject(actions: list[HelloAction]) -> HelloError:
    (reject,) = [action for action in actions if isinstance(action, Reject)]
    assert actions[-1] is reject
    return reject.error


def bytewise(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


# --- who may enter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [lambda data: [data], bytewise])
def test_a_pair_with_one_cookie_learns_who_the_other_is(cut: Callable[[bytes], Iterable[bytes]]) -> None:
    pair = Pair(dialer(), listener(), cut=cut).run()
    assert pair.ends == [[Accept(peer=RANK1, surplus=b"")], [Accept(peer=RANK0, surplus=b"")]]
    assert [side for side, _ in pair.sent] == [0, 1, 0, 1]


def test_what_follows_the_hello_is_handed_on() -> None:
    conversation = [data for _, data in Pair(dialer(), listener()).run().sent]
    machine = dialer()
    feed(machine, Opened(peer_uid=None))
    feed(machine, BytesReceived(data=conversation[1]))
    actions = feed(machine, BytesReceived(data=conversation[3] + b"first frame"))
    assert actions == [Accept(peer=RANK1, surplus=b"first frame")]


def test_a_tool_of_no_job_may_talk_to_any() -> None:
    tool = msgspec.structs.replace(RANK0, name="status", job=0)
    assert Pair(dialer(tool), listener()).run().ends[1] == [Accept(peer=tool, surplus=b"")]


def test_a_later_release_may_add_fields_to_the_identity() -> None:
    class Later(Identity, frozen=True, kw_only=True):
        zone: str = "a"

    later = Later(**msgspec.structs.asdict(RANK0))
    ((_,), (accept,)) = Pair(dialer(later), listener()).run().ends
    assert accept == Accept(peer=RANK0, surplus=b"")


def test_both_versions_of_a_contract_may_live_and_only_shared_ones_count() -> None:
    peer = msgspec.structs.replace(RANK1, contracts={"counter.Add/2": "bb", "other/1": "x"})
    ends = Pair(dialer(), listener(peer)).run().ends
    assert all(isinstance(end, Accept) for (end,) in ends)


# --- who may not ----------------------------------------------------------------------------------------

STRANGERS: list[tuple[HelloMachine, type[HelloError]]] = [
    (dialer(cookie=b"f" * 64), WrongCookie),
    (dialer(msgspec.structs.replace(RANK0, uid=1001)), WrongUser),
    (dialer(msgspec.structs.replace(RANK0, job=8)), WrongJob),
    (dialer(msgspec.structs.replace(RANK0, contracts={"counter.Total/1": "zz"})), ContractsDiffer),
]


@pytest.mark.parametrize(("stranger", "error"), STRANGERS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_stranger_is_refused_and_told_why(stranger: HelloMachine, error: type[HelloError]) -> None:
    theirs, ours = Pair(stranger, listener(), listener_sees_uid=RANK1.uid).run().errors()
    assert type(ours) is type(theirs) is error
    assert (ours.by_peer, theirs.by_peer) == (False, True)
    assert "PROOF" in str(ours), "the error quotes what came before"


def test_a_listener_with_another_cookie_refuses() -> None:
    theirs, ours = Pair(dialer(), listener(cookie=b"f" * 64)).run().errors()
    assert (type(theirs), type(ours)) == (WrongCookie, WrongCookie)


def test_a_listener_that_knows_nothing_cannot_pose_as_ours() -> None:
    """It accepts whatever comes and answers with a proof of its own making."""
    machine = dialer()
    feed(machine, Opened(peer_uid=None))
    feed(machine, BytesReceived(data=message(2, b"x" * NONCE_BYTES)))
    error = one_reject(
        feed(machine, BytesReceived(data=message(4, bytes(32) + msgspec.msgpack.encode(RANK1))))
    )
    assert type(error) is WrongCookie
    assert not error.by_peer


def test_the_kernels_word_on_the_uid_counts() -> None:
    for machine in (dialer(), listener()):
        assert type(one_reject(feed(machine, Opened(peer_uid=0)))) is WrongUser
    machine = listener()
    assert feed(machine, Opened(peer_uid=1000)) == [SetTimer(at_ns=DEADLINE_NS)]


def test_on_another_host_the_same_user_may_have_another_number() -> None:
    elsewhere = msgspec.structs.replace(RANK0, uid=501)
    assert Pair(dialer(elsewhere), listener()).run().ends[1] == [Accept(peer=elsewhere, surplus=b"")]


def message(code: int, body: bytes, *, version: int = HELLO_VERSION, nbytes: int | None = None) -> bytes:
    return HEADER.pack(b"zbmd", version, code, len(body) if nbytes is None else nbytes) + body


@pytest.mark.parametrize(
    ("data", "error", "told"),
    [
        (b"GET / HTTP/1.1\r\n", Garbage, False),
        (b"\x16", Garbage, False),
        (b"zbme", Garbage, False),
        (message(1, b"d" * 32, version=HELLO_VERSION + 1), WrongVersion, True),
        (message(1, b"d" * 32, version=HELLO_VERSION - 1), WrongVersion, True),
        (message(1, b"", version=0)[:12], WrongVersion, True),
        (message(1, b"", nbytes=MAX_BODY_BYTES + 1), Oversized, True),
        (message(1, b"", nbytes=2**32 - 1), Oversized, True),
        (message(1, b"d" * 31), Garbage, False),
        (message(0, b""), Garbage, False),
        (message(9, b""), Garbage, False),
        (message(3, b"d" * 32), Garbage, False),
        (message(5, b"\x04"), WrongCookie, False),
        (message(5, b"\x63"), Garbage, False),
        (message(5, b""), Garbage, False),
    ],
)
def test_each_wrong_opening_has_its_error(data: bytes, error: type[HelloError], told: bool) -> None:
    machine = listener()
    feed(machine, Opened(peer_uid=1000))
    actions = feed(machine, BytesReceived(data=data))
    assert type(one_reject(actions)) is error
    refusals = [action.data for action in actions if isinstance(action, SendBytes)]
    assert refusals == ([message(5, bytes([error.refusal]))] if told else [])


def proved(identity: bytes) -> HelloError:
    """The answer of a listener to a dialer that holds the cookie and sends these bytes as its identity."""
    pair = Pair(dialer(), listener())
    pair.machines[0]._packed_identity = identity
    return pair.run().errors()[1]


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode({"name": "rank0"}),
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode(RANK0) + b"\x00",
        msgspec.msgpack.encode(msgspec.structs.replace(RANK0, name="../../etc")),
        msgspec.msgpack.encode(msgspec.structs.replace(RANK0, name="rank0\n")),
        msgspec.msgpack.encode(msgspec.structs.replace(RANK0, incarnation=-1)),
        msgspec.msgpack.encode(
            msgspec.structs.replace(RANK0, contracts={str(key): "" for key in range(2000)})
        ),
        msgspec.msgpack.encode({**msgspec.structs.asdict(RANK0), "name": 5}),
        msgspec.msgpack.encode(RANK0).replace(b"rank0", b"rank\xff"),
    ],
    ids=range(12),
)
def test_even_one_with_the_cookie_cannot_send_nonsense(identity: bytes) -> None:
    assert type(proved(identity)) is Garbage


# --- fuzz -----------------------------------------------------------------------------------------------


@given(pieces=st.lists(st.binary(max_size=80), max_size=8), side=st.sampled_from(Side), headed=st.booleans())
def test_bytes_from_anywhere_end_in_one_reject_at_most(pieces: list[bytes], side: Side, headed: bool) -> None:
    machine = listener() if side is Side.LISTENER else dialer()
    actions = feed(machine, Opened(peer_uid=None))
    for code, piece in enumerate(pieces):
        data = message(code % 6, piece) if headed else piece
        actions += feed(machine, BytesReceived(data=data))
    actions += feed(machine, TimerFired(), DEADLINE_NS)
    actions += feed(machine, PeerClosed())
    assert not any(isinstance(action, Accept) for action in actions)
    assert sum(isinstance(action, Reject) for action in actions) == 1


@given(
    index=st.integers(0, 3),
    position=st.integers(0, 2**16),
    bit=st.integers(0, 7),
    cuts=st.integers(1, 50),
)
def test_no_changed_bit_gets_through(index: int, position: int, bit: int, cuts: int) -> None:
    """Whichever bit of the conversation is changed on its way, nobody accepts a peer that did not say so,
    and the one who got the changed message never accepts."""

    def flip(at: int, data: bytes) -> bytes:
        if at != index:
            return data
        changed = bytearray(data)
        changed[position % len(data)] ^= 1 << bit
        return bytes(changed)

    def cut(data: bytes) -> list[bytes]:
        return [data[i : i + cuts] for i in range(0, len(data), cuts)]

    pair = Pair(dialer(), listener(), tamper=flip, cut=cut).run()
    for side, ends in enumerate(pair.ends):
        for end in ends:
            assert isinstance(end, Reject) or end.peer == (RANK1, RANK0)[side]
    assert not any(isinstance(end, Accept) for end in pair.ends[index % 2 ^ 1])


def test_a_conversation_cannot_be_replayed() -> None:
    said = Pair(dialer(), listener()).run().sent
    for side, fresh in ((1, listener(nonce=b"n" * 32)), (0, dialer(nonce=b"n" * 32))):
        feed(fresh, Opened(peer_uid=None))
        ends = [
            feed(fresh, BytesReceived(data=data)) for by, data in said if by != side and fresh.peer is None
        ]
        assert type(one_reject(ends[-1])) is WrongCookie


def test_a_dialers_proof_cannot_be_reflected() -> None:
    """A listener that echoes our own messages back with their types changed is no peer."""
    machine = dialer()
    _, opening = feed(machine, Opened(peer_uid=None))
    assert isinstance(opening, SendBytes)
    (proof,) = feed(machine, BytesReceived(data=message(2, opening.data[HEADER.size :])))
    assert isinstance(proof, SendBytes)
    error = one_reject(feed(machine, BytesReceived(data=message(4, proof.data[HEADER.size :]))))
    assert type(error) is WrongCookie


# --- time, closing, misuse ------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [dialer(), listener()])
def test_the_deadline_ends_it_and_not_before(machine: HelloMachine) -> None:
    feed(machine, Opened(peer_uid=None))
    assert feed(machine, TimerFired(), DEADLINE_NS - 1) == [SetTimer(at_ns=DEADLINE_NS)]
    assert type(one_reject(feed(machine, TimerFired(), DEADLINE_NS))) is HelloTimeout
    assert feed(machine, PeerClosed()) == feed(machine, BytesReceived(data=b"x")) == []


@pytest.mark.parametrize("machine", [dialer(), listener()])
def test_a_peer_that_hangs_up_is_told_of_with_the_story(machine: HelloMachine) -> None:
    feed(machine, Opened(peer_uid=None))
    error = one_reject(feed(machine, PeerClosed()))
    assert type(error) is HungUp
    assert machine.side.value in str(error)
    assert error.story[0] == "opened (peer uid None)"


def test_timers_and_closing_after_it_change_nothing() -> None:
    pair = Pair(dialer(), listener()).run()
    for machine in pair.machines:
        assert feed(machine, TimerFired(), DEADLINE_NS) == feed(machine, PeerClosed()) == []
        with pytest.raises(LocalProtocolError, match="handed on"):
            machine.handle(BytesReceived(data=b"x"), now_ns=0)


def test_misuse_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="cookie"):
        dialer(cookie=b"short")
    with pytest.raises(LocalProtocolError, match="nonce"):
        dialer(nonce=b"short")
    with pytest.raises(LocalProtocolError, match="no peer would accept"):
        dialer(msgspec.structs.replace(RANK0, name="a b"))
    with pytest.raises(LocalProtocolError, match="before"):
        dialer().handle(BytesReceived(data=b"x"), now_ns=0)
    machine = dialer()
    feed(machine, Opened(peer_uid=None))
    with pytest.raises(LocalProtocolError, match="once"):
        machine.handle(Opened(peer_uid=None), now_ns=0)


def test_the_largest_identity_fits_and_every_error_has_its_code() -> None:
    contracts = {f"{key:064}": f"{key:032}" for key in range(1024)}
    peer = msgspec.structs.replace(RANK1, contracts=contracts)
    assert all(isinstance(end, Accept) for (end,) in Pair(dialer(), listener(peer)).run().ends)
    assert {error.refusal for error in HelloError.__subclasses__()} == set(RefusalReason)


# --- simulated: a slow, jumbled host, and either side killed at any moment --------------------------------


def to_events(stimulus: Stimulus[bytes]) -> list[HelloEvent]:
    match stimulus:
        case Started():
            return [Opened(peer_uid=1000)]
        case Arrived(message=data):
            return [BytesReceived(data=data)]
        case SimTimerFired():
            return [TimerFired()]
        case PeerEnded():
            return [PeerClosed()]
        case _:
            return []


def hello_world(seed: int) -> Simulation[bytes]:
    sim = Simulation[bytes](seed, conditions=Conditions(jitter_ns=2 * 10**9, notice_is_fence=True))
    pieces = sim.rng("pieces")

    def split(data: bytes) -> list[bytes]:
        cut = pieces.randint(0, len(data))
        return [piece for piece in (data[:cut], data[cut:]) if piece]

    def factory(other: str, make: Callable[[], HelloMachine]) -> Callable[[int], Process[bytes]]:
        def to_effects(action: HelloAction) -> list[Effect[bytes]]:
            match action:
                case SendBytes(data=data):
                    return [Send(to=other, message=piece) for piece in split(data)]
                case SetTimer(at_ns=at_ns):
                    return [SimSetTimer(name="hello", at_ns=at_ns)]
                case Accept(peer=peer):
                    return [Note(value=peer)]
                case Reject(error=error):
                    return [Note(value=type(error))]

        return lambda _: MachineProcess(make(), to_events=to_events, to_effects=to_effects)

    sim.add("rank1", factory("rank0", listener))
    sim.add("rank0", factory("rank1", dialer))
    return sim


def outcome(sim: Simulation[bytes]) -> tuple[object, ...]:
    """Run to the end: what each side that still lives ended with; each ends exactly once, and rightly."""
    sim.run()
    ends: list[object] = []
    for name, peer in (("rank0", RANK1), ("rank1", RANK0)):
        values = [value for by, value in sim.notes() if by == name]
        assert len(values) <= 1
        assert len(values) == 1 or not sim.lives(name), f"{name} never ended"
        assert all(value in (peer, HungUp, HelloTimeout) for value in values)
        ends += values
    return tuple(ends)


def test_a_slow_host_ends_every_hello_and_some_in_time() -> None:
    ends = [outcome(hello_world(seed)) for seed in range(100)]
    assert (RANK1, RANK0) in ends
    assert any(HelloTimeout in end for end in ends)


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_moment_leaves_the_other_with_one_end(seed: int) -> None:
    calm = hello_world(seed)
    outcome(calm)
    for point in calm.kill_points():
        sim = hello_world(seed)
        sim.crash_during(point)
        outcome(sim)
        assert not sim.lives(point.process)
