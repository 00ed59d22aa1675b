"""A command imports what it needs, and nothing of the others."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from zbmd.tools.entry import zbmd as cli
from zbmd.tools.node import cli as node_cli
from zbmd.transport.errors import UserError

CHOSEN = "import sys; from {module} import main; main({words})"


def imported(module: str, *words: str) -> set[str]:
    """All modules of a process that runs the command; its last argument makes it end with the parser."""
    program = f"import sys, atexit; atexit.register(lambda: print(*sys.modules)); {CHOSEN}"
    done = subprocess.run(
        [sys.executable, "-c", program.format(module=module, words=list(words))],
        capture_output=True,
        text=True,
        check=False,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (
            ("bench", "p2p", "--help"),
            ("training.model.gpt", "actors.core.system", "tools.sim.command"),
        ),
        (("plot", "--help"), ("tools.bench.command", "actors.core.system", "tools.train.command")),
        (("plan", "--help"), ("tools.bench.command", "training.model.gpt", "transport.memory.segment")),
    ],
)
def test_a_command_of_zbmd_imports_no_other(words: tuple[str, ...], others: tuple[str, ...]) -> None:
    found = imported("zbmd.tools.entry.zbmd", *words)
    assert "zbmd.tools.entry.zbmd" in found and not {f"zbmd.{name}" for name in others} & found


def test_a_command_of_a_node_imports_no_other() -> None:
    found = imported("zbmd.tools.node.cli", "status", "--help")
    assert not {"zbmd.tools.doctor.command", "zbmd.actors.cluster.jobs.host", "zbmd.tools.node.run"} & found


def choices(complaint: str) -> set[str]:
    """Return what argparse offers instead of an unknown command."""
    return set(re.findall(r"'([a-z]+)'", complaint.partition("choose from")[2]))


def test_every_command_is_in_its_table_with_what_adds_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["nothing"])
    assert choices(capsys.readouterr().err) == set(cli.COMMANDS)
    with pytest.raises(UserError) as told:
        node_cli.parser().parse_args(["nothing"])
    assert choices(str(told.value)) == set(node_cli.ADDS)
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.parser(name).parse_args(["nothing"])
        assert name in choices(capsys.readouterr().err)
    for name in node_cli.ADDS:
        with pytest.raises(UserError) as told:
            node_cli.parser(name).parse_args(["nothing"])
        assert name in choices(str(told.value))
