"""Copies of optimizers, and what FSDP2 is expected to have."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy as copying
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

dist: Any = importlib.import_module("torch.distributed")
fsdp: Any = importlib.import_module("torch.distributed.fsdp")
ours: Any = importlib.import_module("zbmd.training.torch.fsdp.modules")
mirror: Any = importlib.import_module("zbmd.training.torch.fsdp.mirror")
replica: Any = importlib.import_module("zbmd.training.torch.fsdp.replica")
letters: Any = importlib.import_module("zbmd.training.torch.fsdp.letters")


def optimizers(parameters: list[Any]) -> list[Any]:
    return [
        torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        torch.optim.AdamW(parameters, lr=0.1, fused=True, amsgrad=True),
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        torch.optim.Adagrad(parameters, lr=0.1),
        torch.optim.RMSprop(parameters, lr=0.1),
    ]


@pytest.mark.parametrize("number", range(6))
def test_a_copy_makes_the_same_updates_through_a_letter(number: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 5))
    optimizer = optimizers(list(model.parameters()))[number]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert replica.why_mirrored([optimizer]) == ""
    own = replica.Shard([model], [optimizer])
    copy = replica.Replica(own, copying.deepcopy(own.state()))
    layout = letters.Layout(own.updated, [])
    letter = letters.Letter([each.detach() for each in own.updated], layout)
    optimizer.register_step_post_hook(lambda *_: copy.replay(letter.read(), copy.settings()))
    for step in range(4):
        optimizer.zero_grad()
        for at, each in enumerate(model.parameters()):
            # SGD, fused and with momentum, takes no gradient that comes later than others.
            each.grad = torch.randn_like(each) if at != step or number == 3 else None
        letter.fill([each.grad for each in own.updated])
        optimizer.step()
        scheduler.step()
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros(1)  # as of a `GradScaler`
    assert copy.settings().scaled == {"grad_scale": None, "found_inf": torch.zeros(1)}
    one, other = own.state(), copy.state()
    assert all(torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True))
    for mine, theirs in zip(one["moments"], other["moments"], strict=True):
        assert mine.keys() == theirs.keys() and mine
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


class Counting(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Counts in an attribute, and keeps a tensor beside those of its parameters."""

    def step(self, closure: Any = None) -> Any:
        """Update."""
        self.calls = getattr(self, "calls", 0) + 1
        self.state["total"] = self.state.get("total", torch.zeros(2)) + self.calls
        return super().step(closure)


def counting() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, mirror.MirroredShard([model], [optimizer])


def stepped(optimizer: Any, shard: Any, steps: int) -> None:
    for step in range(steps):
        for each in shard.updated:
            each.grad = torch.full_like(each, 1.0 + step)
        optimizer.step()


def test_a_part_takes_all_that_an_optimizer_keeps_through_bytes() -> None:
    (one, own), (other, theirs) = counting(), counting()
    stepped(one, own, 3)
    theirs.load(mirror.unpacked(mirror.packed(own.state(), mirror._Memory())))
    assert other.calls == 3 and torch.equal(other.state["total"], one.state["total"])
    for optimizer, shard in ((one, own), (other, theirs)):
        stepped(optimizer, shard, 2)
    assert all(torch.equal(a, b) for a, b in zip(own.updated, theirs.updated, strict=True))


def test_a_first_update_that_is_undone_leaves_nothing_behind() -> None:
    """Neither moments nor an attribute that it has set: its repetition ends with the bits of a first one."""
    (once, wanted), (again, shard) = counting(), counting()
    kept = mirror.Mirror(shard)
    kept.begin(compares=False)
    stepped(again, shard, 1)
    kept.go_back()
    assert not again.state and "calls" not in vars(again)
    for optimizer, own in ((once, wanted), (again, shard)):
        stepped(optimizer, own, 1)
    assert (again.calls, once.calls) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(wanted.updated, shard.updated, strict=True))


def test_a_mirrored_state_is_divided_if_it_has_the_rows_of_its_parameter() -> None:
    optimizer, shard = counting()
    assert shard.undivided == ""
    stepped(optimizer, shard, 1)
    assert shard.undivided == "state 'momentum_buffer'", "a plain parameter has no rows"
    for each in shard.updated:
        optimizer.state[each] = {"age": 3, "scale": torch.ones(())}
    assert shard.undivided == "entry 'total'"
    del optimizer.state["total"]
    assert shard.undivided == ""
    optimizer.mean = torch.zeros(3)
    assert shard.undivided == "attribute 'mean'"


@pytest.mark.parametrize(
    ("attributes", "entries"),
    [
        ({"step": 1}, {}),
        ({"param_groups": 1}, {}),
        ({"_optimizer_step_pre_hooks": 1}, {}),
        ({"calls": [1]}, {}),
        ({3: 1}, {}),
        ({}, {3: 1}),
    ],
)
def test_a_part_sets_nothing_that_no_part_has(attributes: dict[Any, Any], entries: dict[Any, Any]) -> None:
    optimizer, shard = counting()
    stepped(optimizer, shard, 1)
    part = {**shard.state(), "attributes": [attributes], "entries": [entries]}
    with pytest.raises(RemoteProtocolError, match="Counting"):
        shard.load(part)
    assert optimizer.calls == 1


