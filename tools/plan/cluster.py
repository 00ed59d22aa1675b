"""`zbmd plan cluster`: the memory of a rank, the time of a step and the goodput of a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.plan.checkpoint_plan import STALL_ASYNC, CheckpointInputs, plan_checkpoint
from zbmd.tools.plan.layout import (
    HEAD,
    ModelShape,
    RankMemory,
    Strategy,
    activation_bytes,
    shape_of,
)
from zbmd.tools.plan.quantities import bandwidth, count, duration, fraction, given, shown_bytes, shown_s, size
from zbmd.tools.plan.roofline import Candidate, Cluster, StepTime, candidates
from zbmd.training.profiler.accelerators import ACCELERATORS, Accelerator, accelerator
from zbmd.transport.errors import UserError

EXAMPLES: Final = (
    "zbmd plan cluster --parameters 7B --accelerators 8 --accelerator H100",
    "zbmd plan cluster --parameters 70B --accelerators 64 --mfu 55%",
    "zbmd plan cluster --parameters 47B --active 13B --experts 8 --top 2 --accelerators 64",
    "zbmd plan cluster --parameters 405B --layers 126 --width 16384 --accelerators 16128 --tokens 16M",
    "zbmd plan cluster --hardware",
)
DESCRIPTION: Final = """Compute which strategies fit into the memory of a rank, and how fast each one is.

