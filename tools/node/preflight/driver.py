"""The driver of the host gate, on each node of a run: it asks what the machine wants, and measures.

The member that leads asks each host to measure itself (`MeasureWanted`, answered by `HostReport`). Of a pair
it asks one node to be measured (`ProbeWanted`), which sends the other one where (`ProbeAt`), which reports
the result (`ProbeDone`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, assert_never

import msgspec

from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.port import ClusterPort
from zbmd.actors.cluster.state.job_table import HostsChecked
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.tools.node.preflight import gate as g
from zbmd.tools.node.preflight import survey as s
from zbmd.tools.node.preflight.host import MeasuredHost
from zbmd.tools.node.preflight.links import TOKEN_BYTES, probe, serve_probe
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.tcp.address import parse_address

PROBES_MAX: Final = 4
"""Of a host at once; the machine wants one."""

_Speed = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class OwnSpeed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Measurements of a host by itself."""

    flops_per_s: _Speed
    memory_per_s: _Speed


class MeasureWanted(Contract, id="zbmd.preflight.measure_wanted"):
    """Asks the receiver for the speed of its host. kept: as it was measured last."""

    survey: _Number
    kept: bool


class HostReport(Contract, id="zbmd.preflight.host_report"):
    """The sender's host has this speed. problem: why it is not fit; empty if it is."""

    survey: _Number
    problem: _Text
    speed: OwnSpeed | None


class ProbeWanted(Contract, id="zbmd.preflight.probe_wanted"):
    """Asks the receiver to let node `by` measure the link to it."""

    survey: _Number
    by: NodeKey


class ProbeAt(Contract, id="zbmd.preflight.probe_at"):
    """The sender lets the receiver measure the link to it, for `asker`."""

    survey: _Number
    asker: NodeKey
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class ProbeDone(Contract, id="zbmd.preflight.probe_done"):
    """The link from the sender to `to`. problem: why it could not be measured; empty if it was."""

    survey: _Number
    to: NodeKey
    bytes_per_s: _Speed
    trip_ns: _Number
    problem: _Text


