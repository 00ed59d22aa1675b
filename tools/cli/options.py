"""Commands and options in one form: one option has one spelling and one meaning everywhere."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import msgspec

from zbmd.transport.errors import UserError, ZbmdError

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


class LazyParser(argparse.ArgumentParser):
    """fill: adds the options and `run_command`; called once, ahead of the first words that it parses."""

    def __init__(
        self, *words: Any, fill: Callable[[argparse.ArgumentParser], None] | None = None, **more: Any
    ) -> None:
        super().__init__(*words, **more)
        self._fill = fill

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As `argparse.ArgumentParser`."""
        self.fill_now()
        return super().parse_known_args(args, namespace)

    def fill_now(self) -> None:
        """Add the options, if that has not been done yet."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)


def script_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m zbmd.tools.MODULE`, whose help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m zbmd.tools.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


ArgumentsP = ParamSpec("ArgumentsP")


def exit_code_of(main: Callable[ArgumentsP, int]) -> Callable[ArgumentsP, int]:
    """Decorate the `main` of a script: it prints a `ZbmdError` and returns 1; 2 if that is a `UserError`."""

    @functools.wraps(main)
    def run(*args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except ZbmdError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED

    return run


Options = argparse.ArgumentParser | argparse._ArgumentGroup


def add_command(
    commands: Any,
    name: str,
    summary: str,
    *,
    description: str | None = None,
    examples: Sequence[str] = (),
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command: a one-line `summary`, the same or a longer `description`, and examples at its end.

    epilog: stands at the end instead of the examples.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=format_examples(examples) if examples else epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def format_examples(examples: Sequence[str]) -> str:
    """Return the epilog of a command's help."""
    return "\n".join(["examples:", *(f"  {example}" for example in examples)])


def add_ranks(options: Options, default: int | None, help: str = "processes to start") -> None:
    """Add `-n`, `--ranks`. default: None if the command draws or derives the number."""
    shown = "" if default is None else " (default: %(default)s)"
    options.add_argument("-n", "--ranks", type=int, default=default, metavar="N", help=f"{help}{shown}")


def add_json(options: Options) -> None:
    """Add `--json`."""
    options.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def add_plot(options: Options) -> None:
    """Add `--plot`."""
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the result, as .png or .svg")


def add_sizes(options: Options, default: str) -> None:
    """Add `--sizes`."""
    help_text = "FIRST:LAST[:FACTOR] or A,B,C, with K, M, G (default: %(default)s)"
    options.add_argument("--sizes", default=default, metavar="SIZES", help=help_text)


def add_turns(options: Options, peers: Sequence[str], rounds: int) -> None:
    """Add `--vs` and `--rounds`."""
    options.add_argument(
        "--vs", action="append", default=[], metavar="PEERS", help=f"run in turn with: {', '.join(peers)}"
    )
    help_text = "rounds: each contender has a turn in each (default: %(default)s)"
    options.add_argument("--rounds", type=int, default=rounds, metavar="N", help=help_text)


def add_at(options: Options) -> None:
    """Add `--at`."""
    options.add_argument(
        "--at", metavar="HOST:PORT", help="node of the cluster to ask (default: the node of this host)"
    )


def listed(option: str, given: Sequence[str], choices: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an option that takes `A,B,C` and may be repeated, each once.

    Raises `UserError` for a value that is not one of `choices`.
    """
    names = tuple(dict.fromkeys(name for text in given for name in text.split(",") if name))
    for name in names:
        if name not in choices:
            raise UserError(f"{option}: expected some of {', '.join(choices)}, got {name!r}")
    return names


def by_names(struct: msgspec.Struct, *lists: str) -> dict[str, Any]:
    """Return the fields by their names, also those of the structs in `lists`: on the wire they are arrays."""
    inner = {name: [msgspec.structs.asdict(one) for one in getattr(struct, name)] for name in lists}
    return msgspec.structs.asdict(struct) | inner
