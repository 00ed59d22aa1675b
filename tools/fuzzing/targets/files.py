"""Targets of files and texts that people hand us: settings, cookies, checkpoints, logs of runs, options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest

from zbmd.actors.rank.environment import RankEnvironment, host_memory_bytes, parse_arena, parse_size
from zbmd.actors.replay.process_capture import parse_bulk
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    Copy,
    Finish,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
    format_program,
    parse_program,
)
from zbmd.tools.cli import settings
from zbmd.tools.doctor.probes import decode_measured
from zbmd.tools.fuzzing.target import Broken, as_file, file_target, folder, target, text_target
from zbmd.tools.runs.plot_data import picture_of_metrics, read_metrics
from zbmd.tools.runs.profile import slowest_ops, table_of
from zbmd.tools.runs.result import RESULT_NAME, load_result, save_result
from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import SHARDS_FORMAT, SHARDS_NAME, ShardNames
from zbmd.training.checkpoint.parts import PART_FORMAT, HostPart, decode_part
from zbmd.training.checkpoint.plan import TaskPlan, read_plan
from zbmd.training.checkpoint.sharded import Piece, open_state, shard_of
from zbmd.training.config import GPTConfig
from zbmd.training.data.corpus import CORPUS_FILE, Corpus, prepare_corpus
from zbmd.training.data.sources import (
    NEW_RUN,
    RECORD_NAME,
    RunData,
    find_sources,
    settled_sources,
    sources_for,
)
from zbmd.training.data.token_corpus import MANIFEST_NAME, TokenCorpus, prepare_tokens, shard_name
from zbmd.training.data.tokenizers import TOKENIZER_NAME, BPETokenizer
from zbmd.training.job.explained import read_note
from zbmd.training.job.records import last_steps
from zbmd.training.job.stragglers.delays import read_delay
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.model.hugging_face import CONFIG_NAME, load_gpt2, save_gpt2
from zbmd.training.model.hugging_face import WEIGHTS_NAME as GPT2_WEIGHTS_NAME
from zbmd.training.model.weights import load_weights, save_weights
from zbmd.training.optim.mixed_precision import LossScale
from zbmd.training.profiler.lines import (
    IDLE,
    VERSION,
    OpRow,
    OpsLine,
    Overlap,
    RunLine,
    StepLine,
    UnitLine,
    lines_path,
    read_profiles,
    summary_of,
)
from zbmd.training.profiler.peak import MachineDescription, decode_peaks
from zbmd.training.profiler.ring import (
    MAGIC,
    RECORD,
    RING_AT,
    RING_BYTES,
    GroupLine,
    OperationLine,
    decode_ring,
)
from zbmd.training.redundancy.stamped import StateName
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.run.ledger import LOG_FORMAT, CommitLog, CommitRecord, LedgerBroken, LogHeader, read_log
from zbmd.training.run.loop_steps import LoopPlan
from zbmd.transport import kill_points as faults
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import CookieError, load_or_create_cookie
from zbmd.transport.sim import parse_faults
from zbmd.transport.sim.faults import format_plan
from zbmd.transport.tcp.address import parse_address, source_of, tcp_settings

MODEL = GPTConfig(context=4, width=8, heads=2, layers=1)
PLAN = '{"model":{"width":8},"seed":1}'
ELEMENTS = 12
HEADER = LogHeader(format=LOG_FORMAT, run_id="run", base_version=0, plan=PLAN, seed=1)


def _written(name: str, write: Callable[[Path], object]) -> bytes:
    """What `write` makes of the file `name` in a directory of its own."""
    with folder() as made:
        write(made)
        return (made / name).read_bytes()


# ---- settings and secrets


def _settings_seeds() -> tuple[bytes, ...]:
    good = settings.merge({}, {}, None).lines()
    return (
        "\n".join(good).encode(),
        b'nproc-per-node = 4\non-loss = "shrink"\narena = "64MiB"\nrestart_window = "500ms"\n',
        b'max_restarts = 3\ncapture = \'run.zlog\'\ndata = """a\nb"""\n',
    )


@file_target("settings.toml", "a settings file", _settings_seeds, UserError)
def _merge(path: Path) -> None:
    settings.merge({}, {}, path).lines()


@file_target("cookie", "a cookie file", (b"a" * 64 + b"\n", b"!" * 32, b"~" * 1024 + b"\n"), CookieError)
def _cookie(path: Path) -> None:
    cookie = load_or_create_cookie(path)
    if not 32 <= len(cookie) <= 1024:
        raise Broken(f"a cookie of {len(cookie)} bytes")


# ---- what runs leave behind


def _record(version: int) -> CommitRecord:
    return CommitRecord(
        version=version,
        epoch=1,
        members=(0, 1),
        shards={0: (1, 2), 1: (3,)},
        losses={0: 1.5, 1: 2.5},
        rng_key=(1, version - 1),
        digest="00" * 16,
        at_ns=5,
    )


def _append(path: Path, first: int = 1) -> None:
    log = CommitLog(path, HEADER)
    try:
        for version in range(first, first + 3):
            log.append(_record(version))
    finally:
        log.close()


@file_target(
    "ledger",
    "a commit log, read and gone on with",
    lambda: (_written("log", lambda d: _append(d / "log")),),
    UserError,
    LedgerBroken,
)
def _ledger(path: Path) -> None:
    """Read it; then go on with it as a run would, which may not cost a record that could be read."""
    try:
        _, known = read_log(path)
    except UserError:
        known = []
    try:
        _append(path, len(known) + 1)
    except (UserError, LedgerBroken):
        if not known:
            raise
    # By their bytes: a loss may be NaN, which is not even itself.
    if encode(read_log(path)[1][: len(known)]) != encode(known):
        raise Broken("records are gone")


STATE_NAME = StateName(run=7, place=0, ranks=2, elements=ELEMENTS)


@functools.cache
def _state_seeds() -> tuple[bytes, ...]:
    with folder() as made:
        file = StateFile(made, STATE_NAME, again=False)
        for version in (2, 3):
            file.begin(version % 2)
            file.slots[version % 2][:] = version
            file.wrote([file.slots[version % 2]])
            file.written(version % 2, version)
        return (file.path.read_bytes(),)


@file_target(
    "zero.state",
    "the optimizer's state of a rank, in a file",
    _state_seeds,
    UserError,
    file="zero-0-of-2.state",
)
def _state(path: Path) -> None:
    """A replacement finds anything under its predecessor's name: what it takes for whole has its digest."""
    file = StateFile(path.parent, STATE_NAME, again=True)
    for slot, array in enumerate(file.slots):
        file.drop_damaged(slot, [[array]])
        version = file.version_in(slot)
        if version is not None and (
            version % 2 != slot or xxh3_64_intdigest(array.data) != file.digest_in(slot)
        ):
            raise Broken(f"version {version} is taken for whole in slot {slot}")


