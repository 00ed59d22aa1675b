"""Options that several commands share: one option has one spelling and one meaning everywhere."""

from __future__ import annotations

import argparse

Options = argparse.ArgumentParser | argparse._ArgumentGroup


def add_ranks(options: Options, default: int | None, help: str = "processes to start") -> None:
    """Add `-n`, `--ranks`. default: None if the command draws or derives the number."""
    shown = "" if default is None else " (default: %(default)s)"
    options.add_argument("-n", "--ranks", type=int, default=default, metavar="N", help=f"{help}{shown}")


def add_json(options: Options) -> None:
    """Add `--json`."""
    options.add_argument("--json", action="store_true", help="print one JSON object on standard output")
