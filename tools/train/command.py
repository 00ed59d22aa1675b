"""`zbmd train`: a GPT on a mesh of ranks, by a recipe of flags, ZBMD_TRAIN_* variables and a TOML file.

Precedence: command line, environment, file, default. The merged recipe is printed before anything starts, and
written into the directory of the run as recipe.toml. Alone or as a Slurm task, the command starts its ranks;
under `zbmd-node run -m zbmd train` it is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from zbmd.actors.process.spare import is_spare
from zbmd.actors.rank.environment import JobEnvironment, RankEnvironment
from zbmd.actors.view import RANKS_MAX
from zbmd.tools.cli.settings import read_config
from zbmd.tools.node import cli as node_cli
from zbmd.training.checkpoint.pace import parse_every
from zbmd.training.checkpoint.storage import folder_of
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.mesh import Mesh, require_axes
from zbmd.training.job.overwrite import claimed, drop_held, holders_of, make_new, remove_run
from zbmd.training.ops.cuda.table import MATMUL_PRECISIONS
from zbmd.training.optim import CURVES, OPTIMIZERS
from zbmd.training.optim.mixed_precision import computing_dtype, storage_dtype
from zbmd.training.pipeline.schedules import SCHEDULES
from zbmd.training.profiler.operations import parse_ops_every
from zbmd.training.profiler.peak import THREADS_VARIABLES, peak_of, this_machine
from zbmd.training.run.ledger import begin_log
from zbmd.training.sharded.devices import parse_device
from zbmd.training.sharded.options import PRECISIONS, RECIPE_NAME, STEP_GRAPHS, TOKENS, TrainOptions
from zbmd.training.sharded.redundancy import parse_redundancy
from zbmd.training.sharded.run import check_recipe, from_whole, train
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

EXAMPLES: Final = """examples:
  zbmd train --data 'texts/**/*.txt' --steps 200
  zbmd train --data texts --mesh dp=2,tp=2 --ranks 4 --tokens bpe --vocabulary 2048 --tensorboard on
  zbmd train --data texts --mesh dp=2,pp=2,tp=2 --ranks 8 --shards 8
  zbmd train --data texts --ranks 4 --zero 3 --precision bf16
  zbmd train --data texts --ranks 8 --mesh dp=2,fsdp=4
  zbmd train recipe.toml --lr 1e-3 --out runs/second
  zbmd train --data texts --weights gpt2/ --tokens bpe --tokenizer gpt2/tokenizer.json --context 1024
  zbmd train runs/first/recipe.toml --resume runs/first --steps 400
  zbmd-node run -n 4 -m zbmd train --data texts --out runs/third

A run has a directory of its own. Without --out it is the first free one of zbmd-runs/train, train-2 and so on
or, if the run resumes, that of the checkpoint. A recipe is a TOML file with the same names:
  data = "texts"
  mesh = "dp=2,tp=2"
  ranks = 4
  width = 256
  tokens = "bpe"
