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

from zbmd.transport.sim.faults import (
    ALL_FAULTS,
    NETWORK_FAULTS,
    PROCESS_FAULTS,
    WORLD_FAULTS,
    Clog,
    Crash,
    CrashWithin,
    Cut,
    DiskFull,
    DiskReadErrors,
    DiskSlow,
    Fault,
    FaultPlan,
    MemoryLimit,
    NetConditions,
    Partition,
    Pause,
    Skew,
    Slow,
    TornWrites,
    UnsupportedFault,
    draw_plan,
    format_plan,
    names_of,
    parse_fault,
    parse_plan,
)
from zbmd.transport.sim.links import SimLink
from zbmd.transport.sim.loop import SimLoop
from zbmd.transport.sim.machines import Simulation
from zbmd.transport.sim.model import (
    SIM_START_NS,
    Arrived,
    CancelTimer,
    Commanded,
    Conditions,
    Deadlock,
    Effect,
    Exit,
    FailureKind,
    History,
    HistoryKind,
    Kill,
    KillPoint,
    Livelock,
    MachineProcess,
    Note,
    NotSimulated,
    PeerEnded,
    Process,
    RunEnd,
    Send,
    SetTimer,
    SimulationFailure,
    Start,
    Started,
    Stimulus,
    TimerFired,
)
from zbmd.transport.sim.process import current_process
from zbmd.transport.sim.scenario import (
    Options,
    RunOutcome,
    Scenario,
    ScenarioReport,
    ScenarioStage,
    SimulatedWorld,
    admitted,
    parse_faults,
    run_scenario,
    shrink,
)
from zbmd.transport.sim.storage import SimDisk
from zbmd.transport.sim.world import Program, SimProcess, World

__all__ = [
    "ALL_FAULTS",
    "WORLD_FAULTS",
    "Arrived",
    "CancelTimer",
    "Clog",
    "Commanded",
    "Conditions",
    "Crash",
    "CrashWithin",
    "Cut",
    "Deadlock",
    "DiskFull",
    "DiskReadErrors",
    "DiskSlow",
    "Effect",
    "Exit",
    "FailureKind",
    "Fault",
    "FaultPlan",
    "History",
    "Kill",
    "KillPoint",
    "HistoryKind",
    "Livelock",
    "MachineProcess",
    "MemoryLimit",
    "NETWORK_FAULTS",
    "NetConditions",
    "NotSimulated",
    "Note",
    "Options",
    "RunOutcome",
    "PROCESS_FAULTS",
    "Partition",
    "Pause",
    "PeerEnded",
    "Process",
    "Program",
    "ScenarioReport",
    "RunEnd",
    "SIM_START_NS",
    "Scenario",
    "Send",
    "SetTimer",
    "SimDisk",
    "SimLink",
    "SimLoop",
    "SimProcess",
    "SimulatedWorld",
    "Simulation",
    "SimulationFailure",
    "Skew",
    "Slow",
    "ScenarioStage",
    "Start",
    "Started",
    "Stimulus",
    "TimerFired",
    "TornWrites",
    "UnsupportedFault",
    "World",
    "current_process",
    "admitted",
    "draw_plan",
    "format_plan",
    "names_of",
    "parse_fault",
    "parse_faults",
    "parse_plan",
    "run_scenario",
    "shrink",
]
