"""Encode reports as bytes of a fixed size, which members exchange by an all-gather, and choose a cost
model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.cost_model import Model, is_far
from zbmd.collectives.communicator.group_trials import agree_on_model
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.repair.events import Call, Failed, Failure, Inputs, OnLoss, Phase, Report
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """The measured cost model of a group. `far`: whether it had members on several hosts."""

    model: Model
    far: bool

    def fits(self, hosts: tuple[int, ...]) -> bool:
        """Return whether it also applies to members on these hosts."""
        return self.far == is_far(hosts)


def pinned(
    c: Communicator, reported: Iterable[MeasuredModel | None], deadline_ns: int
) -> MeasuredModel | None:
    """Return the cost model that all members use in the epoch of `c`; all call this before any operation.

    `reported`: the model of each member from earlier epochs, in member order, the same on all. The first one
    that was measured in a similar group is used, because links do not change with membership, and a repair is
    no time to measure. If there is none, all members measure now, about 10 ms. Raises as `Communicator.tune`.
    """
    found = next((one for one in reported if one is not None and one.fits(c.hosts)), None)
    if found is None and c.size > 1:
        found = MeasuredModel(model=agree_on_model(c, deadline_ns), far=is_far(c.hosts))
    if found is not None:
        c.model = found.model
    return found


TEXT_BYTES_MAX = 240


def report_bytes(ranks: int) -> int:
    """Return the length of a report in a job of `ranks` ranks.

    Everything that a report can contain, with incarnations of four bytes, three times each, fits.
    """
    return 1024 + 32 * ranks


Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Members: TypeAlias = Annotated[tuple[Number, ...], msgspec.Meta(max_length=2 * RANKS_MAX)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_BYTES_MAX)]
Cost: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
Ranks: TypeAlias = Annotated[tuple[Number, ...], msgspec.Meta(max_length=RANKS_MAX)]


class _Call(msgspec.Struct, array_like=True, frozen=True):
    text: Text
    on_loss: OnLoss
    inputs: Inputs
    needs: Annotated[int, msgspec.Meta(ge=-1, lt=RANKS_MAX)]
    own: bool


class _Failed(msgspec.Struct, array_like=True, frozen=True):
    sequence: Number
    failure: Failure
    reason: Text
    ranks: Ranks


class _MeasuredModel(msgspec.Struct, array_like=True, frozen=True):
    alpha_ns: Cost
    beta_ns_per_byte: Cost
    gamma_ns_per_byte: Cost
    cores: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    far: bool


class _Report(msgspec.Struct, array_like=True, frozen=True):
    born: Number
    sequence: Number
    phase: Phase
    call: _Call | None
    attempted: Members
    contributors: Members
    readable: Members
    failed: _Failed | None
    record_at: Number
    measured: _MeasuredModel | None
    reading: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangedReport:
    """A member's part of an exchange.

    `record_at`: where it publishes, from its segment's base; 0: it does not. `measured`: the model by which
    it has chosen algorithms, if measured. `reading`: the number of its last trial (`group_trials.Reading`).
    """

    report: Report
    record_at: int = 0
    measured: MeasuredModel | None = None
    reading: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Report)


def encode_report(sent: ExchangedReport, *, ranks: int) -> Array:
    """Return the bytes, (report_bytes(ranks),) uint8, in a job of `ranks`."""
    report, measured = sent.report, sent.measured
    call, failed = report.call, report.failed
    data = _encoder.encode(
        _Report(
            report.born,
            report.sequence,
            report.phase,
            _Call(_cut(call.text), call.on_loss, call.inputs, call.needs, call.own) if call else None,
            _flat(report.attempted),
            _flat(report.contributors),
            _flat(report.readable),
            _Failed(failed.sequence, failed.failure, _cut(failed.reason), failed.ranks) if failed else None,
            sent.record_at,
            _MeasuredModel(*_costs(measured.model), measured.model.cores, measured.far) if measured else None,
            sent.reading,
        )
    )
    nbytes = report_bytes(ranks)
    if len(data) + 2 > nbytes:
        raise LocalProtocolError(f"a report of {len(data)} bytes; {nbytes - 2} is the bound")
    encoded = np.zeros(nbytes, np.uint8)
    encoded[:2] = divmod(len(data), 256)
    encoded[2 : 2 + len(data)] = np.frombuffer(data, np.uint8)
    return encoded


def decode_report(encoded: Array, sender: int) -> ExchangedReport:
    """Return the report of rank `sender`. Raises `RemoteProtocolError`: the bytes are a peer's."""
    raw = encoded.tobytes()
    length = raw[0] * 256 + raw[1] if len(raw) >= 2 else 0
    try:
        found = _decoder.decode(raw[2 : 2 + length])
        report = Report(
            born=found.born,
            sequence=found.sequence,
            phase=found.phase,
            call=_call(found.call),
            attempted=_members(found.attempted),
            contributors=_members(found.contributors),
            readable=_members(found.readable),
            failed=msgspec.convert(found.failed, Failed | None, from_attributes=True),
        )
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"rank {sender} sent no report of a repair: {error}") from error
    if (report.call is None) != (report.phase is Phase.IDLE):
        raise RemoteProtocolError(f"rank {sender} reports {report.phase} of the call {report.call}")
    return ExchangedReport(
        report=report,
        record_at=found.record_at,
        measured=_measured(found.measured),
        reading=found.reading,
    )


def _costs(model: Model) -> tuple[float, float, float]:
    return model.alpha_ns, model.beta_ns_per_byte, model.gamma_ns_per_byte


def _measured(found: _MeasuredModel | None) -> MeasuredModel | None:
    if found is None:
        return None
    return MeasuredModel(model=msgspec.convert(found, Model, from_attributes=True), far=found.far)


def _call(found: _Call | None) -> Call | None:
    if found is None:
        return None
    if found.own and found.inputs is Inputs.RECOMPUTE:
        raise ValueError("each has a result of its own, and the inputs do not stay")
    return msgspec.convert(found, Call, from_attributes=True)


def _flat(members: tuple[MemberId, ...]) -> tuple[int, ...]:
    return tuple(number for member in members for number in (member.rank, member.incarnation))


def _members(flat: tuple[int, ...]) -> tuple[MemberId, ...]:
    return tuple(
        MemberId(rank=rank, incarnation=incarnation)
        for rank, incarnation in zip(flat[::2], flat[1::2], strict=True)
    )


def _cut(text: str) -> str:
    return text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")