"""

PREFIX: Final = "ZBMD_TRAIN_"
DATA_VARIABLE: Final = "ZBMD_DATA"
"""What `--data` of a launcher sets."""
RUNS_MAX: Final = 10_000
SHORT_PRECISIONS: Final = {"bf16": "bfloat16", "f16": "float16"}
ValueT = TypeVar("ValueT")


def _number(kind: Callable[[str], ValueT]) -> Callable[[str], ValueT]:
    def parse(text: str) -> ValueT:
        try:
            return kind(text)
        except ValueError:
            raise UserError(f"expected a number, got {text!r}") from None

    return parse


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise UserError(f"expected on or off, got {text!r}")
    return text == "on"


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise UserError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def _precision(text: str) -> str:
    return _one_of(*PRECISIONS)(SHORT_PRECISIONS.get(text, text))


@dataclass(frozen=True, slots=True)
class RecipeSetting:
    """A setting of a recipe: TOML key and `--name`, group in the help, parser, default and meaning."""

    name: str
    group: str
    parse: Callable[[str], Any]
    default: Any
    help: str

    @property
    def option(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()


_MODEL, _TRAINING = GPTConfig(), TrainingConfig(steps=300)
_WHOLE, _REAL = _number(int), _number(float)
_OPTIONS = TrainOptions(out=Path("zbmd-runs/train"), data="", mesh="dp=-1", model=_MODEL, training=_TRAINING)

SETTINGS: Final = (
    RecipeSetting(
        "data", "data", str, None, "file, directory or glob to train on; default: Python's own library"
    ),
    RecipeSetting("tokens", "data", _one_of(*TOKENS), _OPTIONS.tokens, "bytes or bpe"),
    RecipeSetting("vocabulary", "data", _WHOLE, _OPTIONS.vocabulary, "tokens that bpe learns"),
    RecipeSetting("tokenizer", "data", Path, None, "a tokenizer.json to use instead of training one"),
    RecipeSetting("ranks", "mesh", _WHOLE, 1, "processes to start"),
    RecipeSetting(
        "on_loss",
        "mesh",
        _one_of("replace", "shrink", "stop"),
        "replace",
        "of a rank: replace, shrink or stop",
    ),
    RecipeSetting(
        "on_straggler",
        "mesh",
        _one_of("warn", "rebalance", "replace"),
        _OPTIONS.on_straggler,
        "a slow rank: warn, rebalance (move logical shards away) or replace",
    ),
    RecipeSetting("mesh", "mesh", str, _OPTIONS.mesh, "axes dp, fsdp, pp and tp, such as dp=2,fsdp=2,tp=2"),
    RecipeSetting(
        "schedule", "mesh", _one_of(*SCHEDULES), _OPTIONS.schedule, f"of stages: {', '.join(SCHEDULES)}"
    ),
    RecipeSetting("chunks", "mesh", _WHOLE, _OPTIONS.chunks, "parts of the model a stage"),
    RecipeSetting("balance", "mesh", _switch, False, "divide layers over stages by measured cost: on or off"),
    RecipeSetting(
        "zero", "mesh", _WHOLE, _OPTIONS.zero, "shard the state along fsdp, or dp: ZeRO of stage 1, 2 or 3"
    ),
    RecipeSetting(
        "redundancy",
        "mesh",
        parse_redundancy,
        _OPTIONS.redundancy,
        "of each rank's state: auto, replica, buddy, ec:K+M or none",
    ),
    RecipeSetting("prefetch", "mesh", _WHOLE, _OPTIONS.prefetch, "units that --zero 3 gathers ahead"),
    RecipeSetting(
        "overlap", "mesh", _switch, True, "reduce gradients while the backward pass goes on: on or off"
    ),
    RecipeSetting("threads", "mesh", _WHOLE, 1, "of BLAS in each rank; the last bits depend on it"),
    RecipeSetting("plain", "mesh", _switch, False, "a bare loop in one process, for comparison: on or off"),
    RecipeSetting("device", "mesh", parse_device, _OPTIONS.device, "cpu, cuda, cuda:N or auto"),
    RecipeSetting("graph", "mesh", _one_of(*STEP_GRAPHS), _OPTIONS.graph, "of a GPU's step: fused or tape"),
    RecipeSetting("family", "model", _one_of("zbmd", "gpt2"), _MODEL.family, "zbmd or gpt2"),
    RecipeSetting("activation", "model", _one_of("relu2", "gelu"), _MODEL.activation, "relu2 or gelu"),
    RecipeSetting("context", "model", _WHOLE, _MODEL.context, "tokens of a sequence"),
    RecipeSetting("width", "model", _WHOLE, _MODEL.width, "features of a token"),
    RecipeSetting("heads", "model", _WHOLE, _MODEL.heads, "heads of attention"),
    RecipeSetting("layers", "model", _WHOLE, _MODEL.layers, "blocks"),
    RecipeSetting("dropout", "model", _REAL, _MODEL.dropout, "rate"),
    RecipeSetting("weights", "model", Path, None, "a GPT-2 in Hugging Face's layout to begin with"),
    RecipeSetting(
        "precision", "model", _precision, _OPTIONS.precision, "float32, float64, bf16 or f16: of weights"
    ),
    RecipeSetting("loss_scale", "model", _REAL, _OPTIONS.loss_scale, "that f16 begins with"),
    RecipeSetting(
        "matmul_precision",
        "model",
        _one_of(*MATMUL_PRECISIONS),
        _OPTIONS.matmul_precision,
        "of a GPU's linear layers: default, or fp8 on compute capability 9.0",
    ),
    RecipeSetting("recompute", "model", _switch, False, "blocks keep their input alone: on or off"),
    RecipeSetting("actors", "model", _switch, False, "layers and operators are supervised actors: on or off"),
    RecipeSetting("steps", "batch and schedule", _WHOLE, _TRAINING.steps, "steps"),
    RecipeSetting("shards", "batch and schedule", _WHOLE, _TRAINING.shards, "logical shards of a batch"),
    RecipeSetting(
        "sequences_per_shard", "batch and schedule", _WHOLE, _TRAINING.sequences_per_shard, "in each shard"
    ),
    RecipeSetting("lr", "batch and schedule", _REAL, _TRAINING.learning_rate, "peak learning rate"),
    RecipeSetting("warmup", "batch and schedule", _WHOLE, _TRAINING.warmup_steps, "steps up to the peak"),
    RecipeSetting(
        "lr_floor", "batch and schedule", _REAL, _TRAINING.learning_rate_floor, "last rate, of the peak"
    ),
    RecipeSetting("curve", "batch and schedule", _one_of(*CURVES), _TRAINING.curve, f"{', '.join(CURVES)}"),
    RecipeSetting("horizon", "batch and schedule", _WHOLE, 0, "steps over which the rate goes down; 0: all"),
    RecipeSetting(
        "clip_norm", "batch and schedule", _REAL, _TRAINING.clip_norm, "bound on the gradient's norm"
    ),
    RecipeSetting("optimizer", "batch and schedule", _one_of(*OPTIMIZERS), "adamw", ", ".join(OPTIMIZERS)),
    RecipeSetting("seed", "batch and schedule", _WHOLE, _TRAINING.seed, "seed"),
    RecipeSetting("out", "run", Path, _OPTIONS.out, "directory of the run"),
    RecipeSetting("resume", "run", Path, None, "checkpoint, or the run it is of, to go on from"),
    RecipeSetting("overwrite", "run", _switch, False, "remove the files of a run that has ended in --out"),
    RecipeSetting("offload", "run", Path, None, "folder of files with the ranks' states, not in memory"),
    RecipeSetting("evaluate_every", "run", _WHOLE, _OPTIONS.evaluate_every, "steps; 0: at the end"),
    RecipeSetting("sample_every", "run", _WHOLE, 0, "steps after which the model writes a text; 0: never"),
    RecipeSetting("evaluate_windows", "run", _WHOLE, _OPTIONS.evaluate_windows, "held-out sequences"),
    RecipeSetting(
        "checkpoint_every",
        "run",
        parse_every,
        _OPTIONS.checkpoint_every,
        "steps, 0: at the end; auto: as the run measures",
    ),
    RecipeSetting("checkpoint_to", "run", str, "", "directory or URL (s3://, gs://, az://), not --out"),
    RecipeSetting("keep_checkpoints", "run", _WHOLE, _OPTIONS.keep_checkpoints, "the last so many stay"),
    RecipeSetting("keep_every", "run", _WHOLE, 0, "steps; checkpoints of these stay for ever; 0: of none"),
    RecipeSetting("checkpoint_codec", "run", _one_of("none", "zstd"), "none", "none or zstd"),
    RecipeSetting(
        "profile_ops", "run", parse_ops_every, 0, "profile each op of every N-th step: every=N or off"
    ),
    RecipeSetting("tensorboard", "run", _switch, False, "write event files for TensorBoard: on or off"),
)


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the commands of `zbmd`."""
    made = commands.add_parser(
        "train",
        help="train a GPT on a mesh of ranks from a recipe",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(made)
    made.set_defaults(run_command=_train)


def add_recipe(made: argparse.ArgumentParser) -> None:
    """Add the options of a recipe."""
    made.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="a recipe in TOML")
    made.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a design that the dashboard's page /plan has saved",
    )
    made.add_argument("--print-recipe", action="store_true", help="print the merged recipe and exit")
    groups = {setting.group: made.add_argument_group(setting.group) for setting in SETTINGS}
    for setting in SETTINGS:
        default = "" if setting.default is None else f" (default: {_text(setting.default)})"
        short = ["-n"] if setting.name == "ranks" else []
        groups[setting.group].add_argument(
            *short, setting.option, dest=setting.name, metavar="X", help=f"{setting.help}{default}"
        )


