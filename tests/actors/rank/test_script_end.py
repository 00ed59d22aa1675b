"""The calls at the end of a rank's script."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PROGRAMS

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.exit import CALLBACKS_MAX, at_script_end, script_ended
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss, Outcome
from zbmd.transport.errors import LocalProtocolError


def test_the_latest_is_called_first_and_each_once() -> None:
    called: list[tuple[int, bool]] = []
    for k in range(CALLBACKS_MAX):
        at_script_end(lambda failed, k=k: called.append((k, failed)))  # type: ignore[misc]
    with pytest.raises(LocalProtocolError, match=f"at most {CALLBACKS_MAX} callbacks"):
        at_script_end(lambda _: None)
    script_ended(failed=True)
    script_ended(failed=False)
    assert called == [(k, True) for k in reversed(range(CALLBACKS_MAX))]


@pytest.mark.parametrize(
    ("end", "failed"),
    [("returns", False), ("0", False), ("3", True), ("raises", True)],
)
async def test_a_rank_calls_them_while_threads_may_still_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, failed: bool
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    script = PROGRAMS / "actors/script_end.py"
    lines: list[str] = []

    class Lines:
        async def write_line(self, line: OutputLine) -> None:
            lines.append(line.text.decode())

    result = await Host(
        HostConfig(target=str(script), arguments=(end,), world_size=1, on_loss=OnLoss.STOP), output=Lines()
    ).run()
    assert (result.outcome is Outcome.SUCCEEDED) is not failed
    assert f"failed {failed}" in lines, lines