class HostSurvey:
    """This node's part in the checks of hosts for `job`. listen_host: where its ranks would listen.

    host: what this one has measured at its start; None: it is not asked for anything (no `--preflight`).
    say: takes lines for the user; excluded: is called with the reason if this host is not to take part;
    fails: takes an error of the machine.
    """

    def __init__(
        self,
        port: ClusterPort,
        job: int,
        listen_host: str,
        host: MeasuredHost | None,
        *,
        say: Callable[[str], None],
        excluded: Callable[[str], None],
        fails: Callable[[Exception], None],
    ) -> None:
        self._port, self._job, self._listen_host, self._host = port, job, listen_host, host
        self._say, self._excluded, self._fails = say, excluded, fails
        self._loop = asyncio.get_running_loop()
        self._work: set[asyncio.Task[None]] = set()
        self._measuring = asyncio.Lock()
        self._ran = self._is_out = False
        self._gate = g.HostGate(job)
        self._timer: asyncio.TimerHandle | None = None

    def sees(self, view: ClusterView) -> None:
        """The node acts on a view."""
        job, me = view.jobs.job(self._job), self._port.me.key
        if self._host is None or job is None:
            return
        self._ran |= me in job.nodes()
        check = job.check_of(me)
        if check is not None and check.problem and not self._is_out:
            self._is_out = True
            self._excluded(check.problem)
        self._put(g.Seen(me=me, view=view))

    async def close(self) -> None:
        """End what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def received(self, sender: NodeKey, message: Contract) -> None:
        """Take a message of a member."""
        if not self._port.view.holds(sender):
            return
        match message:
            case MeasureWanted():
                self._begin(self._measure_host(sender, message))
            case HostReport(survey=number, problem=problem, speed=own):
                speed = (
                    None
                    if own is None
                    else s.HostSpeed(flops_per_s=own.flops_per_s, memory_per_s=own.memory_per_s)
                )
                self._put(g.HostMeasured(number=number, node=sender, problem=problem, speed=speed))
            case ProbeWanted():
                self._begin(self._be_measured(sender, message))
            case ProbeAt():
                self._begin(self._measure_link(sender, message))
            case ProbeDone(survey=number, to=to, problem=problem):
                speed_found = s.LinkSpeed(bytes_per_s=message.bytes_per_s, trip_ns=message.trip_ns)
                found = problem or speed_found
                self._put(g.LinkMeasured(number=number, one=sender, other=to, found=found))
            case _:
                pass  # for others who listen

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._work) >= PROBES_MAX:
            work.close()
            return
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _send(self, to: NodeKey, message: Contract) -> None:
        me = self._port.me.key
        if to == me:
            self._loop.call_soon(self.received, me, message)
        else:
            self._port.send(to, message)

    # ---- the machine

    def _put(self, event: g.Event) -> None:
        try:
            actions = self._gate.handle(event, now_ns=time.monotonic_ns())
            self._gate.check_invariants()
            for action in actions:
                self._perform(action)
        except Exception as error:  # noqa: BLE001 (given to whoever awaits the node's end)
            self._fails(error)

    def _perform(self, action: g.Action) -> None:
        match action:
            case g.MeasureHosts(number=number, hosts=hosts, kept=kept):
                for key in hosts:
                    self._send(key, MeasureWanted(survey=number, kept=False))
                for key in kept:
                    self._send(key, MeasureWanted(survey=number, kept=True))
            case g.MeasureLinks(number=number, pairs=pairs):
                for one, other in pairs:
                    self._send(other, ProbeWanted(survey=number, by=one))
            case g.Judge(hosts=hosts, stops=stops):
                self._port.command(HostsChecked(job=self._job, hosts=hosts, stops=stops))
            case g.Report(text=text):
                self._say(text)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
                self._timer = self._loop.call_later(delay_s, self._put, TimerFired())
            case _:
                assert_never(action)

    # ---- measurements

    async def _measure_host(self, asker: NodeKey, wanted: MeasureWanted) -> None:
        host = self._host
        if host is None:
            problem = "its node was started without --preflight"
            self._send(asker, HostReport(survey=wanted.survey, problem=problem, speed=None))
            return
        async with self._measuring:
            if not wanted.kept:
                ran, self._ran = self._ran, False
                await asyncio.to_thread(host.measure, ran_since=ran)
        speed = OwnSpeed(host.speed.flops_per_s, host.speed.memory_per_s)
        problem = "" if wanted.kept else host.problem[:TEXT_CHARS_MAX]
        self._send(asker, HostReport(survey=wanted.survey, problem=problem, speed=speed))

    async def _be_measured(self, asker: NodeKey, wanted: ProbeWanted) -> None:
        try:
            listener = socket.create_server((self._listen_host, 0), family=_family(self._listen_host))
        except OSError:
            return  # the survey says that this host does not answer
        token = secrets.token_bytes(TOKEN_BYTES)
        port: int = listener.getsockname()[1]
        self._send(wanted.by, ProbeAt(survey=wanted.survey, asker=asker, port=port, token=token))
        with contextlib.suppress(OSError):
            await asyncio.to_thread(serve_probe, listener, token)

    async def _measure_link(self, sender: NodeKey, at: ProbeAt) -> None:
        there = next((node for node in self._port.view.nodes if node.key == sender), None)
        if there is None:
            return
        host = parse_address(there.address).host
        found = await asyncio.to_thread(probe, (host, at.port), at.token)
        problem = found if isinstance(found, str) else ""
        link = s.LinkSpeed(bytes_per_s=0.0, trip_ns=0) if isinstance(found, str) else found
        done = ProbeDone(
            survey=at.survey,
            to=sender,
            bytes_per_s=link.bytes_per_s,
            trip_ns=link.trip_ns,
            problem=problem[:TEXT_CHARS_MAX],
        )
        self._send(at.asker, done)


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
