"""Deterministic simulation: one seed, one history. Shipped for whoever builds on zbmd, as `trio.testing` is.

The code that runs in production runs here, on virtual time, in a world that misbehaves on request: messages
are late, lost, doubled and reordered, links are cut, processes crash, stall and restart, clocks are wrong,
disks lose what was not synced. Everything random comes from the seed, so a failure is a number to pass on.

Three entrances, from the smallest:

**A loop.** `SimLoop` is an asyncio event loop whose clock jumps to the next timer when nothing can run:

    with asyncio.Runner(loop_factory=lambda: SimLoop(seed=7)) as runner:
        runner.run(my_test())        # sleeps for an hour in no time; a deadlock is an error, with stacks

**Programs.** A `World` runs ordinary asyncio code as several processes. Each has a network, a disk, memory,
and links that an `ActorSystem` takes as it takes real ones:

    async def server(process: SimProcess) -> None:
        system = ActorSystem(process.name, process.incarnation)
        await system.spawn(Counter, name="counter")
        process.listen(system.attach, contracts=fingerprints())
        await asyncio.Event().wait()

    async def client(process: SimProcess) -> None:
        system = ActorSystem(process.name, process.incarnation)
        system.attach(await process.dial("rank0", contracts=fingerprints()))
        total = await system.ref("rank0/counter").ask(Add(1), timeout=1.0)
        process.note(total)

    with World(seed) as world:
        world.add("rank0", server)
        world.add("rank1", client)
        world.apply(Crash(process="rank0", at_ns=15_000_000, for_ns=1_000_000))
        world.add_checker("totals only grow", lambda: ...)
        world.run(until=lambda: ...)

**Machines.** A `Simulation` drives sans-I/O machines alone, a few hundred thousand events a second. A process
is anything with `deliver(stimulus, now_ns=) -> effects`; `MachineProcess` makes one of a machine and two
small functions:

    def node(incarnation: int) -> Process[Msg]:
        return MachineProcess(CommitMachine(...), to_events=..., to_effects=...)

    sim = Simulation[Msg](seed, conditions=Conditions(loss=0.01))
    for name in names:
        sim.add(name, node)
    sim.add_checker("agreement", lambda: ...)
    sim.run(until=lambda: all(...))

Over both stands the frame of a `Scenario`: `run_scenario` draws a `FaultPlan` from the seed, checks safety
while it strikes, heals a random core and asks for liveness; `shrink` makes a failing run small, and its
report prints the command line that repeats it. After FoundationDB's simulation and TigerBeetle's VOPR.
"""

from __future__ import annotations

from zbmd.transport.sim.faults import ALL_FAULTS as ALL_FAULTS
from zbmd.transport.sim.faults import NETWORK_FAULTS as NETWORK_FAULTS
from zbmd.transport.sim.faults import PROCESS_FAULTS as PROCESS_FAULTS
from zbmd.transport.sim.faults import WORLD_FAULTS as WORLD_FAULTS
from zbmd.transport.sim.faults import Clog as Clog
from zbmd.transport.sim.faults import Crash as Crash
from zbmd.transport.sim.faults import CrashWithin as CrashWithin
from zbmd.transport.sim.faults import Cut as Cut
from zbmd.transport.sim.faults import DiskFull as DiskFull
from zbmd.transport.sim.faults import DiskReadErrors as DiskReadErrors
from zbmd.transport.sim.faults import DiskSlow as DiskSlow
from zbmd.transport.sim.faults import Fault as Fault
from zbmd.transport.sim.faults import FaultPlan as FaultPlan
from zbmd.transport.sim.faults import MemoryLimit as MemoryLimit
from zbmd.transport.sim.faults import NetConditions as NetConditions
from zbmd.transport.sim.faults import Partition as Partition
from zbmd.transport.sim.faults import Pause as Pause
from zbmd.transport.sim.faults import Skew as Skew
from zbmd.transport.sim.faults import Slow as Slow
from zbmd.transport.sim.faults import TornWrites as TornWrites
from zbmd.transport.sim.faults import UnsupportedFault as UnsupportedFault
from zbmd.transport.sim.faults import draw_plan as draw_plan
from zbmd.transport.sim.faults import format_plan as format_plan
from zbmd.transport.sim.faults import names_of as names_of
from zbmd.transport.sim.faults import parse_fault as parse_fault
from zbmd.transport.sim.faults import parse_plan as parse_plan
from zbmd.transport.sim.links import SimLink as SimLink
from zbmd.transport.sim.loop import SimLoop as SimLoop
from zbmd.transport.sim.machines import Simulation as Simulation
from zbmd.transport.sim.model import SIM_START_NS as SIM_START_NS
from zbmd.transport.sim.model import Arrived as Arrived
from zbmd.transport.sim.model import CancelTimer as CancelTimer
from zbmd.transport.sim.model import Commanded as Commanded
from zbmd.transport.sim.model import Conditions as Conditions
from zbmd.transport.sim.model import Deadlock as Deadlock
from zbmd.transport.sim.model import Effect as Effect
from zbmd.transport.sim.model import Exit as Exit
from zbmd.transport.sim.model import FailureKind as FailureKind
from zbmd.transport.sim.model import History as History
from zbmd.transport.sim.model import HistoryKind as HistoryKind
from zbmd.transport.sim.model import Kill as Kill
from zbmd.transport.sim.model import KillPoint as KillPoint
from zbmd.transport.sim.model import Livelock as Livelock
from zbmd.transport.sim.model import MachineProcess as MachineProcess
from zbmd.transport.sim.model import Note as Note
from zbmd.transport.sim.model import NotSimulated as NotSimulated
from zbmd.transport.sim.model import PeerEnded as PeerEnded
from zbmd.transport.sim.model import Process as Process
from zbmd.transport.sim.model import RunEnd as RunEnd
from zbmd.transport.sim.model import Send as Send
from zbmd.transport.sim.model import SetTimer as SetTimer
from zbmd.transport.sim.model import SimulationFailure as SimulationFailure
from zbmd.transport.sim.model import Start as Start
from zbmd.transport.sim.model import Started as Started
from zbmd.transport.sim.model import Stimulus as Stimulus
from zbmd.transport.sim.model import TimerFired as TimerFired
from zbmd.transport.sim.process import current_process as current_process
from zbmd.transport.sim.scenario import Options as Options
from zbmd.transport.sim.scenario import RunOutcome as RunOutcome
from zbmd.transport.sim.scenario import Scenario as Scenario
from zbmd.transport.sim.scenario import ScenarioReport as ScenarioReport
from zbmd.transport.sim.scenario import ScenarioStage as ScenarioStage
from zbmd.transport.sim.scenario import SimulatedWorld as SimulatedWorld
from zbmd.transport.sim.scenario import admitted as admitted
from zbmd.transport.sim.scenario import parse_faults as parse_faults
from zbmd.transport.sim.scenario import run_scenario as run_scenario
from zbmd.transport.sim.scenario import shrink as shrink
from zbmd.transport.sim.storage import SimDisk as SimDisk
from zbmd.transport.sim.world import Program as Program
from zbmd.transport.sim.world import SimProcess as SimProcess
from zbmd.transport.sim.world import World as World