SHARD_NAME = f"checkpoint-3-{0:016x}-0.safetensors"
SLOTS = ParameterLayout.of({"a": (2, 3), "b": (5,)}).slots


@functools.cache
def _shard_files(codec: Codec = Codec.NONE) -> tuple[bytes, bytes]:
    """Return the file that names the shard of a checkpoint, and the shard."""
    flats = [np.arange(slot.size, dtype=np.float32) for slot in SLOTS]
    pieces = [
        Piece(slot.name, flat_slice(slot.size, 0, slot.size), (flat, flat, flat))
        for slot, flat in zip(SLOTS, flats, strict=True)
    ]
    fragments, header = shard_of(pieces, codec)
    names = ShardNames(
        format=SHARDS_FORMAT,
        version=3,
        plan=PLAN,
        loss_scale=(8.0, 1.0, 2.0),
        files=(SHARD_NAME,),
        headers=(header,),
    )
    return names.encode(), b"".join(fragments)


def _shards(names: bytes, shard: bytes) -> None:
    with as_file(names, SHARDS_NAME) as path:
        (path.parent / SHARD_NAME).write_bytes(shard)
        with contextlib.closing(open_state(path, plan=PLAN)) as state:
            LossScale().read(np.array(state.loss_scale))
            for slot in SLOTS:
                flat = state.parameter("mean", slot)
                if flat.tolist() != list(range(slot.size)):
                    raise Broken(f"{flat} of {slot}")


@functools.cache
def _weights_seeds() -> tuple[bytes, ...]:
    layout = ParameterLayout.of(parameter_shapes(MODEL))
    flat = np.arange(layout.size, dtype=np.float32)
    return (_written("w", lambda d: save_weights(d / "w", flat, MODEL, step=3)),)


@file_target("weights", "a file of weights", _weights_seeds, UserError)
def _weights(path: Path) -> None:
    flat, config, _ = load_weights(path)
    if flat.size != ParameterLayout.of(parameter_shapes(config)).size:
        raise Broken(f"{flat.size} weights for {config}")