def test_fsdp2_has_the_private_names_that_are_used() -> None:
    """If this fails, PyTorch has changed what `training/torch/fsdp.py` relies on."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
        model = fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        state = model._get_fsdp_state()
        assert state._is_root is True
        (group,) = state._fsdp_param_groups
        found = {
            "FSDPModule": model,
            "FSDPState": state,
            "FSDPParamGroup": group,
            "FSDPMeshInfo": group.mesh_info,
            "FSDPParam": group.fsdp_params[0],
            "FSDPParam after an all-gather": group.fsdp_params[0],
            "DTensor": model.weight,
        }
        for name, attributes in ours.PRIVATE.items():
            assert [each for each in attributes if not hasattr(found[name], each)] == [], name
        group.fsdp_params[0].unsharded_accumulated_grad = torch.ones(4, 4)
        group.fsdp_params[0]._unsharded_param.grad = torch.ones(4, 4)
        modules = ours.ShardedModules([model])
        model.set_requires_gradient_sync(False)
        modules.reset()
        assert group.fsdp_params[0].unsharded_accumulated_grad is None
        assert group.fsdp_params[0]._unsharded_param.grad is None
        assert group.reduce_grads and group.all_reduce_grads
    finally:
        dist.destroy_process_group()


def test_parameters_that_a_library_loads_as_others_are_those_of_fsdp() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        fsdp.fully_shard([*layers], mesh=mesh)
        layers[0].weight = torch.nn.Parameter(layers[0].weight.detach().clone())
        (group,) = ours.ShardedModules([layers]).groups
        assert group.fsdp_params[0].sharded_param is layers[0].weight
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
def test_bits_are_compared_whatever_the_strides(shape: tuple[int, ...]) -> None:
    """A tensor of one element keeps any stride, and counts as contiguous."""
    other = torch.full(shape, -0.0)
    apart = torch.full((2, *shape), -0.0).movedim(0, -1)[..., 0]
    assert replica._same_bits(other, apart)
    assert replica._same_bits(other, torch.zeros(shape)) == (0 in shape), "-0.0 is not 0.0 bit for bit"
    assert not replica._same_bits(other, other.double())


def test_large_shards_are_probed_by_their_first_rows() -> None:
    class Whole(torch.optim.SGD):
        def step(self, *_: Any) -> None:
            for each in self.param_groups[0]["params"]:
                each.data.sub_(each.grad.full_tensor() if ours.is_sharded(each) else each.grad)

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        model = fsdp.fully_shard(torch.nn.Linear(300, 600), mesh=mesh)
        before = [ours.local_of(each).detach().clone() for each in model.parameters()]
        for fused in (False, True):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
            assert replica.why_mirrored([optimizer]) == ""
        sizes = [each.numel() for each in map(replica._sample, model.parameters())]
        assert sizes == [218 * 300, 300]
        assert replica.why_mirrored([Whole(model.parameters(), lr=0.1)])
        assert all(map(torch.equal, map(ours.local_of, model.parameters()), before))
    finally:
        dist.destroy_process_group()


def test_gradients_in_other_memory_than_that_of_pytorch_stay_there() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        model = fsdp.fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
        groups = ours.ShardedModules([model]).groups
        assert len(letters.place(groups)) == 1
        model.set_allocate_memory_from_process_group_for_comm(True)  # PyTorch refuses it after another
        assert letters.place(groups) == []
    finally:
        dist.destroy_process_group()


def test_memory_of_a_letter_is_lent_again_once_no_tensor_over_it_is_left() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(5))]
    members = [
        SimpleNamespace(sharded_param=each, padded_sharded_param_size=each.shape) for each in parameters
    ]
    group = SimpleNamespace(fsdp_params=members)
    alone = torch.nn.Parameter(torch.zeros(4))
    letter = letters.Letter([*parameters, alone], letters.Layout([*parameters, alone], [group]))
    assert letter.lend(id(group), 11, torch.bfloat16) is None
    assert letter.lend(id(group), 6, torch.float32) is None
    flat = letter.lend(id(group), 11, torch.float32).copy_(torch.arange(11.0))
    views = [flat[:6].view(2, 3), flat[6:]]
    del flat
    assert letter.lend(id(group), 11, torch.float32) is None
    letter.fill([*views, None])
    assert [each.data_ptr() for each in letter.read()[:2]] == [each.data_ptr() for each in views]
    letter.fill([views[0].clone(), 2 * views[1], torch.ones(4)])
    assert torch.equal(letter.read()[2], torch.ones(4))
    assert torch.equal(views[1], 2 * torch.arange(6.0, 11.0))
    kept = views.pop()
    views.clear()
    assert letter.lend(id(group), 11, torch.float32) is None
    del kept
    assert letter.lend(id(group), 11, torch.float32).data_ptr() == letter.gradients[0].data_ptr()


def test_an_optimizer_of_a_model_in_ddp_that_keeps_tensors_elsewhere_is_named() -> None:
    """A replacement gets what is in its state; what is in its attributes would begin again there."""
    parameters = list(torch.nn.Linear(3, 2).parameters())
    for optimizer in [*optimizers(parameters), torch.optim.LBFGS(parameters)]:
        mirror.require_captured(optimizer)

    kept = torch.optim.SGD(parameters, lr=0.1)
    kept.overflows = torch.zeros(1, dtype=torch.int32)  # a buffer of its kernel
    mirror.require_captured(kept)
    for value in (torch.zeros(3), [torch.zeros(3)], {"of": (torch.zeros(3),)}):
        kept.velocity = value
        with pytest.raises(UserError, match="SGD keeps tensors in its attribute 'velocity'"):
            mirror.require_captured(kept)