def merged(
    command_line: Mapping[str, str | None],
    environment: Mapping[str, str],
    config: Path | None,
    plan: Path | None = None,
) -> dict[str, tuple[Any, str]]:
    """Each setting's value and where it comes from. Raises `UserError`, which names the source."""
    names = [setting.name for setting in SETTINGS]
    switches = [setting.name for setting in SETTINGS if setting.parse is _switch]
    in_file = {} if config is None else read_config(config, names, switches)
    planned = {} if plan is None else read_config(plan, names, switches)
    found: dict[str, tuple[Any, str]] = {}
    for setting in SETTINGS:
        sources = (
            (setting.option, command_line.get(setting.name)),
            (setting.variable, environment.get(setting.variable)),
            (str(config), in_file.get(setting.name)),
            (str(plan), planned.get(setting.name)),
        )
        source, text = next(((s, t) for s, t in sources if t is not None), ("default", None))
        try:
            found[setting.name] = (setting.default if text is None else setting.parse(text), source)
        except UserError as error:
            in_files = source in (str(config), str(plan))
            where = f"{source}: {setting.name}" if in_files else source
            raise UserError(f"{where}: {error}") from None
    return found


def options_of(values: Mapping[str, Any]) -> TrainOptions:
    """The recipe that the settings make. Raises `UserError`."""
    ranks: int = values["ranks"]
    if not 1 <= ranks <= RANKS_MAX:
        raise UserError(f"--ranks: expected 1 to {RANKS_MAX}, got {ranks}")
    require_axes(Mesh.parse(values["mesh"], ranks))
    return TrainOptions(
        model=GPTConfig(
            **{name: values[name] for name in ("family", "activation", "context", "width", "heads")},
            layers=values["layers"],
            dropout=values["dropout"],
        ),
        training=TrainingConfig(
            **{name: values[name] for name in ("steps", "shards", "sequences_per_shard", "curve", "seed")},
            horizon=values["horizon"],
            learning_rate=values["lr"],
            warmup_steps=values["warmup"],
            learning_rate_floor=values["lr_floor"],
            clip_norm=values["clip_norm"],
            optimizer=OPTIMIZERS[values["optimizer"]],
        ),
        **{
            setting.name: values[setting.name]
            for setting in SETTINGS
            if setting.name in TrainOptions.__struct_fields__
        },
    )