@functools.cache
def _gpt2_files() -> tuple[bytes, bytes]:
    """The description and the weights of a small GPT-2."""
    config = GPTConfig(family="gpt2", activation="gelu", vocabulary=5, context=4, width=4, heads=2, layers=1)
    flat = np.arange(ParameterLayout.of(parameter_shapes(config)).size, dtype=np.float32)
    described = _written(CONFIG_NAME, lambda d: save_gpt2(d, flat, config))
    return described, _written(GPT2_WEIGHTS_NAME, lambda d: save_gpt2(d, flat, config))


@target(
    "gpt2.config",
    "the description of a GPT-2 in Hugging Face's layout",
    lambda: (_gpt2_files()[0],),
    UserError,
)
def _gpt2_config(data: bytes) -> None:
    _load_gpt2(data, _gpt2_files()[1])


@target(
    "gpt2.weights", "the weights of a GPT-2 in Hugging Face's layout", lambda: (_gpt2_files()[1],), UserError
)
def _gpt2_weights(data: bytes) -> None:
    _load_gpt2(_gpt2_files()[0], data)


def _load_gpt2(described: bytes, weights: bytes) -> None:
    with as_file(described, CONFIG_NAME) as path:
        (path.parent / GPT2_WEIGHTS_NAME).write_bytes(weights)
        flat, config = load_gpt2(path.parent)
        if flat.size != ParameterLayout.of(parameter_shapes(config)).size:
            raise Broken(f"{flat.size} weights for {config}")


@functools.cache
def _corpus_seeds() -> tuple[bytes, ...]:
    def prepare(directory: Path) -> None:
        (directory / "text").write_bytes(b"some text to train on, long enough. " * 8)
        prepare_corpus(str(directory / "text"), directory, context=4)

    return (_written(CORPUS_FILE, prepare),)


@file_target("corpus", "a prepared corpus", _corpus_seeds, UserError, file=CORPUS_FILE)
def _corpus(path: Path) -> None:
    corpus = Corpus(path, context=4)
    if len(corpus.data) != corpus.header.nbytes:
        raise Broken(f"{len(corpus.data)} bytes of data")


@functools.cache
def _token_files() -> tuple[bytes, bytes, bytes]:
    """A manifest, its one shard of tokens, and their tokenizer."""
    with folder() as made:
        (made / "text").write_bytes(b"some text to train on, long enough. " * 8)
        prepare_tokens(str(made / "text"), made, vocabulary=260, context=4)
        names = (MANIFEST_NAME, shard_name(0), TOKENIZER_NAME)
        manifest, shard, tokenizer = ((made / name).read_bytes() for name in names)
        return manifest, shard, tokenizer


@target("tokens", "a directory of tokens", lambda: (_token_files()[0],), UserError)
def _tokens(data: bytes) -> None:
    with as_file(data, MANIFEST_NAME) as path:
        (path.parent / shard_name(0)).write_bytes(_token_files()[1])
        corpus = TokenCorpus(path.parent, context=4)
        corpus.windows(np.arange(corpus.split.window_count))


@target("tokenizer", "a tokenizer", lambda: (_token_files()[2],), UserError)
def _tokenizer(data: bytes) -> None:
    made = BPETokenizer(data, "the tokenizer")
    if made.separator < 0:
        raise Broken(f"a separator of {made.separator}")


def _result_seeds() -> tuple[bytes, ...]:
    found = {"parameters": 10, "heldout_loss_last": 1.5, "verified": True, "other": [1, {"a": None}]}
    death = b'{"deaths": [{"rank": 1, "incarnation": 1, "step": 3, "epoch": 1, "recovery_ms": 12.5}]}'
    return (_written(RESULT_NAME, lambda d: save_result(d, found, [])), death)


_TASK_PLAN = b'{"task":"Spirals","order":{"examples":2048,"shards":8,"samples":16,"seed":0},"steps":600}'
_PLAN = (
    '{"corpus":"00","model":{"width":8,"heads":2,"layers":1,"context":4,"activation":"gelu"},"reduction":"r",'
    '"training":{"steps":3,"shards":2,"learning_rate":0.001,"seed":1,"optimizer":{"type":"adamw"}}}'
)


# ---- texts


