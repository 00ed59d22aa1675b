"""`zbmd plan checkpoint`: how often to write a checkpoint, and what that costs, before a run starts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json, add_plot
from zbmd.tools.plan.checkpoint_plan import (
    STALL_ASYNC,
    CheckpointInputs,
    CheckpointPlan,
    Cost,
    plan_checkpoint,
    plan_levels,
)
from zbmd.tools.plan.quantities import (
    bandwidth,
    count,
    duration,
    fraction,
    given,
    shown_s,
    shown_share,
    size,
)
from zbmd.training.checkpoint.intervals import Failing, Level, NestedIntervals
from zbmd.transport.errors import UserError

EXAMPLES: Final = (
    "zbmd plan checkpoint --accelerators 1 --mtbf 8h --write 4min --interval 30min",
    "zbmd plan checkpoint --accelerators 16384 --mtbf 50000h --parameters 405B --bandwidth 2TB/s --async",
    "zbmd plan checkpoint --accelerators 1024 --mtbf 50000h --state 2TiB --bandwidth 100GB/s --plot plan.svg",
    "zbmd plan checkpoint --accelerators 1024 --mtbf 20000h --step 5s --level memory,0.2s,80%,2s"
    " --level disk,3s,15%,20s --level store,40s,5%,3min",
    "zbmd plan checkpoint --accelerators 512 --mtbf 8000h --write 5min --simulate --weibull 0.7",
    "zbmd plan checkpoint --validity",
)
DESCRIPTION: Final = """Compute how often to write a checkpoint, and what that costs.

Overhead is the time that training waits for checkpoints, rework the steps that failures repeat, both as
fractions of useful time; the budget is on their total, with restarts. The interval is useful work between two
checkpoints: Young's, or Daly's of higher order where a stall takes more than 1 % of the MTBF."""
STATE_BYTES: Final = 12.0
"""Of a parameter: float32 weights and two moments, as the training engine's own checkpoints have."""
VALIDITY_STALLS: Final = (0.001, 0.01, 0.1, 0.5)
VALIDITY_SHAPES: Final = (1.0, 0.7, 0.5, 1.5)
VALIDITY_SETUP: Final = {"work_mtbfs": 50.0, "trials": 200}
LEVEL_FIELDS: Final = "NAME,COST,SHARE,RESTART"


class SimulatedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--simulate` adds. optimum_s: the best interval that was found, None for several levels.

    lost: at the planned interval; error: one standard error of it.
    """

    shape: float
    trials: int
    seed: int
    lost: float
    error: float
    optimum_s: float | None
    lost_optimum: float | None


def add_checkpoint(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoint` to the planners of `zbmd plan`."""
    made = add_command(
        kinds, "checkpoint", "plan the interval of checkpoints", description=DESCRIPTION, examples=EXAMPLES
    )
    cluster = made.add_argument_group("cluster")
    cluster.add_argument("--accelerators", type=int, default=1, metavar="N", help="of the job (default: 1)")
    cluster.add_argument(
        "--mtbf", metavar="TIME", help="mean time between failures of one accelerator: 50000h"
    )
    cluster.add_argument(
        "--step", metavar="TIME", help="of one training step: intervals are snapped to steps"
    )
    cluster.add_argument(
        "--work", default="720h", metavar="TIME", help="useful work of the run (default: %(default)s)"
    )
    cost = made.add_argument_group("checkpoint: --write, or --bandwidth with --state or --parameters")
    cost.add_argument("--write", metavar="TIME", help="of one checkpoint")
    cost.add_argument("--state", metavar="SIZE", help="of one checkpoint: 2TiB")
    cost.add_argument("--parameters", metavar="P", help="of the model, 12 bytes each: 70B")
    cost.add_argument("--bandwidth", metavar="SIZE/s", help="of all ranks' writes together: 400GB/s")
    cost.add_argument(
        "--async", dest="asynchronous", action="store_true", help="write beside the steps that follow"
    )
    cost.add_argument(
        "--stall", metavar="PART", help=f"of the write that --async waits for (default: {STALL_ASYNC:.0%}%)"
    )
    cost.add_argument("--restart", metavar="TIME", help="after a failure (default: as long as a write)")
    cost.add_argument(
        "--level",
        action="append",
        default=[],
        metavar=LEVEL_FIELDS,
        help="several levels, cheapest first: stall, share of failures that it recovers, restart",
    )
    judged = made.add_argument_group("judgement")
    judged.add_argument("--interval", metavar="TIME", help="your own interval, to compare")
    judged.add_argument("--budget", default="20%", metavar="PART", help="of time lost (default: 20%%)")
    judged.add_argument("--simulate", action="store_true", help="check the plan with simulated failures")
    judged.add_argument(
        "--weibull",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="of simulated failures (default: 1, exponential)",
    )
    judged.add_argument("--trials", type=int, default=200, metavar="N", help="of a simulation (default: 200)")
    judged.add_argument("--seed", type=int, default=0, metavar="N", help="of a simulation (default: 0)")
    judged.add_argument(
        "--validity", action="store_true", help="print where the formulas stop being true, by simulation"
    )
    add_json(made)
    add_plot(made)
    made.set_defaults(run_command=_checkpoint)


def _checkpoint(arguments: argparse.Namespace) -> int:
    if arguments.validity:
        return _print_validity(arguments)
    inputs, levels = inputs_of(arguments)
    plan = plan_levels(inputs, levels) if levels else plan_checkpoint(inputs)
    if arguments.plot is not None:
        if levels:
            raise UserError("--plot: expected a plan of one level; leave out --level to draw one")
        from zbmd.tools.plan.checkpoint_draw import draw_plan

        draw_plan(arguments.plot, inputs, plan)
    simulated = _simulated(arguments, inputs, levels, plan) if arguments.simulate else None
    if arguments.json:
        shown: dict[str, Any] = msgspec.to_builtins(plan)
        if simulated is not None:
            shown["simulated"] = msgspec.to_builtins(simulated)
        print(msgspec.json.encode(shown).decode())
    else:
        print("\n".join(_lines(plan, simulated)))
    return 0


# ---- the options


def inputs_of(arguments: argparse.Namespace) -> tuple[CheckpointInputs, list[Level]]:
    """Return what the options say. Raises `UserError` that names the option and what it expects."""
    if arguments.mtbf is None:
        raise UserError("--mtbf: expected the MTBF of one accelerator, such as 50000h")
    levels = [_level(text) for text in arguments.level]
    if arguments.stall is not None and not arguments.asynchronous:
        raise UserError(
            "--stall: expected --async with it; a synchronous checkpoint stalls for all of its write"
        )
    if levels and (arguments.asynchronous or arguments.write or arguments.bandwidth or arguments.restart):
        raise UserError(
            "--level: expected no --write, --bandwidth, --async or --restart; each level has its own"
        )
    if levels and arguments.interval:
        raise UserError("--interval: expected a plan of one level; leave out --level")
    write_s = levels[-1].stall_s if levels else _write_s(arguments)
    stall = 1.0
    if arguments.asynchronous:
        stall = STALL_ASYNC if arguments.stall is None else given("--stall", fraction, arguments.stall)
    restart = arguments.restart
    inputs = CheckpointInputs(
        accelerators=arguments.accelerators,
        mtbf_s=given("--mtbf", duration, arguments.mtbf),
        write_s=write_s,
        restart_s=None if restart is None else given("--restart", duration, restart),
        stall=stall,
        step_s=0.0 if arguments.step is None else given("--step", duration, arguments.step),
        budget=given("--budget", fraction, arguments.budget),
        work_s=given("--work", duration, arguments.work),
        interval_s=None if arguments.interval is None else given("--interval", duration, arguments.interval),
    )
    return inputs, levels


def _write_s(arguments: argparse.Namespace) -> float:
    """Return the seconds of one write, from its time or from what is written."""
    sizes = [name for name in ("state", "parameters") if getattr(arguments, name) is not None]
    if arguments.write is not None:
        if sizes or arguments.bandwidth is not None:
            raise UserError(
                "--write: expected no --state, --parameters or --bandwidth; they give the time too"
            )
        return given("--write", duration, arguments.write)
    if len(sizes) != 1 or arguments.bandwidth is None:
        raise UserError(
            "the cost of a checkpoint is not known: give --write TIME, or --bandwidth SIZE/s with one of "
            "--state and --parameters"
        )
    if arguments.state is not None:
        nbytes = given("--state", size, arguments.state)
    else:
        nbytes = STATE_BYTES * given("--parameters", count, arguments.parameters)
    return nbytes / given("--bandwidth", bandwidth, arguments.bandwidth)


def _level(text: str) -> Level:
    fields = text.split(",")
    if len(fields) != 4 or not fields[0]:
        raise UserError(f"--level: expected {LEVEL_FIELDS} such as disk,3s,15%,20s, got {text!r}")
    name, cost, share, restart = fields
    option = f"--level {name}"
    return Level(
        name=name,
        stall_s=given(option, duration, cost),
        share=given(option, fraction, share),
        restart_s=given(option, duration, restart),
    )


# ---- the simulation


def _simulated(
    arguments: argparse.Namespace, inputs: CheckpointInputs, levels: list[Level], plan: CheckpointPlan
) -> SimulatedPlan:
    from zbmd.tools.plan.simulation import Failures, best_interval, one_level, several_levels, simulate

    setup = _setup(arguments)
    failures = Failures(mtbf_s=plan.mtbf_s, shape=arguments.weibull)
    failing: Failing = inputs.failing
    if levels:
        nested = NestedIntervals(
            base_s=plan.levels[0].interval_s, every=tuple(level.every for level in plan.levels)
        )
        at = simulate(nested.base_s, several_levels(levels, nested), failures, setup)
        found = None
    else:
        at = simulate(plan.best.interval_s, one_level(failing), failures, setup)
        found = best_interval(plan.exact_s, failing, failures, setup)
    return SimulatedPlan(
        shape=arguments.weibull,
        trials=setup.trials,
        seed=setup.seed,
        lost=at.lost,
        error=at.error,
        optimum_s=None if found is None else found.interval_s,
        lost_optimum=None if found is None else found.lost,
    )


def _setup(arguments: argparse.Namespace) -> Any:
    from zbmd.tools.plan.simulation import Setup

    if not 2 <= arguments.trials <= 100_000:
        raise UserError(f"--trials: expected 2 to 100000, got {arguments.trials}")
    if arguments.seed < 0:
        raise UserError(f"--seed: expected at least 0, got {arguments.seed}")
    if not 0.2 <= arguments.weibull <= 10.0:
        raise UserError(f"--weibull: expected a shape of 0.2 to 10, got {arguments.weibull:g}")
    return Setup(trials=arguments.trials, seed=arguments.seed)


def _print_validity(arguments: argparse.Namespace) -> int:
    from zbmd.tools.plan.simulation import validity

    setup = replace(_setup(arguments), **VALIDITY_SETUP)
    rows = [validity(stall, shape, setup) for shape in VALIDITY_SHAPES for stall in VALIDITY_STALLS]
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    print("intervals in MTBFs; loss: of useful time, in the simulation; restarts as long as stalls")
    print("Weibull  stall    Young     Daly    exact  simulated   loss: Young     Daly    best")
    for row in rows:
        print(
            f"{row.shape:7g}  {row.stall:5g}  {row.young:7.3f}  {row.daly:7.3f}  {row.exact:7.3f}  "
            f"{row.best:9.3f}       {row.lost_young:7.1%}  {row.lost_daly:7.1%}  {row.lost_best:6.1%}"
        )
    return 0


# ---- the text


def _lines(plan: CheckpointPlan, simulated: SimulatedPlan | None) -> list[str]:
    many = "accelerator" if plan.accelerators == 1 else "accelerators"
    lines = [f"cluster      {plan.accelerators:,} {many}: one failure every {shown_s(plan.mtbf_s)}"]
    lines += _level_lines(plan) if plan.levels else _interval_lines(plan)
    if simulated is not None:
        lines.append(_simulated_line(simulated))
    if plan.exceeded:
        lines.append(
            f"the budget of {shown_share(plan.budget)} is exceeded. Single changes, and what they lead to:"
        )
        lines += [f"  - {one.change}: {shown_share(one.total)} lost" for one in plan.advice]
    else:
        lines.append(f"within the budget of {shown_share(plan.budget)}")
    return lines


def _interval_lines(plan: CheckpointPlan) -> list[str]:
    of_write = "" if plan.stall_s == plan.write_s else f" of a write of {shown_s(plan.write_s)}"
    lines = [
        f"checkpoint   stalls {shown_s(plan.stall_s)}{of_write}; a restart takes {shown_s(plan.restart_s)}",
        f"interval     {shown_s(plan.optimum_s)} by {plan.formula} (Young {shown_s(plan.young_s)}, Daly "
        f"{shown_s(plan.daly_first_s)} and {shown_s(plan.daly_s)}, exact {shown_s(plan.exact_s)})",
    ]
    if plan.floor_s > plan.optimum_s:
        lines.append(
            f"             but one write ends before the next begins: at least {shown_s(plan.floor_s)}"
        )
    lines.append(f"planned      {_cost_line(plan.best)}")
    if plan.yours is not None:
        lines.append(f"yours        {_cost_line(plan.yours)}")
        if plan.yours.interval_s < plan.floor_s:
            lines.append(
                f"             one write is not complete when the next begins: give {shown_s(plan.floor_s)}"
            )
    return lines


def _level_lines(plan: CheckpointPlan) -> list[str]:
    lines: list[str] = []
    for level in plan.levels:
        total = level.overhead + level.rework + level.restart
        lines.append(
            f"{level.name:12} every {shown_s(level.interval_s)} for a failure every {shown_s(level.mtbf_s)}: "
            f"overhead {shown_share(level.overhead)}, rework {shown_share(level.rework)}, restarts "
            f"{shown_share(level.restart)}; {shown_share(total)}"
        )
    lines.append(f"together     {_cost_line(plan.best)}")
    return lines


def _cost_line(cost: Cost) -> str:
    steps = "" if cost.steps is None else f" ({cost.steps:,} steps)"
    return (
        f"every {shown_s(cost.interval_s)}{steps}: overhead {shown_share(cost.overhead)}, rework "
        f"{shown_share(cost.rework)}, restarts {shown_share(cost.restart)}; {shown_share(cost.total)} lost, "
        f"efficiency {cost.efficiency:.1%}, {shown_s(cost.expected_s)} in all"
    )


def _simulated_line(simulated: SimulatedPlan) -> str:
    kind = "exponential" if simulated.shape == 1.0 else f"Weibull {simulated.shape:g}"
    line = (
        f"simulated    {kind}, {simulated.trials} trials: {simulated.lost:.1%} ± {simulated.error:.1%} lost"
    )
    if simulated.optimum_s is None or simulated.lost_optimum is None:
        return line
    return f"{line}; best at {shown_s(simulated.optimum_s)}, {simulated.lost_optimum:.1%}"
