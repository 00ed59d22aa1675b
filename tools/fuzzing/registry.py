"""All targets, and of every module that decodes: which targets reach it, or why none need to.

`tests/repo/test_decoders.py` finds the decoders in the sources, so that none is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zbmd.tools.fuzzing import (
    actors,
    arrays,
    bootstraps,
    bulks,
    captures,
    cluster,
    collectives,
    devices,
    files,
    hangs,
    links,
    memories,
    pipelines,
    profiles,
    rdma,
    streams,
    wires,
)
from zbmd.tools.fuzzing.target import Target
from zbmd.transport.errors import UserError

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for module in (
        *(wires, streams, bulks, memories, links, actors, hangs, cluster, rdma, devices),
        *(collectives, captures, files, bootstraps, pipelines, profiles, arrays),
    )
    for target in module.TARGETS
}

DECODERS: Final[Mapping[str, tuple[str, ...]]] = {
    "transport/attach.py": ("attach.message", "link.handover"),
    "transport/frame_loans.py": ("link.standing",),
    "transport/frames.py": ("frames.header", "frames.frame"),
    "transport/scattered.py": ("wire.pieces",),
    "transport/hello.py": ("hello.stream", "hello.identity"),
    "transport/session_setup.py": ("session.setup",),
    "transport/shm.py": ("link.handover",),
    "transport/shm_link.py": ("link.standing",),
    "transport/_native.pyx": ("ring", "segment", "region.handle"),
    "transport/region.py": ("region.handle",),
    "transport/secure_stream.py": ("stream.plain", "stream.keyed"),
    "transport/tcp_address.py": ("tcp.address",),
    "transport/tcp_settings.py": ("options",),
    "transport/topology/netlink.py": ("netlink",),
    "transport/segment.py": ("segment",),
    "transport/rdma_flow.py": ("rdma.messages",),
    "transport/rdma_setup.py": ("rdma.setup",),
    "transport/cuda_handle.py": ("device.handle",),
    "transport/bulk_arrivals.py": ("bulk.peer",),
    "transport/bulk_machine.py": ("bulk.peer",),
    "transport/_quick.pyx": ("bulk.quick",),
    "transport/bulk_quick.py": ("bulk.quick",),
    "transport/bulk_records.py": ("bulk.record",),
    "transport/bulk_stream.py": ("bulk.peer",),
    "transport/cookie.py": ("cookie",),
    "transport/durations.py": ("options",),
    "transport/faults.py": ("faults",),
    "transport/hello_kind.py": ("replay.machines",),
    "transport/sim/faults.py": ("sim.faults",),
    "transport/sim/scenario.py": ("sim.faults",),
    "transport/capture/codec.py": ("replay.machines",),
    "transport/capture/format.py": ("capture.file", "capture.records"),
    "transport/capture/index.py": ("capture.body",),
    "transport/capture/reader.py": ("capture.file", "capture.body"),
    "transport/capture/records.py": ("capture.records",),
    "transport/capture/replay.py": ("replay.machines",),
    "transport/capture/state.py": ("replay.state",),
    "transport/capture/story.py": ("capture.records", "replay.machines"),
    "transport/capture/text.py": ("capture.text",),
    "actors/actor_arguments.py": ("arguments",),
    "actors/actor_replay.py": ("replay.machines",),
    "actors/bootstrap/etcd_client.py": ("etcd.reply",),
    "actors/bootstrap/etcd_url.py": ("etcd.url", "etcd.record"),
    "actors/bootstrap/hostlist.py": ("hostlist",),
    "actors/bootstrap/merge.py": ("bootstrap.environment",),
    "actors/capture_kinds.py": ("replay.machines",),
    "actors/_heartbeat.pyx": ("cluster.beats",),
    "actors/cluster/cluster_kinds.py": ("replay.machines",),
    "actors/cluster/cluster_contracts.py": ("cluster.message", "cluster.machine"),
    "actors/cluster/node_state.py": ("node.state",),
    "actors/contracts.py": ("contracts.message", "wire.envelope"),
    "actors/hang_collector.py": ("hang.packet",),
    "actors/hang_wire.py": ("hang.packet",),
    "actors/watchdog.py": ("hang.packet",),
    "actors/host_contracts.py": ("host.report",),
    "actors/host_output.py": ("host.output",),
    "actors/host_template.py": ("template.packet",),
    "actors/runtime_env.py": ("options",),
    "actors/template.py": ("template.packet",),
    "actors/wire.py": ("wire.envelope", "wire.pieces", "peer.conversation"),
    "collectives/priority_turns.py": ("priority.told",),
    "collectives/repair_adoption.py": ("repair.record",),
    "collectives/repair_estate.py": ("repair.record",),
    "collectives/repair_uneven_jobs.py": ("repair.record",),
    "collectives/repair_wire.py": ("repair.report",),
    "collectives/elastic_splits.py": ("elastic.splits",),
    "collectives/commit_wire.py": ("commit.conversation",),
    "collectives/flight_dump.py": ("flight.dump",),
    "collectives/tagged.py": ("tagged.messages", "tagged.elastic"),
    "collectives/executor.py": ("collective.descriptor",),
    "collectives/_stepper.pyx": ("collective.descriptor",),
    "collectives/program.py": ("program",),
    "training/pipeline/program.py": ("pipeline",),
    "training/pipeline/rings.py": ("pipeline.rings",),
    "training/ml_actors/arrays.py": ("array",),
    "training/ml_actors/layer_actor.py": ("array",),
    "training/ml_actors/tensor_actor.py": ("array",),
    "training/profiler/lines.py": ("profile.lines",),
    "training/tensor/records.py": ("metrics.tail",),
    "training/profiler/peak.py": ("profile.peaks",),
    "training/profiler/ring.py": ("profile.spans",),
    "training/checkpoint.py": ("checkpoint",),
    "training/shard_files.py": ("checkpoint.names", "checkpoint.shard"),
    "training/corpus.py": ("corpus",),
    "training/journal.py": ("commit.part",),
    "training/ledger.py": ("ledger",),
    "training/token_corpus.py": ("tokens",),
    "training/tokens.py": ("tokenizer",),
    "training/hugging_face.py": ("gpt2.config", "gpt2.weights"),
    "training/weights.py": ("weights",),
    "training/workload.py": ("commit.handle",),
    "training/zero/state_file.py": ("zero.state",),
    "training/plan.py": ("ledger.plan",),
    "training/repeated.py": ("memory.note",),
    "tools/node_token.py": ("node.token",),
    "tools/plot_metrics.py": ("metrics",),
    "tools/replay_players.py": ("replay.command",),
    "tools/replay_story.py": ("replay.command",),
    "tools/replay_trace.py": ("replay.command",),
    "tools/run_result.py": ("result",),
    "tools/settings.py": ("settings.toml", "options"),
}
"""Module to the targets that reach what it decodes."""

EXEMPT: Final[Mapping[str, str]] = {
    "transport/bulk_lane.py": "receives into where the reader of bulk_stream.py says, and decodes nothing",
    "actors/actor.py": "makes a number of random bytes of its own",
    "actors/actor_capture.py": "makes a number of random bytes of its own",
    "actors/pools.py": "reads what a worker that it has started itself answers, within a bound",
    "actors/device_worker.py": "reads the cookie that the process that has started it writes, within a bound",
    "actors/pool_worker.py": "reads what the process that has started it asks, within a bound",
    "actors/supervision_events.py": "makes a number of a digest of its own settings",
    "collectives/peer_reading.py": "compares a number of its own with the bytes that it reads",
    "collectives/remote_executor.py": "copies a descriptor of its own",
    "collectives/group.py": "hands on what tagged.py has decoded",
    "collectives/torch_backend_group.py": "hands on what tagged.py has decoded",
    "collectives/layout.py": "makes a number of a digest of its own numbers",
    "actors/system.py": "makes a number of a digest of its own name",
    "tools/node_run_many.py": "makes a number of a digest of a name",
    "training/tensor/options.py": "reads the recipe that the command that started it has made",
    "training/tensor/relay.py": "takes arrays that tagged.py has decoded",
    "training/overhead.py": "reads what runs that it has started have printed",
    "tools/small_job.py": "reads what a run that it has started itself has written",
    "tools/kill_*.py": "read what runs that they have started, or sweeps before them, have written",
    "transport/staging.py": "reads one number, and compares it with the one that is expected",
    "transport/byte_socket.py": "moves bytes to whoever decodes them",
    "transport/silence.py": "reads what the kernel tells of its own socket",
    "transport/lane_use.py": "reads what the kernel tells of its own socket",
    "transport/tcp_congestion.py": "reads what the kernel tells of its own socket",
    "transport/bulk_lanes.py": "reads what the kernel tells of its own socket and settings",
    "tools/bench*.py": "reads what processes that it has started itself tell of their times",
    "tools/gpu_check_*.py": "read what processes that they have started themselves write",
    "tools/peers/*.py": "are other systems' programs, run beside ours for comparison",
    "tools/demo_hosts*.py": "reads the lines of processes that it has started itself",
    "tools/netns_switch.py": "reads what the laboratory that has started it says",
    "tools/demo.py": "reads the last line of a command that it has just run itself",
    "tools/sim_hunt.py": "reads the lines of workers that are forks of itself",
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
