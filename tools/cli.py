"""The `zbmd` command: look at what runs left behind, and run the system in a simulated world."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.actors.rank_log import log_to_stderr
from zbmd.tools import bench_cli, sim_cli
from zbmd.tools.flight import add_flights
from zbmd.tools.plan_cli import add_plan
from zbmd.tools.plot import FORMATS, PICTURE_NAME, plot_run
from zbmd.tools.profile_cli import add_profile
from zbmd.tools.replay_cli import add_replay
from zbmd.tools.train_cli import add_train
from zbmd.training.config import VOCABULARY, GPTConfig, TrainingConfig
from zbmd.training.corpus import CORPUS_FILE, Corpus
from zbmd.training.generate import generate, generate_tokens
from zbmd.training.gpt import GPT
from zbmd.training.journal import WEIGHTS_NAME
from zbmd.training.ledger import LOG_NAME, Audit, audit, read_log
from zbmd.training.recipe import Recipe
from zbmd.training.tokens import TOKENIZER_NAME, BPETokenizer
from zbmd.training.weights import load_weights
from zbmd.transport.errors import UserError

EXAMPLES = """examples:
  zbmd train --data 'texts/**/*.txt' --mesh dp=2,tp=2 --ranks 4
  zbmd generate zbmd-runs/demo --prompt 'def main(' --length 400
  zbmd ledger zbmd-runs/demo
  zbmd plot zbmd-runs/demo -o demo.svg
  zbmd profile zbmd-runs/demo
  zbmd trace zbmd-runs/demo --steps 20:24
  zbmd replay run.zlog --until hang
  zbmd flights --trace flights.json
  zbmd sim hunt --minutes 2
  zbmd plan pipeline --stages 4 --microbatches 8 --schedule 1f1b
  zbmd bench p2p --vs openmpi
"""


def audit_run(directory: Path) -> Audit:
    """Compare the commit log of a finished run with the samples that its plan asks for.

    Raises `UserError` if the directory holds no commit log or not the corpus that the log names.
    """
    header, records = read_log(directory / LOG_NAME)
    plan = read_plan(header.plan)
    corpus = Corpus(directory / CORPUS_FILE, context=plan.model.context)
    if corpus.header.digest != plan.corpus:
        raise UserError(
            f"{directory / CORPUS_FILE} is not the corpus of this run: its digest is "
            f"{corpus.header.digest[:16]}, the log names {plan.corpus[:16]}. Restore it, or train again."
        )
    recipe = Recipe(GPT(plan.model), corpus, plan.training)
    return audit(
        records,
        lambda version: recipe.sample_ids(version - 1).reshape(-1).tolist(),
        base_version=header.base_version,
        steps=plan.training.steps - header.base_version,
    )


class Plan(msgspec.Struct, kw_only=True):
    """What a commit log says of its run (`LogHeader.plan`)."""

    model: GPTConfig
    training: TrainingConfig
    corpus: str
    reduction: str


def read_plan(text: str) -> Plan:
    """The plan in a commit log. Raises `UserError`."""
    try:
        return msgspec.json.decode(text, type=Plan)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the plan in the commit log cannot be read ({error}): restore the log.") from None


def _generate(arguments: argparse.Namespace) -> int:
    path: Path = arguments.weights
    params, config, step = load_weights(path / WEIGHTS_NAME if path.is_dir() else path)
    print(f"weights of step {step} from {path}", file=sys.stderr)
    sys.stdout.buffer.write(arguments.prompt.encode())
    for text in _sampled(path, GPT(config), params, arguments):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    print(flush=True)
    return 0


def _sampled(
    path: Path, model: GPT, params: npt.NDArray[np.float32], arguments: argparse.Namespace
) -> Iterator[bytes]:
    """What is added to the prompt: by the tokenizer that lies beside the weights, if there is one."""
    drawing = {"temperature": arguments.temperature, "top_k": arguments.top_k, "seed": arguments.seed}
    beside = (path if path.is_dir() else path.parent) / TOKENIZER_NAME
    if model.config.vocabulary == VOCABULARY or not beside.exists():
        prompt = arguments.prompt.encode()
        yield from generate(model, params, prompt=prompt, length=arguments.length, **drawing)
        return
    tokenizer = BPETokenizer.load(beside)
    tokens = tokenizer.encode(arguments.prompt.encode()).tolist() or [tokenizer.separator]
    for token in generate_tokens(model, params, prompt=tokens, length=arguments.length, **drawing):
        yield tokenizer.decode([token])


def _ledger(arguments: argparse.Namespace) -> int:
    found = audit_run(arguments.run)
    print(msgspec.json.encode(found).decode())
    return 1 if found.steps_lost or found.samples_skipped or found.samples_repeated else 0


def _plot(arguments: argparse.Namespace) -> int:
    print(plot_run(arguments.run, arguments.out))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="zbmd",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    sample = commands.add_parser("generate", help="print text sampled from trained weights")
    sample.add_argument("weights", type=Path, help="a weights file, or the directory of a run")
    sample.add_argument("--prompt", default="import ", help="text to continue (%(default)r)")
    sample.add_argument("--length", type=int, default=400, help="tokens to add (%(default)s)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest (%(default)s)"
    )
    sample.add_argument("--top-k", type=int, default=40, help="draw from so many tokens (%(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="another seed, another text (%(default)s)")
    sample.set_defaults(run_command=_generate)
    ledger = commands.add_parser("ledger", help="prove from the commit log that no sample was lost")
    ledger.add_argument("run", type=Path, help="the directory of a run")
    ledger.set_defaults(run_command=_ledger)
    plot = commands.add_parser("plot", help="draw the run: losses, deaths and recoveries, time of each step")
    plot.add_argument("run", type=Path, help="the directory of a run")
    plot.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"{' or '.join(FORMATS)} file to write ({PICTURE_NAME} in the directory of the run)",
    )
    plot.set_defaults(run_command=_plot)
    add_replay(commands)
    add_flights(commands)
    add_profile(commands)
    add_plan(commands)
    add_train(commands)
    sim_cli.add_parser(commands)
    bench_cli.add_parser(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 2: bad input; 1: the ledger does not balance, or a replay differs.

    See `sim_cli` and `bench_cli` for others.
    """
    log_to_stderr()
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run_command(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
