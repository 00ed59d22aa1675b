"""A setting of a run: its spellings and parser; and the merged settings, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbmd.actors.hangs.verdict import OnHang
from zbmd.actors.rank.environment import OFF
from zbmd.actors.view import OnLoss
from zbmd.transport.capture import Detail


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A setting's value and where it came from."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The merged settings of a run."""

    chosen: Mapping[str, Chosen]

    def __getitem__(self, name: str) -> Any:
        """The value of a setting."""
        return self.chosen[name].value

    def source(self, name: str) -> str:
        """Return the source of a setting's value."""
        return self.chosen[name].source

    def with_value(self, name: str, value: Any, source: str) -> Settings:
        """The same with another value of one setting."""
        return Settings(chosen={**self.chosen, name: Chosen(value=value, source=source)})

    def lines(self) -> list[str]:
        """The settings as TOML, each with its source."""
        return [_toml_line(name, c) for name, c in self.chosen.items()]


def _toml_line(name: str, chosen: Chosen) -> str:
    match chosen.value:
        case None:
            return f"# {name} is not set"
        case 0.0 if name == "progress_deadline":
            value = f'"{OFF}"'
        case OnLoss() | OnHang() | Detail() as choice:
            value = f'"{choice.value}"'
        case float() as seconds:
            value = f'"{seconds:g}s"'
        case int() as number:
            value = str(number)
        case other:
            escaped = str(other).replace("\\", "\\\\").replace('"', '\\"')
            value = f'"{escaped}"'
    return f"{name} = {value}  # {chosen.source}"
