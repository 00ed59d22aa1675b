"""One setting of a run: how it is spelled, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: its name (TOML key; `--name` and ZBMD_NAME alike), parser and what it means.

    torchrun: torchrun has it too, under the same name, and so PET_NAME is read where ZBMD_NAME is not set.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    metavar: str
    help: str
    torchrun: bool = False

    @property
    def option(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "ZBMD_" + self.name.upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """All environment variables that are read, the first one first."""
        return (self.variable, "PET_" + self.name.upper()) if self.torchrun else (self.variable,)