NOT_REPEATED: Final = ("out", "resume", "overwrite")
"""Settings that are not in the recipe which a run writes."""

Found = dict[str, tuple[Any, str]]
"""The value of each setting, and where it comes from."""


def found_in(arguments: argparse.Namespace, *, ranks: int | None = None) -> Found:
    """Return the settings of a command line, its file and the environment.

    ranks: of the launcher that has started this one. Raises `UserError`.
    """
    on_line = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    found = merged(on_line, os.environ, arguments.recipe, arguments.plan)
    given = os.environ.get(DATA_VARIABLE)
    if found["data"][1] == "default" and given is not None:
        found["data"] = given, DATA_VARIABLE
    if ranks is not None:
        found["ranks"] = ranks, "the launcher"
    out, source = found["out"]
    if source == "default":
        resume: Path | None = found["resume"][0]
        folder = None if resume is None else folder_of(resume)
        if folder is not None:
            out = folder
        elif ranks is not None:
            out = out.parent / os.environ.get("ZBMD_JOB", out.name)
        else:
            names = (out, *(out.with_name(f"{out.name}-{number}") for number in range(2, RUNS_MAX)))
            out = next((path for path in names if not path.exists()), out)
        found["out"] = out, source
    return found


def recipe_of(argv: Sequence[str], *, ranks: int | None = None) -> TrainOptions:
    """Return the recipe of the options `argv` of `zbmd train`. Raises `UserError`."""
    made = argparse.ArgumentParser(exit_on_error=False)
    add_recipe(made)
    try:
        arguments, unknown = made.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. See zbmd train --help.") from None
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}. See zbmd train --help.")
    return options_of(values_of(found_in(arguments, ranks=ranks)))


