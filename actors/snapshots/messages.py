"""Messages between a snapshot process, the launcher of its job, and tools; and the identity of a job."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.host.process import decoded_packet

FORMAT: Final = 1
"""The version of these messages; a launcher with another one is refused."""
PACKET_BYTES_MAX: Final = 128 * 1024
"""A job's command line has at most 64 KiB."""
RANKS_MAX: Final = 2047
IDLE_NS_MAX: Final = 7 * 24 * 3600 * 10**9


class JobIdentity(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The fields that must be equal for a job to take the snapshots of an earlier run.

    run: directory and command line; release: of zbmd; code: digest of the program's files; settings: of the
    variables that ranks read.
    """

    run: str
    release: str
    python: str
    code: str
    ranks: int
    arena_bytes: int
    settings: str

    def differences(self, other: JobIdentity) -> list[str]:
        """Return the names of the fields in which `other` differs."""
        names = self.__struct_fields__
        return [name for name in names if getattr(self, name) != getattr(other, name)]


class HolderSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The task of a holder. address: its abstract socket; idle_ns: how long it lasts without a launcher.

    number: which one it is of those that the launcher has started for the job, from 1.
    """

    address: str
    job: int
    idle_ns: int
    identity: JobIdentity
    number: int = 1


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach", kw_only=True):
    """A launcher begins to run the job."""

    identity: JobIdentity
    format: int = FORMAT


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="hold", kw_only=True):
    """The memory of a rank, whose descriptor comes with it; replaces what is held of that rank."""

    rank: int


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish", kw_only=True):
    """The job has ended, and nobody needs its state."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look", kw_only=True):
    """A tool asks what is held."""

    format: int = FORMAT


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop", kw_only=True):
    """A user wants the memory back."""

    format: int = FORMAT


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work", kw_only=True):
    """A rank asks for work on the memory that is held, such as a checkpoint; a memfd may come with it.

    payload: of a contract of those who do that work, unknown to the holder.
    """

    payload: bytes


class Worked(msgspec.Struct, frozen=True, array_like=True, tag="worked", kw_only=True):
    """Progress of work that this client asked for. payload: as of `Work`."""

    payload: bytes


class Standing(msgspec.Struct, frozen=True, array_like=True, tag="standing", kw_only=True):
    """The answer to `Attach` and `Look`; a `Memory` for each of `ranks` follows.

    launcher: the process that runs the job, 0 if there is none; left_ns: until the holder ends without one.
    """

    job: int
    identity: JobIdentity
    ranks: tuple[int, ...]
    launcher: int
    idle_ns: int
    left_ns: int


class Memory(msgspec.Struct, frozen=True, array_like=True, tag="memory", kw_only=True):
    """A rank's memory, whose descriptor comes with it."""

    rank: int


class Holds(msgspec.Struct, frozen=True, array_like=True, tag="holds", kw_only=True):
    """The memory of a rank outlives its processes from now on."""

    rank: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped", kw_only=True):
    """The holder ends now."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
    """The request is not granted; reason: for people. fields: of the identity, if these differ."""

    reason: str
    fields: tuple[str, ...] = ()


Request: TypeAlias = Attach | Hold | Finish | Look | Drop | Work
Answer: TypeAlias = Standing | Memory | Holds | Dropped | Refused | Worked

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_spec_decoder = msgspec.json.Decoder(HolderSpec)
encode = msgspec.msgpack.Encoder().encode


def decode_request(packet: bytes) -> Request:
    """Decode what a launcher or a tool sent. Raises `RemoteProtocolError`."""
    request = decoded_packet(
        _request_decoder, packet, "a process sent the snapshot process no request", PACKET_BYTES_MAX
    )
    if isinstance(request, Hold):
        _require_rank(request.rank)
    return request


def decode_answer(packet: bytes) -> Answer:
    """Decode what a holder sent. Raises `RemoteProtocolError`."""
    answer = decoded_packet(_answer_decoder, packet, "the snapshot process sent no answer", PACKET_BYTES_MAX)
    ranks = answer.ranks if isinstance(answer, Standing) else ()
    ranks = (answer.rank,) if isinstance(answer, Memory | Holds) else ranks
    for rank in ranks:
        _require_rank(rank)
    if len(set(ranks)) < len(ranks):
        raise RemoteProtocolError(f"the snapshot process names a rank twice: {ranks[:8]}")
    if isinstance(answer, Standing) and not 0 < answer.job < 1 << 64:
        raise RemoteProtocolError(f"the snapshot process names the job {answer.job}: expected a positive u64")
    return answer


def encode_spec(spec: HolderSpec) -> str:
    """Return the argument of a holder's command line."""
    return msgspec.json.encode(spec).decode()


def decode_spec(text: str) -> HolderSpec:
    """Decode the argument of a holder's command line. Raises `RemoteProtocolError`."""
    try:
        spec = _spec_decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the snapshot process was started for nothing that it knows: {error}"
        ) from error
    if not 0 < spec.job < 1 << 64 or not 0 < spec.idle_ns <= IDLE_NS_MAX or spec.number < 1:
        raise RemoteProtocolError(f"the snapshot process was started for job {spec.job}, {spec.idle_ns} ns")
    return spec


def _require_rank(rank: int) -> None:
    if not 0 <= rank < RANKS_MAX:
        raise RemoteProtocolError(f"memory of rank {rank}: expected 0 to {RANKS_MAX - 1}")
