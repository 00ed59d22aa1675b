"""The driver of a survey, on each node of a run: it sends what the machine wants, and measures links.

The node that gives the job to the cluster surveys first. Of a pair it asks one node to be measured
(`ProbeWanted`), which tells the other one where (`ProbeAt`), which tells the result (`ProbeDone`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Final

import msgspec

from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.port import ClusterPort
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.contracts import Contract
from zbmd.tools.node.preflight import survey as s
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
    speed: OwnSpeed | None


class ProbeDone(Contract, id="zbmd.preflight.probe_done"):
    """The link from the sender to `to`. problem: why it could not be measured; empty if it was."""

    survey: _Number
    to: NodeKey
    bytes_per_s: _Speed
    trip_ns: _Number
    problem: _Text
    speed: OwnSpeed | None
    speed_there: OwnSpeed | None


class Excluded(Contract, id="zbmd.preflight.excluded"):
    """The receiver's host is not to take part."""

    reason: _Text


class HostSurvey:
    """This node's part in surveys. speed: of this host; listen_host: where its ranks would listen.

    excluded: is called with the reason if this host is not to take part.
    """

    def __init__(
        self, port: ClusterPort, listen_host: str, speed: OwnSpeed | None, excluded: Callable[[str], None]
    ) -> None:
        self._port, self._listen_host, self._speed, self._excluded = port, listen_host, speed, excluded
        self._loop = asyncio.get_running_loop()
        self._work: set[asyncio.Task[None]] = set()
        self._machine: s.LinkSurvey | None = None
        self._number = 0
        self._nodes: tuple[Node, ...] = ()
        self._done: asyncio.Future[s.Surveyed] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.seen = asyncio.Event()
        """Set at each view that the node acts on."""

    async def leave_good(self, nodes_min: int, say: Callable[[str], None]) -> None:
        """Return once there are so many members, and all of them were measured and are good.

        Bad hosts are asked to leave. A node that comes meanwhile is measured with the others.
        """
        surveyed: set[NodeKey] = set()
        told: set[NodeKey] = set()
        while True:
            self.seen.clear()
            nodes = [node for node in self._port.view.nodes if node.key not in told]
            if len(nodes) == len(self._port.view.nodes) >= nodes_min:
                if len(nodes) < 2 or surveyed.issuperset(node.key for node in nodes):
                    return
                found = await self.survey(nodes)
                for note in found.notes:
                    say(f"preflight: {note}")
                bad = {nodes[one.place].key: one.reason for one in found.bad}
                if not found.usable:
                    bad = {node.key: "no two hosts have a good link" for node in nodes}
                surveyed = {node.key for node in nodes} - bad.keys()
                for node in nodes:
                    if (reason := bad.get(node.key)) is not None:
                        say(f"preflight: {node.name} does not take part: {reason}")
                        told.add(node.key)
                        self.exclude(node, reason)
                if not bad:
                    say(f"preflight: the links between {len(nodes)} hosts are good")
                    continue
            await self.seen.wait()

    async def survey(self, nodes: Sequence[Node]) -> s.Surveyed:
        """Survey the hosts of these nodes."""
        self._nodes, self._number = tuple(nodes), secrets.randbits(62)
        self._machine, self._done = s.LinkSurvey(), self._loop.create_future()
        try:
            self._put(s.Began(hosts=tuple(node.name for node in nodes)))
            return await self._done
        finally:
            self._machine = self._done = None
            if self._timer is not None:
                self._timer.cancel()

    def exclude(self, node: Node, reason: str) -> None:
        """Have a host not take part."""
        self._send(node.key, Excluded(reason=reason[:TEXT_CHARS_MAX]))

    async def close(self) -> None:
        """End what is under way."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def received(self, sender: NodeKey, message: Contract) -> None:
        """Take a message of a member."""
        if not self._port.view.holds(sender):
            return
        match message:
            case ProbeWanted():
                self._begin(self._be_measured(sender, message))
            case ProbeAt():
                self._begin(self._measure(sender, message))
            case ProbeDone(survey=number) if self._machine is not None and number == self._number:
                self._measured(sender, message)
            case Excluded(reason=reason):
                self._excluded(reason)
            case _:
                pass  # of another survey, or for others who listen

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

    # ---- the machine, on the node that gives the job

    def _put(self, event: s.Event) -> None:
        machine, done = self._machine, self._done
        assert machine is not None and done is not None, "a survey is under way"
        for action in machine.handle(event, now_ns=time.monotonic_ns()):
            match action:
                case s.MeasurePairs(pairs=pairs):
                    for one, other in pairs:
                        wanted = ProbeWanted(survey=self._number, by=self._nodes[one].key)
                        self._send(self._nodes[other].key, wanted)
                case SetTimer(at_ns=at_ns):
                    if self._timer is not None:
                        self._timer.cancel()
                    delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
                    self._timer = self._loop.call_later(delay_s, self._fired)
                case s.Surveyed():
                    done.set_result(action)

    def _fired(self) -> None:
        self._put(TimerFired())

    def _measured(self, sender: NodeKey, message: ProbeDone) -> None:
        places = {node.key: place for place, node in enumerate(self._nodes)}
        one, other = places.get(sender), places.get(message.to)
        if one is None or other is None:
            return
        own = {one: message.speed, other: message.speed_there}
        hosts = {
            place: s.HostSpeed(flops_per_s=speed.flops_per_s, memory_per_s=speed.memory_per_s)
            for place, speed in own.items()
            if speed is not None
        }
        speed = s.LinkSpeed(bytes_per_s=message.bytes_per_s, trip_ns=message.trip_ns)
        self._put(s.PairMeasured(pair=(one, other), found=message.problem or speed, hosts=hosts))

    # ---- measurements

    async def _be_measured(self, asker: NodeKey, wanted: ProbeWanted) -> None:
        try:
            listener = socket.create_server((self._listen_host, 0), family=_family(self._listen_host))
        except OSError:
            return  # the survey says that this host does not answer
        token = secrets.token_bytes(TOKEN_BYTES)
        port: int = listener.getsockname()[1]
        at = ProbeAt(survey=wanted.survey, asker=asker, port=port, token=token, speed=self._speed)
        self._send(wanted.by, at)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(serve_probe, listener, token)

    async def _measure(self, sender: NodeKey, at: ProbeAt) -> None:
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
            speed=self._speed,
            speed_there=at.speed,
        )
        self._send(at.asker, done)


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
