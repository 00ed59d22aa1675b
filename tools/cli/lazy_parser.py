"""A command's parser that gets its options once it is chosen, from a module that is imported then."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


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
