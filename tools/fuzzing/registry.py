"""All targets, and of every module that decodes: which targets reach it, or why none need to.

`tests/repo/test_decoders.py` finds the decoders in the sources, so that none is forgotten.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Final

from zbmd.tools.fuzzing import targets
from zbmd.tools.fuzzing.target import Target, registered
from zbmd.transport.errors import UserError

for _module in pkgutil.iter_modules(targets.__path__, f"{targets.__name__}."):
    importlib.import_module(_module.name)

TARGETS: Final[Mapping[str, Target]] = dict(sorted(registered.items()))

DECODERS: Final[Mapping[str, tuple[str, ...]]] = {
    "transport/shm/attach.py": ("attach.message", "link.handover"),
    "transport/memory/frame_loans.py": ("link.standing",),
    "transport/frames.py": ("frames.header", "frames.frame"),
    "transport/memory/scattered.py": ("wire.pieces",),
    "transport/handshake/hello.py": ("hello.stream", "hello.identity"),
    "transport/handshake/session_setup.py": ("session.setup",),
    "transport/shm/connect.py": ("link.handover",),
    "transport/shm/link.py": ("link.standing",),
    "transport/native/_native.pyx": ("ring", "segment", "region.handle"),
    "transport/memory/region.py": ("region.handle",),
    "transport/secure/record_stream.py": ("stream.plain", "stream.keyed"),
    "transport/tcp/address.py": ("tcp.address", "options"),
    "transport/host/topology/interfaces.py": ("netlink",),
    "transport/memory/kept.py": ("memory.kept",),
    "transport/memory/segment.py": ("segment",),
    "transport/rdma/credit.py": ("rdma.messages",),
    "transport/rdma/setup.py": ("rdma.setup",),
    "transport/cuda/array.py": ("device.handle",),
    "transport/bulk/transfers.py": ("bulk.peer",),
    "transport/bulk/machine.py": ("bulk.peer",),
    "transport/bulk/_fast_path.pyx": ("bulk.quick",),
    "transport/bulk/fast_path.py": ("bulk.quick",),
    "transport/bulk/records.py": ("bulk.record",),
    "transport/bulk/stream.py": ("bulk.peer",),
    "transport/handshake/cookie.py": ("cookie",),
    "transport/clock/deadlines.py": ("options",),
    "transport/kill_points.py": ("faults",),
    "transport/handshake/driver.py": ("replay.machines",),
    "transport/sim/faults.py": ("sim.faults",),
    "transport/sim/scenario.py": ("sim.faults",),
    "transport/capture/codec.py": ("replay.machines",),
    "transport/capture/format.py": ("capture.file", "capture.records"),
    "transport/capture/reader.py": ("capture.file", "capture.body"),
    "transport/capture/records.py": ("capture.records",),
    "transport/capture/registry.py": ("replay.state",),
    "transport/capture/replay.py": ("capture.records", "replay.machines"),
    "transport/capture/files.py": ("capture.text",),
    "actors/replay/traced.py": ("arguments",),
    "actors/replay/machine.py": ("replay.machines",),
    "actors/bootstrap/etcd_client.py": ("etcd.reply", "etcd.url", "etcd.record"),
    "actors/bootstrap/hostlist.py": ("hostlist",),
    "actors/bootstrap/attached/messages.py": ("attached.message",),
    "actors/bootstrap/attached/supervisor.py": ("attached.message",),
    "actors/bootstrap/attached/client.py": ("attached.message",),
    "actors/snapshots/messages.py": ("snapshots.message",),
    "actors/snapshots/holder.py": ("snapshots.message",),
    "actors/snapshots/client.py": ("snapshots.message",),
    "actors/snapshots/keeper.py": ("snapshots.message",),
    "actors/bootstrap/merge.py": ("bootstrap.environment",),
    "actors/directory/machine.py": ("replay.machines",),
    "actors/supervision/machine.py": ("replay.machines",),
    "actors/cluster/heartbeats/_heartbeat.pyx": ("cluster.beats",),
    "actors/cluster/membership/capture_kind.py": ("replay.machines",),
    "actors/cluster/contracts.py": ("cluster.message", "cluster.machine"),
    "actors/cluster/node/persistent_state.py": ("node.state",),
    "actors/contracts.py": ("contracts.message", "wire.envelope"),
    "actors/hangs/collector.py": ("hang.packet",),
    "actors/hangs/wire.py": ("hang.packet",),
    "actors/hangs/watchdog.py": ("hang.packet",),
    "actors/rank/host_contracts.py": ("host.report",),
    "actors/process/output.py": ("host.output",),
    "actors/process/template_client.py": ("template.packet",),
    "actors/rank/environment.py": ("options",),
    "actors/process/template.py": ("template.packet",),
    "actors/core/wire.py": ("wire.envelope", "wire.pieces", "peer.conversation"),
    "collectives/group/priority_driver.py": ("priority.told",),
    "collectives/repair/adoption.py": ("repair.record",),
    "collectives/repair/operations_per_rank.py": ("repair.record",),
    "collectives/repair/wire.py": ("repair.report",),
    "collectives/repair/splits.py": ("elastic.splits",),
    "collectives/group/flight_dump.py": ("flight.dump",),
    "collectives/p2p/tagged.py": ("tagged.messages", "tagged.elastic"),
    "collectives/execution/executor.py": ("collective.descriptor",),
    "collectives/native/_messages.pyx": ("collective.message",),
    "collectives/native/_stepper.pyx": ("collective.descriptor",),
    "collectives/programs/program.py": ("program",),
    "training/pipeline/program.py": ("pipeline",),
    "training/pipeline/rings.py": ("pipeline.rings",),
    "training/model_actors/actors.py": ("array",),
    "training/profiler/announcements.py": ("profile.announcements",),
    "training/profiler/lines.py": ("profile.lines",),
    "training/job/records.py": ("metrics.tail",),
    "training/profiler/peak.py": ("profile.peaks",),
    "training/profiler/ring.py": ("profile.spans",),
    "training/checkpoint/formats/tensors.py": ("formats.meta",),
    "training/checkpoint/formats/safetensors_folder.py": ("formats.safetensors",),
    "training/checkpoint/blocks.py": ("checkpoint.shard",),
    "training/checkpoint/index.py": ("checkpoint.names",),
    "training/checkpoint/sharded.py": ("checkpoint.names", "checkpoint.shard"),
    "training/data/corpus.py": ("corpus",),
    "training/data/sources.py": ("data.record",),
    "training/run/ledger.py": ("ledger",),
    "training/data/token_corpus.py": ("tokens",),
    "training/data/tokenizers.py": ("tokenizer",),
    "training/model/hugging_face.py": ("gpt2.config", "gpt2.index", "gpt2.weights"),
    "training/model/weights.py": ("weights",),
    "training/redundancy/stamped.py": ("zero.state",),
    "training/redundancy/state_file.py": ("zero.state",),
    "training/checkpoint/held/messages.py": ("held.message",),
    "training/checkpoint/held/line.py": ("held.message",),
    "training/checkpoint/held/service.py": ("held.message",),
    "training/checkpoint/plan.py": ("ledger.plan", "ledger.task"),
    "training/run/loop_steps.py": ("ledger.loop",),
    "training/job/explained.py": ("memory.note",),
    "tools/node/guard/guards.py": ("guard.message",),
    "tools/node/guard/messages.py": ("guard.message",),
    "tools/node/up.py": ("node.token",),
    "tools/runs/plot_data.py": ("metrics",),
    "tools/replay/players.py": ("replay.command",),
    "tools/replay/story.py": ("replay.command",),
    "tools/replay/trace.py": ("replay.command",),
    "tools/runs/result.py": ("result",),
    "tools/cli/settings.py": ("settings.toml", "options"),
}
"""Module to the targets that reach what it decodes."""

EXEMPT: Final[Mapping[str, str]] = {
    "tools/runs/snapshots.py": "reads the recipe that the run has written",
    "tools/telemetry/ingest.py": "reads records of a run; test_database.py gives it damaged ones",
    "training/job/checkpoints.py": "makes a number of a digest of its own",
    "transport/bulk/stripe_io.py": "receives for the reader of stream.py, asks the kernel of its own socket",
    "actors/core/actor.py": "makes a number of random bytes of its own",
    "actors/replay/recording.py": "makes a number of random bytes of its own",
    "actors/process_pool/device_worker.py": "reads the cookie that its parent process writes, within a bound",
    "actors/core/pools.py": "reads what a pool and its own processes send to each other, within a bound",
    "actors/supervision/events.py": "makes a number of a digest of its own settings",
    "collectives/communicator/group_trials.py": "compares a number of its own with the bytes that it reads",
    "collectives/execution/remote_executor.py": "copies a descriptor of its own",
    "collectives/group/group.py": "hands on what tagged.py has decoded",
    "collectives/group/subgroup_driver.py": "makes a number of bytes of a fixed length, in a contract",
    "collectives/torch/rendezvous.py": "reads an address that a member of its own job has written",
    "collectives/torch/continuity.py": "needs PyTorch: test_encoding.py gives it any bytes",
    "collectives/torch/barrier.py": "receives tensors by the methods of a process group",
    "collectives/torch/flights.py": "reads the dump that PyTorch makes of its own calls",
    "collectives/torch/functions.py": "hands receives on to a process group",
    "tools/lab/torch_suite/*.py": "read what processes that they have started themselves write",
    "training/torch/*.py": "need PyTorch: test_encoding.py gives them any bytes",
    "training/scenarios/world.py": "makes a number of a digest of its own numbers",
    "collectives/programs/layout.py": "makes a number of a digest of its own numbers",
    "actors/core/system.py": "makes a number of a digest of its own name",
    "actors/bootstrap/one_job_node.py": "makes a number of a digest of a name",
    "training/sharded/options.py": "reads the recipe that the command that started it has made",
    "training/sharded/norm.py": "takes arrays that tagged.py has decoded",
    "tools/demo/overhead.py": "reads what runs that it has started have printed",
    "tools/chaos/*.py": "read what runs that they have started, or sweeps before them, have written",
    "transport/memory/staging.py": "reads one number, and compares it with the one that is expected",
    "transport/host/process.py": "reads what the kernel reports on its own socket",
    "transport/host/tcp_silence.py": "reads what the kernel reports on its own socket",
    "transport/tcp/sockets.py": "reads what the kernel reports on its own socket",
    "tools/bench/*.py": "reads what processes that it has started itself tell of their times",
    "tools/lab/bench/*.py": "read what processes that they have started themselves tell of their times",
    "tools/lab/gpu/*.py": "read what processes that they have started themselves write",
    "tools/bench/peers/*.py": "are other systems' programs, run beside ours for comparison",
    "tools/lab/hosts/*.py": "read the lines of processes that they have started themselves",
    "tools/lab/hosts/switch.py": "reads what the laboratory that has started it says",
    "tools/dev/*.py": "read files of the repository",
    "tools/demo/command.py": "reads the last line of a command that it has just run itself",
    "tools/sim/hunt.py": "reads the lines of workers that are forks of itself",
    "tools/fuzzing/*.py": "makes what is decoded",
}
"""Modules, as patterns, that decode and need no target, and why."""


def find(name: str) -> tuple[Target, ...]:
    """The target of that name, or all whose names begin with it. Raises `UserError` if there is none."""
    if name in TARGETS:
        return (TARGETS[name],)
    found = tuple(target for target in TARGETS.values() if target.name.startswith(f"{name}."))
    if not found:
        raise UserError(f"there is no fuzz target {name!r}. There are: {', '.join(TARGETS)}.")
    return found
