"""`cpu:zbmd,cuda:nccl`: another backend in a process group of ours, made again with the membership."""

from __future__ import annotations

import importlib
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome
from zbmd.transport.errors import LocalProtocolError, PeerLost, UserError

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS = 3
TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "programs" / "torch" / "devices" / "beside_nccl.py"


async def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> tuple[list[str], dict[tuple[int, int], list[str]]]:
    """Return what the ranks print, and by rank and size what each communicator of the other backend has done.

    Two communicators of a rank end in any order: one of them is aborted by a thread of its group.
    """
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    output, log = Lines(), tmp_path / "log"
    config = HostConfig(
        target=str(PROGRAM),
        arguments=(name, str(log)),
        world_size=RANKS,
        on_loss=OnLoss.REPLACE,
        preload=("torch",),
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    text = "\n".join(output.lines)
    assert result.outcome is Outcome.SUCCEEDED, text
    assert sum(line.endswith(": good") for line in output.lines) == RANKS, text
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for line in log.read_text().splitlines():
        rank, size, what = line.split(" ", 2)
        found[int(rank), int(size)].append(what)
    return output.lines, found


async def test_tensors_go_to_the_backend_of_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, log = await run(tmp_path, monkeypatch, "operations")
    assert log == {
        (0, 3): ["made 0", "shut down"],
        (0, 2): ["made 0", "shut down"],
        (1, 3): ["made 1", "shut down"],
        (2, 3): ["made 2", "shut down"],
        (2, 2): ["made 1", "shut down"],
    }


async def test_a_death_ends_what_waits_in_the_other_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever; the group of two ranks that lost nobody is shut down with the others."""
    _, log = await run(tmp_path, monkeypatch, "lost")
    for rank in (0, 1):
        made = f"made {rank}"
        assert log[rank, 3] == [made, "aborted", made, "shut down"], log
        assert log[rank, 2] == [made, "shut down", made, "shut down"], log
    assert log[2, 3] == ["made 2", "made 2", "shut down"], log


async def test_a_loop_makes_it_again_with_the_same_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, log = await run(tmp_path, monkeypatch, "loop")
    assert len({line.partition("total ")[2] for line in lines if "total" in line}) == 1, lines
    for rank in (0, 2):
        made = f"made {rank}"
        assert log[rank, 3] == [made, "aborted", made, "shut down"], log
    assert log[1, 3] == ["made 1", "made 1", "shut down"], log


# The machine.


def lost(epoch: int = 0) -> Any:
    from zbmd.collectives.torch.cuda.companion_machine import Lost

    return Lost(epoch, PeerLost("rank1", "it has ended"))


@pytest.mark.parametrize("seed", range(50))
def test_each_epoch_has_one_life_of_communicators(seed: int) -> None:
    """Under any order of notices: made once an epoch, ended once, and never two at a time."""
    from zbmd.collectives.torch.cuda import companion_machine as c

    draw, machine, live, epoch = random.Random(seed), c.CompanionMachine(), 0, 0
    for _ in range(30):
        match draw.choice(["made", "lost", "late", "any"]):
            case "made":
                epoch += draw.randint(1, 3)
                event: Any = c.Made(epoch)
            case "lost":
                event = lost(epoch) if epoch else lost()
            case "late":
                event = lost(max(1, epoch - 1) if epoch > 1 else 99)
            case _:
                event = lost()
        for action in machine.handle(event):
            live += {c.Make: 1, c.Abort: -1, c.Shutdown: -1}[type(action)]
            assert live in (0, 1), "they are made before the former ones have ended, or ended twice"
        assert (machine.stage is c.Stage.LIVE) == bool(live)
        assert (machine.error is not None) == (machine.stage is c.Stage.ABORTED)
    before = machine.stage
    assert machine.handle(c.Closed()) == ([c.Shutdown()] if before is c.Stage.LIVE else [])
    assert not machine.handle(lost()) and not machine.handle(c.Closed())
    with pytest.raises(LocalProtocolError):
        machine.handle(c.Made(epoch + 1))


def test_an_epoch_is_not_made_twice() -> None:
    from zbmd.collectives.torch.cuda import companion_machine as c

    machine = c.CompanionMachine()
    assert machine.handle(c.Made(3)) == [c.Make(3)]
    assert not machine.handle(lost(2)), "the notice of an epoch that is over"
    assert machine.handle(c.Made(4)) == [c.Abort(), c.Make(4)], "live ones end first"
    with pytest.raises(LocalProtocolError, match="epoch 4 after"):
        machine.handle(c.Made(4))


# What PyTorch lacks.


def test_pytorch_without_nccl_is_told_what_to_do() -> None:
    dist: Any = importlib.import_module("torch.distributed")

    from zbmd.collectives.torch.cuda.companions import Companions

    cases = [({"xpu": "none"}, "no backend 'none'")]
    if not dist.is_nccl_available():
        cases.append(({"cuda": "nccl"}, "built without NCCL"))
    for wanted, text in cases:
        with pytest.raises(UserError, match=text):
            Companions(wanted, None, "g", []).made(1, dist.HashStore(), 1.0, rank=0, size=1)


def test_calls_reach_another_backend_in_its_own_form() -> None:
    """However they were called: with options, with keywords, several pairs at once."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")

    from zbmd.collectives.torch.cuda.companions import pass_on

    store = dist.HashStore()
    gloo: Any = dist.ProcessGroupGloo(store, 0, 1)
    x, out = torch.full((3,), 2.0), torch.zeros(3)
    pass_on(gloo, "allreduce", ([x],), {"op": dist.ReduceOp.MAX}).wait()
    pass_on(gloo, "allreduce", ([x], dist.ReduceOp.SUM), {}).wait()
    pass_on(gloo, "broadcast", ([x],), {"root": 0}).wait()
    pass_on(gloo, "all_gather_single_coalesced", ([out], [x], None, None), {}).wait()
    assert torch.equal(out, x)
    outs = [torch.zeros(3)]
    pass_on(gloo, "allgather", ([outs], [x], dist.distributed_c10d.AllgatherOptions()), {}).wait()
    assert torch.equal(outs[0], x)
    pass_on(gloo, "all_to_all_single", (out, x + 1, [], [], None), {}).wait()
    assert torch.equal(out, x + 1)
