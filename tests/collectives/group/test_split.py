"""Sub-groups of a group among real ranks, over shared memory and over TCP; one rank is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import Outcome
from zbmd.collectives.programs.channels import SUBGROUPS_MAX
from zbmd.transport.errors import LocalProtocolError, UserError


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_a_mesh_of_ranks_one_of_which_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    script = PROGRAMS / "collectives/split.py"
    ended = await run_and_kill_the_last(
        script, tmp_path, monkeypatch, ranks=4, links=links, arena_bytes=16 << 20
    )
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["ready"] == {0, 1, 2, 3} and ended.said["done"] == {0, 1, 2}, ended.lines


async def test_who_closes_and_leaves_behind_the_last_operation_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_ALGORITHM", "tree")  # the root is done long before the others
    script = PROGRAMS / "collectives/close_behind.py"
    output = Lines()
    config = HostConfig(target=str(script), world_size=3, preload=("zbmd",), arena_bytes=16 << 20)
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum("sum 0.0" in line for line in output.lines) == 3, output.lines


async def test_a_world_of_one_has_sub_groups_too() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        parts = [await group.subgroup([0]) for _ in range(SUBGROUPS_MAX)]
        assert (await parts[-1].all_reduce(np.ones(3)) == 1).all()
        with pytest.raises(LocalProtocolError, match="close one"):
            await group.split(0)
        await parts[0].close()
        await parts[0].close()  # again, it does nothing
        nested = await parts[1].split(3)
        assert nested is not None
        await nested.barrier()
        await nested.close()
        for part in parts:
            await part.close()
        await group.close()


async def test_misuse_is_told() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        for ranks in ([], [0, 0]):
            with pytest.raises(UserError, match="each once, and this one, 0, among them"):
                await group.subgroup(ranks)
        for ranks in ([1], [0, 5], [-1]):
            with pytest.raises(UserError, match="is not a rank of this group: expected 0"):
                await group.subgroup(ranks)
        with pytest.raises(UserError, match="out of bounds"):
            await group.split(2**70)
        with pytest.raises(LocalProtocolError, match="is for sub-groups"):
            await zbmd.group(worker, channel=8)
        await group.close()


async def test_a_member_that_does_not_come_is_waited_for_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    script = PROGRAMS / "collectives/late_member.py"
    output = Lines()
    host = Host(HostConfig(target=str(script), world_size=2, preload=("zbmd",)), output=output)
    result = await host.run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