@text_target(
    "options",
    "sizes, times, counts and choices, on the command line and in the environment",
    (b"64MiB", b"1.5 GiB", b"500ms", b"1min", b"3", b"replace", b"digest", b"4096"),
)
def _options(text: str) -> None:
    """Each way to write a number, a size, a time or a choice; one refusal must not hide the next."""
    parsers: tuple[Callable[[str], object], ...] = (
        settings.parse_ranks,
        settings.parse_restarts,
        parse_duration,
        settings.parse_on_loss,
        parse_bulk,
        parse_size,
        parse_arena,
        lambda value: tcp_settings({"ZBMD_PROTECTION": value, "ZBMD_SOCKET_IFNAME": value}),
        lambda value: host_memory_bytes({"ZBMD_HOST_MEMORY": value}),
        lambda value: RankEnvironment.read({**_ENVIRONMENT, "WORLD_SIZE": value}),
        lambda value: RankEnvironment.read({**_ENVIRONMENT, "ZBMD_JOB": value}),
    )
    for parse in parsers:
        try:
            parse(text)
        except UserError:
            continue


@text_target(
    "tcp.address",
    "the address of a listener",
    (b"node1:29400", b"[::1]:29400", b"10.0.0.1:0", b"[fe80::1%eth0]:1", b"*:29400"),
    UserError,
)
def _address(text: str) -> None:
    found = parse_address(text)
    if found.host and parse_address(str(found)) != found:
        raise Broken(f"{found!r} is written {found}")
    if found.is_numeric:
        source_of(found.host)


_ENVIRONMENT = RankEnvironment(rank=0, world_size=1, incarnation=1, job=7, node_address="n").variables()


@text_target(
    "sim.faults",
    "a plan of simulated faults",
    (
        b"crash:process=rank1,at=5ms,for=2ms",
        b"8",
        b"crash:process=rank1,at=1ns,for=1ms;crash:process=rank2,at=2s,for=1us",
    ),
    UserError,
)
def _faults(text: str) -> None:
    found = parse_faults(text)
    if not isinstance(found, int) and parse_faults(format_plan(found)) != found:
        raise Broken(f"{found} is written {format_plan(found)}")


@text_target("faults", "ZBMD_FAULT", (b"rank2:vote.sent,rank1#2:recovery.pull:3+~rank0:a",), UserError)
def _kill_points(text: str) -> None:
    found = faults.parse(text)
    if faults.parse(faults.spelled(found)) != found:
        raise Broken(f"{found}")


def _program_seeds() -> tuple[bytes, ...]:
    a, b = Operand(0, 0, 1), Operand(1, 4, 2)
    program = Program(
        algorithm="ring",
        n=2,
        rank=0,
        blocks=1,
        chunks=2,
        scratch_slots=1,
        inbox_slots=1,
        instructions=(
            Put(1, b, a),
            Notify(1),
            Wait(1, 2),
            Reduce(0, a, a, b),
            Copy(1, a, b),
            Finish(1, a, b),
        ),
    )
    return (format_program(program).encode(),)


@text_target("program", "a collective's program as text", _program_seeds, ProgramError)
def _program(text: str) -> None:
    found = parse_program(text)
    if parse_program(format_program(found)) != found:
        raise Broken(f"{found}")


file_target(
    "metrics.tail",
    "the end of a run's metrics, to go on with",
    (b'{"step":1,"loss":2.5}\n{"step":2.0,"held_out_loss":2.4}\n{"step":3,"lo',),
)(last_steps)
text_target("ledger.plan", "the plan in a commit log", lambda: (_PLAN.encode(),), UserError)(read_plan)
text_target("ledger.task", "the plan of a task of the user's own", lambda: (_TASK_PLAN,))(TaskPlan.read)
text_target(
    "ledger.loop",
    "the plan of a loop of PyTorch",
    lambda: (LoopPlan(loop="AdamW", ranks=2, parameters=10, model="m").text().encode(),),
)(LoopPlan.read)
file_target(
    "memory.note",
    "the note of a rank that ran out of memory",
    (b'{"job":7,"rank":1,"incarnation":1,"step":3}',),
)(read_note)
target(
    "doctor.measured",
    "what the process that measures a host prints",
    lambda: (
        b'{"cpus":[{"cpu":0,"flops_per_s":1e9,"wrong":0}],"memory_per_s":1e9,"disk_per_s":1e8,'
        b'"disk_error":"","loopback_per_s":1e9,"loopback_us":30.0,"clock":true}',
    ),
    UserError,
)(decode_measured)
target("stragglers.delay", "a delay of a rank's batches", lambda: (b'{"delay_ms":30.0}',))(read_delay)
target(
    "checkpoint.part",
    "a host's part of the index of a checkpoint",
    lambda: (HostPart(format=PART_FORMAT, checkpoint="c", headers={0: "0" * 16, 1: ""}).encode(),),
    ValueError,
)(lambda data: decode_part(data, "c"))
target("checkpoint.names", "what names the shards of a checkpoint", lambda: (_shard_files()[0],), UserError)(
    lambda data: _shards(data, _shard_files()[1])
)
target("checkpoint.shard", "a shard of a checkpoint", lambda: (_shard_files()[1],), UserError)(
    lambda data: _shards(_shard_files()[0], data)
)
file_target("result", "the result of a run", _result_seeds, UserError, file=RESULT_NAME)(
    lambda path: load_result(path.parent)
)
file_target(
    "metrics",
    "the metrics of a run",
    (
        b'{"step":1,"loss":6.2,"grad_norm":0.3}\n{"step":1,"held_out_loss":6.1}\n',
        b'{"step":2,"loss":1e308}\n\n{"step":2,"loss":0.5}\n{"st',
    ),
    UserError,
)(lambda path: picture_of_metrics(read_metrics(path), [], None))