The time of a step is a roofline: the arithmetic at the part of the peak that kernels reach, or the memory's
bandwidth, and the communication that nothing hides. MFU counts 6 FLOPs for each parameter and token, without
attention and without recomputation. Goodput is what is left after checkpoints and failures."""
EFFICIENCY: Final = "70%"
"""cuBLAS reaches 74 % of an H100's bf16 peak (docs/H100.md); other kernels take the rest."""
RESERVED: Final = 0.92
"""The part of the memory that is left to a job: contexts, communicators and fragments take 8 %."""
STATE_BYTES: Final = 12.0
ACCELERATORS_MAX: Final = 1_000_000
FAMILIES: Final[tuple[tuple[str, Callable[[Strategy], bool]], ...]] = (
    ("DP", lambda s: s.tp * s.pp * s.cp * s.ep == 1 and not s.zero),
    ("ZeRO 1", lambda s: s.tp * s.pp * s.cp * s.ep * s.dp == 1 and s.zero == 1),
    ("ZeRO 2", lambda s: s.tp * s.pp * s.cp * s.ep * s.dp == 1 and s.zero == 2),
    ("ZeRO 3", lambda s: s.tp * s.pp * s.cp * s.ep * s.dp == 1 and s.zero == 3),
    ("fsdp × dp", lambda s: s.tp * s.pp * s.cp * s.ep == 1 and s.zero == 3 and s.dp > 1),
    ("TP", lambda s: s.tp > 1 and s.pp * s.cp * s.ep == 1 and not s.zero),
    ("PP", lambda s: s.pp > 1 and s.tp * s.cp * s.ep == 1 and not s.zero),
    ("TP × PP", lambda s: s.tp > 1 and s.pp > 1 and s.cp * s.ep == 1 and not s.zero),
    ("CP", lambda s: s.cp > 1 and s.ep == 1),
    ("EP", lambda s: s.ep > 1),
)


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of strategy. layout: the fastest of its kind that fits, or else the smallest.

    kept, recomputed: bytes of activations without and with recomputation. tokens: a second, of the cluster.
    """

    name: str
    layout: str
    strategy: Strategy
    microbatches: int
    fits: bool
    memory: RankMemory
    kept: float
    recomputed: float
    step: StepTime
    step_s: float
    mfu: float
    tokens: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The rate that failures leave. interval_s: of asynchronous checkpoints; tokens: a second, useful."""

    mtbf_s: float
    write_s: float
    interval_s: float
    efficiency: float
    tokens: float


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `zbmd plan cluster --json` prints. best: None if no strategy fits.

    given_mfu: of `--mfu`; given_tokens: tokens a second that follow from it.
    """

    accelerator: Accelerator
    accelerators: int
    parameters: float
    active: float
    layers: int
    width: int
    flops_a_token: float
    memory: float
    peak: float
    strategies: list[Judged]
    best: Judged | None
    given_mfu: float | None
    given_tokens: float | None
    goodput: Goodput | None


def tokens_per_s(mfu: float, accelerators: int, peak: float, parameters: float) -> float:
    """Return the tokens a second of a cluster at a given MFU: mfu·N·peak / (6·P)."""
    return mfu * accelerators * peak / (6.0 * parameters)


def add_cluster(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cluster` to the planners of `zbmd plan`."""
    made = add_command(
        kinds,
        "cluster",
        "plan the memory, speed and goodput of a cluster",
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    model = made.add_argument_group("model")
    model.add_argument("--parameters", metavar="P", help="all of them: 70B")
    model.add_argument("--layers", type=int, metavar="N", help="default: usual ones for the parameters")
    model.add_argument("--width", type=int, metavar="N", help="features of a token (default: likewise)")
    model.add_argument("--heads", type=int, metavar="N", help="of attention (default: width / 128)")
    model.add_argument("--vocabulary", type=int, default=32_000, metavar="N", help="default: %(default)s")
    model.add_argument("--context", type=int, default=4_096, metavar="N", help="default: %(default)s")
    model.add_argument("--experts", type=int, default=1, metavar="N", help="of a layer (default: 1)")
    model.add_argument("--top", type=int, default=1, metavar="K", help="experts of a token (default: 1)")
    model.add_argument("--active", metavar="P", help="parameters that a token passes (default: all)")
    model.add_argument("--tokens", default="4M", metavar="N", help="of a step's batch (default: %(default)s)")
    cluster = made.add_argument_group("cluster")
    cluster.add_argument("--accelerators", type=int, default=8, metavar="N", help="default: %(default)s")
    names = ", ".join(one.name for one in ACCELERATORS.values())
    cluster.add_argument("--accelerator", default="H100", metavar="NAME", help=f"{names} (default: H100)")
    cluster.add_argument("--dtype", default="bf16", help="of matrix products: fp32, tf32, bf16, fp8")
    cluster.add_argument("--memory", metavar="SIZE", help="of an accelerator (default: of the table)")
    cluster.add_argument(
        "--network", default="400Gbit/s", metavar="SIZE/s", help="of each accelerator (default: %(default)s)"
    )
    cluster.add_argument(
        "--efficiency",
        default=EFFICIENCY,
        metavar="PART",
        help="of the peak that kernels reach (default: 70%%)",
    )
    cluster.add_argument("--mfu", metavar="PART", help="a target: print the tokens a second that follow")
    cluster.add_argument(
        "--mtbf", default="50000h", metavar="TIME", help="of one accelerator (default: %(default)s)"
    )
    cluster.add_argument(
        "--storage", default="100GB/s", metavar="SIZE/s", help="of checkpoints (default: %(default)s)"
    )
    made.add_argument("--hardware", action="store_true", help="print the table of accelerators")
    add_json(made)
    made.set_defaults(run_command=_cluster)


def _cluster(arguments: argparse.Namespace) -> int:
    if arguments.hardware:
        return _print_hardware(as_json=arguments.json)
    plan = plan_cluster(arguments)
    if arguments.json:
        print(msgspec.json.encode(plan).decode())
    else:
        print("\n".join(_lines(plan)))
    return 0


def plan_cluster(arguments: argparse.Namespace) -> ClusterPlan:
    """Return the plan of what the options say. Raises `UserError` that names the option."""
    chip = given("--accelerator", accelerator, arguments.accelerator)
    if arguments.dtype not in chip.peak:
        raise UserError(
            f"--dtype: expected one of {', '.join(chip.peak)} for {chip.name}, got {arguments.dtype!r}"
        )
    if not 1 <= arguments.accelerators <= ACCELERATORS_MAX:
        raise UserError(f"--accelerators: expected 1 to {ACCELERATORS_MAX:,}, got {arguments.accelerators}")
    model, sequences = _model(arguments)
    cluster = Cluster(
        accelerators=arguments.accelerators,
        node=chip.node,
        memory=RESERVED
        * (chip.memory if arguments.memory is None else given("--memory", size, arguments.memory)),
        peak=chip.peak[arguments.dtype],
        bandwidth=chip.bandwidth,
        link=chip.link,
        network=given("--network", bandwidth, arguments.network),
        efficiency=given("--efficiency", fraction, arguments.efficiency),
    )
    strategies, best = _judge(model, cluster, sequences)
    mfu = None if arguments.mfu is None else given("--mfu", fraction, arguments.mfu)
    wanted = None if mfu is None else tokens_per_s(mfu, cluster.accelerators, cluster.peak, model.active)
    rate = wanted if wanted is not None else (best.tokens if best else None)
    return ClusterPlan(
        accelerator=chip,
        accelerators=cluster.accelerators,
        parameters=model.parameters,
        active=model.active,
        layers=model.layers,
        width=model.width,
        flops_a_token=model.flops_a_token,
        memory=cluster.memory,
        peak=cluster.peak,
        strategies=strategies,
        best=best,
        given_mfu=mfu,
        given_tokens=wanted,
        goodput=None if rate is None else _goodput(arguments, model, rate, sequences * model.context / rate),
    )


def _model(arguments: argparse.Namespace) -> tuple[ModelShape, int]:
    """Return the model, and the sequences of a step's batch."""
    if arguments.parameters is None:
        raise UserError("--parameters: expected the parameters of the model, such as 70B")
    parameters = given("--parameters", count, arguments.parameters)
    layers, width = shape_of(parameters)
    layers, width = arguments.layers or layers, arguments.width or width
    model = ModelShape(
        parameters=parameters,
        active=parameters if arguments.active is None else given("--active", count, arguments.active),
        layers=layers,
        width=width,
        heads=arguments.heads or max(1, width // HEAD),
        vocabulary=arguments.vocabulary,
        context=arguments.context,
        experts=arguments.experts,
        top=arguments.top,
    )
    tokens = given("--tokens", count, arguments.tokens)
    if tokens < model.context:
        raise UserError(
            f"--tokens: expected at least one context ({model.context:,}), got {arguments.tokens}"
        )
    # Rounded down to a multiple or a divisor of the accelerators, so that more strategies divide it.
    sequences, ranks = int(tokens // model.context), arguments.accelerators
    if sequences >= ranks:
        return model, sequences - sequences % ranks
    return model, max(one for one in range(1, sequences + 1) if ranks % one == 0)


def _judge(model: ModelShape, cluster: Cluster, sequences: int) -> tuple[list[Judged], Judged | None]:
    every = list(candidates(model, cluster, sequences))
    found: list[Judged] = []
    for name, belongs in FAMILIES:
        kind = [one for one in every if belongs(one.strategy)]
        if kind:
            found.append(_judged(name, _first(kind), model, cluster, sequences))
    fitting = [one for one in every if one.fits]
    best = _judged("best", _first(fitting), model, cluster, sequences) if fitting else None
    return found, best


def _first(kind: Iterable[Candidate]) -> Candidate:
    """Return the fastest that fits; if none does, the one that needs least memory."""
    return min(
        kind,
        key=lambda one: (not one.fits, one.step.total if one.fits else one.memory.total, str(one.strategy)),
    )


def _judged(name: str, one: Candidate, model: ModelShape, cluster: Cluster, sequences: int) -> Judged:
    tokens = sequences * model.context / one.step.total
    both = [
        activation_bytes(model, msgspec.structs.replace(one.strategy, recompute=again), one.microbatches)
        for again in (False, True)
    ]
    return Judged(
        name=name,
        layout=str(one.strategy),
        strategy=one.strategy,
        microbatches=one.microbatches,
        fits=one.fits,
        memory=one.memory,
        kept=both[0],
        recomputed=both[1],
        step=one.step,
        step_s=one.step.total,
        mfu=tokens * model.flops_a_token / (cluster.accelerators * cluster.peak),
        tokens=tokens,
    )


def _goodput(arguments: argparse.Namespace, model: ModelShape, rate: float, step_s: float) -> Goodput:
    write_s = STATE_BYTES * model.parameters / given("--storage", bandwidth, arguments.storage)
    plan = plan_checkpoint(
        CheckpointInputs(
            accelerators=arguments.accelerators,
            mtbf_s=given("--mtbf", duration, arguments.mtbf),
            write_s=write_s,
            stall=STALL_ASYNC,
            step_s=step_s,
        )
    )
    return Goodput(
        mtbf_s=plan.mtbf_s,
        write_s=write_s,
        interval_s=plan.best.interval_s,
        efficiency=plan.best.efficiency,
        tokens=rate * plan.best.efficiency,
    )


# ---- the text


def _lines(plan: ClusterPlan) -> list[str]:
    active = "" if plan.active == plan.parameters else f", {plan.active / 1e9:g}B active"
    lines = [
        f"{plan.parameters / 1e9:g}B parameters{active}, {plan.layers} layers of {plan.width:,}: "
        f"{plan.flops_a_token:.3g} FLOPs a token",
        f"{plan.accelerators:,} x {plan.accelerator.name}: {plan.peak / 1e12:,.1f} TFLOP/s and "
        f"{shown_bytes(plan.memory)} for a job each",
        f"{'':9} fits   weights  gradients  optimizer  activations  recomputed      total     step    MFU  "
        "tokens/s",
    ]
    lines += [_row(one) for one in plan.strategies]
    lines.append(
        "no strategy fits: use more accelerators, or some with more memory"
        if plan.best is None
        else _row(plan.best)
    )
    if plan.given_mfu is not None:
        lines.append(f"at an MFU of {plan.given_mfu:.1%}: {plan.given_tokens:,.0f} tokens/s")
    if plan.goodput is not None:
        good = plan.goodput
        lines.append(
            f"goodput: {good.tokens:,.0f} tokens/s, {good.efficiency:.1%}, with one failure every "
            f"{shown_s(good.mtbf_s)} and an asynchronous checkpoint of {shown_s(good.write_s)} every "
            f"{shown_s(good.interval_s)}"
        )
    return lines


def _row(one: Judged) -> str:
    memory = one.memory
    sizes = (memory.weights, memory.gradients, memory.optimizer, one.kept, one.recomputed, memory.total)
    gb = [f"{nbytes / 1e9:,.1f} GB" for nbytes in sizes]
    return (
        f"{one.name:9} {'yes' if one.fits else 'no':4} {gb[0]:>9}  {gb[1]:>9}  {gb[2]:>9}  "
        f"{gb[3]:>11}  {gb[4]:>10}  {gb[5]:>9}  {shown_s(one.step_s):>7}  "
        f"{one.mfu:5.1%}  {one.tokens:8,.0f}  {one.layout}"
    )


def _print_hardware(*, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(list(ACCELERATORS.values())).decode())
        return 0
    for one in ACCELERATORS.values():
        peaks = ", ".join(f"{name} {flops / 1e12:,g}" for name, flops in one.peak.items())
        print(
            f"{one.name:7} {peaks} TFLOP/s; {shown_bytes(one.memory)} at {shown_bytes(one.bandwidth)}/s; "
            f"links {shown_bytes(one.link)}/s a direction. {one.source}"
        )
    return 0
