"""Bugs planted in production code: `zbmd sim hunt` finds and shrinks them, and its command shows them again.

A mutation replaces pieces of functions' sources: if a piece is no longer there, the test says so.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from zbmd.tools.entry.zbmd import main
from zbmd.tools.sim import command as sim_cli
from zbmd.transport.sim import RunOutcome, parse_plan, shrink

SHRINK_RUNS = 10
"""Runs that shrink a finding, except for the first bug of each scenario."""
HUNT_SECONDS = 240
"""Only what is not found takes so long, or a machine that is busy with other work."""


@dataclass(frozen=True)
class Edit:
    """In `function` ("module:Class.method"), `old`, which is there once, becomes `new`."""

    function: str
    old: str
    new: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Compile the changed function in its module, and put it in the place of the right one."""
        module_name, _, path = self.function.partition(":")
        owner: Any = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        source = textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, name)))
        assert source.count(self.old) == 1, f"{self.function} has changed: adapt this mutation"
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<planted in {path}>", "exec", flags)
        scope: dict[str, Any] = {}
        exec(code, vars(sys.modules[module_name]), scope)
        patch.setattr(owner, name, scope[name])


@dataclass(frozen=True)
class Mutation:
    """A planted bug, the scenario that must find it, and how that may show.

    The hunt begins at `seed`, which shows it: if a change of the code has it show no longer, that goes on.
    """

    what: str
    scenario: str
    edits: tuple[Edit, ...]
    outcomes: tuple[RunOutcome, ...]
    size: str = ""
    seed: int = field(kw_only=True)


BROKEN = (RunOutcome.SAFETY, RunOutcome.CRASH)
ANY = (RunOutcome.SAFETY, RunOutcome.CRASH, RunOutcome.LIVENESS)


def require_found(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    """Plant the bug; hunt, shrink and repeat it. whole: shrink it as far as it goes."""
    if not whole:
        monkeypatch.setattr(sim_cli, "shrink", partial(shrink, runs_max=SHRINK_RUNS))
    for edit in mutation.edits:
        edit.plant(monkeypatch)
    hunt = f"sim hunt --scenario {mutation.scenario} --seed {mutation.seed} --seconds {HUNT_SECONDS} --jobs 1"
    code = main([*hunt.split(), *mutation.size.split()])
    told = capsys.readouterr().out
    assert code in {outcome.exit_code for outcome in mutation.outcomes}, told
    found, shrunk = commands_of(told)
    assert all(small <= large for small, large in zip(size_of(shrunk), size_of(found), strict=True))
    assert main(shrunk[1:]) == code
    assert f"again: {shlex.join(shrunk)}" in capsys.readouterr().out.splitlines(), "it prints itself"


def commands_of(told: str) -> tuple[list[str], list[str]]:
    """The command line of the run that was found, and of the shrunk one."""
    found = re.search(r"^found: (.*)$", told, re.MULTILINE)
    shrunk = re.search(r"^again: (.*)$", told, re.MULTILINE)
    assert found is not None and shrunk is not None, told
    return shlex.split(found[1]), shlex.split(shrunk[1])


def size_of(command: list[str]) -> tuple[int, int, int]:
    """Faults, ranks and length of a run."""
    values = dict(zip(command[4::2], command[5::2], strict=True))
    plan = () if values["--faults"] == "0" else parse_plan(values["--faults"])
    return len(plan), int(values["--ranks"]), int(values["--length"])