# ---- what a profiled run leaves behind: the lines of its steps, and the rings of its spans

BETWEEN = b"\nring\n"
"""Between the text and the ring of a seed, so that mutations need not find their way through zeros."""
MACHINE = MachineDescription(processor="p", processors=2, blas="b")
RUN = RunLine(
    version=VERSION,
    rank=0,
    incarnation=1,
    world_size=1,
    host="h",
    boot_id="b",
    pid=1,
    monotonic_ns=1,
    unix_ns=2,
    ranks_on_host=1,
    machine=MACHINE,
    peak=1e9,
    units=(UnitLine("embed", 0, 0, 0, 0), UnitLine("head", 2, 0, 4, 0)),
)
STEP = StepLine(
    step=1,
    begin_ns=10,
    end_ns=20,
    ns={"forward": 4, "comm": 2, IDLE: 4},
    unit_ns={"forward": (1, 3)},
    passes={"forward": (1, 1)},
    flops=2,
    hardware_flops=2,
    overlap=Overlap(under_way_ns=4, waited_ns=2, hidden_ns=1),
)


def _line_seeds() -> tuple[bytes, ...]:
    row = OpRow("linear", "forward", "8x4, 4x4", "float32", 2, 10, 0, 64, 256)
    run, step, ops = map(msgspec.json.encode, (RUN, STEP, OpsLine(step=1, ops=(row,))))
    return (b"\n".join((run, step, ops, step, run, step, b"")), run)


@target("profile.lines", "the lines of a profiled rank, and their table", _line_seeds, UserError)
def _lines(data: bytes) -> None:
    with folder() as made:
        path = lines_path(made, 0, 1)
        path.parent.mkdir()
        path.write_bytes(data)
        lives = read_profiles(made)
        table_of(summary_of(lives, lambda machine: None))
        slowest_ops(lives)


def _ring_seeds() -> tuple[bytes, ...]:
    lines = (RUN, GroupLine(channel=0, epoch=1, members=(0,)), OperationLine(name="all_reduce"))
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    records = np.zeros(2, RECORD)
    records["begin_ns"], records["end_ns"], records["track"] = 5, 9, (0, 1)
    ring = len(records).to_bytes(8, "little") + records.tobytes()
    return (MAGIC + len(text).to_bytes(8, "little") + text + BETWEEN + ring,)


@target("profile.spans", "the spans of a profiled rank", _ring_seeds, UserError)
def _ring(data: bytes) -> None:
    text, _, ring = data.partition(BETWEEN)
    decode_ring(text.ljust(RING_AT, b"\0")[:RING_AT] + ring.ljust(RING_BYTES, b"\0")[:RING_BYTES], "ring")


@target(
    "profile.peaks",
    "the peaks of machines that were measured before",
    lambda: (msgspec.json.encode([{"machine": msgspec.to_builtins(MACHINE), "flops_per_s": 1e11}]),),
)
def _peaks(data: bytes) -> None:
    decode_peaks(data)


_DATA = "/dev/null/*"


@functools.cache
def _sources_seeds() -> tuple[bytes, ...]:
    def prepare(directory: Path) -> None:
        (directory / "text").write_bytes(b"some text")
        with settled_sources(_DATA, directory, find_sources(str(directory / "text")), NEW_RUN):
            pass

    return (_written(RECORD_NAME, prepare), b"[]")


@file_target("data.record", "the record of a run's files", _sources_seeds, UserError, file=RECORD_NAME)
def _sources(path: Path) -> None:
    found = sources_for(_DATA, path.parent, RunData(begun=True))
    if not found or any(source.nbytes < 0 for source in found):
        raise Broken(f"a run of {found}")
