"""Ranks of the programs in `programs/torch/backend`, under a host as `zbmd-node run` has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from programs import PROGRAMS

from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome


class RunRanks(Protocol):
    """Runs `programs/torch/backend/NAME.py` as a job's ranks, and checks that `good` of them print "good".

    good: 0 for all; is_warm: the ranks find PyTorch imported, with the variables of this process; options: of
    `HostConfig`.
    """

    async def __call__(
        self,
        name: str,
        *arguments: str,
        ranks: int,
        good: int = 0,
        links: str = "auto",
        is_warm: bool = True,
        **options: Any,
    ) -> None: ...


@pytest.fixture
def run_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRanks:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))

    async def run(
        name: str,
        *arguments: str,
        ranks: int,
        good: int = 0,
        links: str = "auto",
        is_warm: bool = True,
        **options: Any,
    ) -> None:
        monkeypatch.setenv("ZBMD_LINKS", links)
        output, target = Lines(), PROGRAMS / "torch" / "backend" / f"{name}.py"
        given: dict[str, Any] = {"on_loss": OnLoss.STOP, "arguments": arguments, **options}
        config = HostConfig(target=str(target), world_size=ranks, **given)
        template = template_of(config) if is_warm else None
        result = await Host(config, output=output, template=template).run()
        text = "\n".join(output.lines)
        assert result.outcome is Outcome.SUCCEEDED, text
        assert sum(line.endswith(": good") for line in output.lines) == (good or ranks), text

    return run