def values_of(found: Found) -> dict[str, Any]:
    """Return the value of each setting."""
    return {name: value for name, (value, _) in found.items()}


def check(argv: Sequence[str], *, ranks: int, data: str | None) -> None:
    """Raise `UserError` for what `zbmd train` cannot do on `ranks` ranks, before one is started.

    argv: the arguments of `zbmd`; data: not used, as a recipe names its own.
    """
    if list(argv[:1]) == ["train"]:
        recipe = recipe_of(argv[1:], ranks=ranks)
        recipe.check()
        check_recipe(recipe, ranks)


def _train(arguments: argparse.Namespace) -> int:
    job = JobEnvironment.read_job(os.environ)
    found = found_in(arguments, ranks=None if job is None else job.world_size)
    options = options_of(values_of(found))
    options.check()
    if is_spare():  # it is never the first process of a rank
        uvloop.run(train(options, within=lambda: _claimed_by_first(options.out)))
        return 0
    launched = RankEnvironment.read(os.environ)
    is_new = found["out"][1] == "default" and options.resume is None and not arguments.print_recipe
    for _ in range(RUNS_MAX if is_new and launched is None else 0):
        if make_new(options.out):
            break
        found = found_in(arguments)  # another run was faster
        options = options_of(values_of(found))
    is_first = launched is None or (launched.rank == 0 and not launched.is_again)
    if is_first:
        stream = sys.stdout if arguments.print_recipe else sys.stderr
        for name, (value, source) in found.items():
            line = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}  # {source}"
            print(line, file=stream)
    if arguments.print_recipe:
        return 0
    with _claimed_by_first(options.out):
        if is_first:
            if options.overwrite:
                remove_run(options.out)
            if launched is not None or options.resume is not None or not holders_of(options.out):
                begin_log(options.out, options.resume)  # what is there may be another run's
            if options.resume is not None:
                drop_held(options.out)
            write_recipe(found)
        if launched is not None or options.plain:
            uvloop.run(train(options))
            return 0
        options = from_whole(options)  # once for all ranks
        if options.profile_ops and not options.device.startswith("cuda"):
            measure_peaks(options, found["ranks"][0])
        start = ["run", "-n", str(found["ranks"][0]), "--on-loss", found["on_loss"][0]]
        return node_cli.main([*start, "-m", "zbmd.training.sharded", options.encode()])


def _claimed_by_first(out: Path) -> contextlib.AbstractContextManager[None]:
    """Claim the directory of a run, if this process is its launcher or rank 0, also a replacement of it."""
    launched = RankEnvironment.read(os.environ)
    return claimed(out) if launched is None or launched.rank == 0 else contextlib.nullcontext()


def measure_peaks(options: TrainOptions, ranks: int) -> None:
    """Measure what ops are compared with, once on this machine, before ranks use it."""
    environ = {**os.environ, **dict.fromkeys(THREADS_VARIABLES, str(options.threads))}
    dtype = computing_dtype(storage_dtype(options.precision)).name
    with contextlib.suppress(UserError):  # the profile is without them
        peak_of(this_machine(parallel=ranks, dtype=dtype, environ=environ))


def write_recipe(found: Found) -> None:
    """Write recipe.toml, which repeats a run elsewhere, into the directory of the run. Raises `UserError`."""
    settings = {name: value for name, (value, _) in found.items() if name not in NOT_REPEATED}
    lines = []
    for name, value in settings.items():
        is_path = name == "data" or isinstance(value, Path)
        text = None if value is None else _toml(str(Path(value).absolute()) if is_path else value)
        lines.append(f"# {name} is not set" if text is None else f"{name} = {text}")
    data = "\n".join([*lines, ""]).encode()
    write_atomically(found["out"][0] / RECIPE_NAME, lambda file: file.write(data))


def _text(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else msgspec.json.encode(_text(value)).decode()
