"""`zbmd generate`, `ledger` and `plot`: text, proof and picture of what a run left behind."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from zbmd.tools.cli.options import add_command
from zbmd.tools.runs.plot_draw import FORMATS, PICTURE_NAME, plot_run
from zbmd.training.autograd.array_module import Array, bfloat16
from zbmd.training.checkpoint.plan import Plan, TaskPlan, read_plan
from zbmd.training.checkpoint.sharded import load_trained
from zbmd.training.config import VOCABULARY
from zbmd.training.data.corpus import CORPUS_FILE, Corpus
from zbmd.training.data.token_corpus import TokenCorpus, read_manifest
from zbmd.training.data.tokenizers import TOKENIZER_NAME, BPETokenizer
from zbmd.training.model.generate import generate, generate_tokens
from zbmd.training.model.gpt import GPT
from zbmd.training.run.audit import Audit, audit, audit_loop
from zbmd.training.run.ledger import LOG_NAME, read_log, read_record
from zbmd.training.run.loop_steps import LoopPlan
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError


def audit_run(directory: Path) -> Audit:
    """Compare the commit log of a finished run with the samples that its plan asks for.

    Raises `UserError` if the directory holds no commit log or not the corpus that the log names.
    """
    header, records = read_log(directory / LOG_NAME)
    if LoopPlan.read(header.plan) is not None:
        last = read_record(directory / LOG_NAME)  # from the end: behind damage there may be more
        return audit_loop(
            records,
            base_version=header.base_version,
            last_version=header.base_version if last is None else last.version,
        )
    own = TaskPlan.read(header.plan)
    if own is not None:
        return audit(
            records,
            lambda version: own.order.sample_ids(version - 1).reshape(-1).tolist(),
            base_version=header.base_version,
            steps=own.steps - header.base_version,
        )
    plan = read_plan(header.plan)
    corpus = _corpus_of(directory, plan)
    recipe = Recipe(GPT(plan.model), corpus, plan.training)
    return audit(
        records,
        lambda version: recipe.sample_ids(version - 1).reshape(-1).tolist(),
        base_version=header.base_version,
        steps=plan.training.steps - header.base_version,
    )


def _corpus_of(directory: Path, plan: Plan) -> Corpus:
    """Return the corpus of a run, of bytes or of tokens. Raises `UserError` if it is missing."""
    context, tokens = plan.model.context, read_manifest(directory)
    if tokens is not None and tokens.digest == plan.corpus:
        return TokenCorpus(directory, context=context)
    corpus = Corpus(directory / CORPUS_FILE, context=context)
    if corpus.header.digest != plan.corpus:
        raise UserError(
            f"{directory / CORPUS_FILE} is not the corpus of this run: its digest is "
            f"{corpus.header.digest[:16]}, the log names {plan.corpus[:16]}. Restore it, or train again."
        )
    return corpus


def _generate(arguments: argparse.Namespace) -> int:
    from zbmd.training.ops.cuda.module import DeviceModule
    from zbmd.training.sharded.devices import open_for_generation, parse_device

    path: Path = arguments.weights
    params, config, step = load_trained(path)
    print(f"weights of step {step} from {path}", file=sys.stderr)
    sys.stdout.buffer.write(arguments.prompt.encode())
    executor = open_for_generation(parse_device(arguments.device), config)
    model, weights = GPT(config), params
    if executor is not None:
        print(f"device {executor.name}", file=sys.stderr)
        model = GPT(config, xp=DeviceModule(executor))
        weights = model.xp.asarray(params.astype(bfloat16()))
    for text in _sampled(path, model, weights, arguments):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    print(flush=True)
    return 0


def _sampled(path: Path, model: GPT, params: Array, arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield the continuation of the prompt, decoded by the tokenizer beside the weights if there is one."""
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
    return 0 if found.is_whole else 1


def _plot(arguments: argparse.Namespace) -> int:
    print(plot_run(arguments.run, arguments.out))
    return 0


def add_generate(commands: Any) -> None:
    """Add `generate` to the commands of `zbmd`."""
    sample = add_command(
        commands,
        "generate",
        "print text sampled from trained weights",
        examples=(
            "zbmd generate zbmd-runs/demo --prompt 'def main(' --length 400",
            "zbmd generate weights.safetensors --temperature 0",
        ),
    )
    sample.add_argument("weights", type=Path, help="weights, a checkpoint, or the directory of a run")
    sample.add_argument("--prompt", default="import ", help="text to continue (default: %(default)r)")
    sample.add_argument("--length", type=int, default=400, help="tokens to add (default: %(default)s)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)"
    )
    sample.add_argument("--top-k", type=int, default=40, help="tokens to draw from (default: %(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    sample.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto (default: %(default)s)")
    sample.set_defaults(run_command=_generate)


def add_ledger(commands: Any) -> None:
    """Add `ledger` to the commands of `zbmd`."""
    ledger = add_command(
        commands,
        "ledger",
        "prove from the commit log that no sample was lost",
        description="Compare the commit log with the samples that the run asked for. Exit code 1: a step or "
        "a sample was lost, skipped or repeated.",
        examples=("zbmd ledger zbmd-runs/demo",),
    )
    ledger.add_argument("run", type=Path, help="the directory of a run")
    ledger.set_defaults(run_command=_ledger)


def add_plot(commands: Any) -> None:
    """Add `plot` to the commands of `zbmd`."""
    plot = add_command(
        commands,
        "plot",
        "draw a run: losses, deaths and recoveries, time of each step",
        examples=("zbmd plot zbmd-runs/demo -o demo.svg",),
    )
    plot.add_argument("run", type=Path, help="the directory of a run")
    plot.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"{' or '.join(FORMATS)} file to write (default: {PICTURE_NAME} in the directory of the run)",
    )
    plot.set_defaults(run_command=_plot)
