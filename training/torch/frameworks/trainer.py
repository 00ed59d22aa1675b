"""Hugging Face's `Trainer` as a resilient loop: `zbmd.torch.transformers.resilient`.

The trainer's class gets the methods of `_Hooks` in front of its own. A step begins where its batches are
drawn (`get_batch_samples`), and ends where it is logged; what logs, evaluates and saves is a transaction of
its own. The batches are those of the trainer's loader, drawn by a `Source`, so that a replacement can skip.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final

from zbmd.training.torch.batches import Source, check_prepared
from zbmd.training.torch.frameworks.owned import (
    Frame,
    OwnedRun,
    open_run,
    repeatable,
    require_methods,
    require_replacing,
)
from zbmd.training.torch.fsdp.modules import has_shards, is_sharded
from zbmd.training.torch.transfer import Position
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
parallel: Any = importlib.import_module("torch.nn.parallel")

METHODS: Final = (
    *("_run_epoch", "_maybe_log_save_evaluate", "_finalize_training", "_clip_grad_norm", "_load_rng_state"),
    *("get_batch_samples", "training_step", "_get_grad_norm"),
)
"""Methods of `Trainer` that are used here, as of transformers 5."""
FLAGS: Final = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
OF_RANKS: Final = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""Fields of `TrainerState` that ranks do not have in common."""
IN_PLACE: Final = ""
"""The checkpoint that a replacement resumes from, as the trainer calls it: none."""


def resilient(trainer: Any, *, seed: int | None = None) -> Any:
    """Have `trainer.train()` survive the loss of ranks; return the trainer. See docs/GUIDE_TORCH.md.

    trainer: a `transformers.Trainer`, or of a class derived from it. seed: of random numbers in steps;
    default: that of `torch.manual_seed` on rank 0. Raises `UserError` for what cannot be continued; `train`
    raises it before the first step for what is known only then.
    """
    require_methods(trainer, METHODS, "zbmd.torch.transformers.resilient() is made for transformers 5")
    require_replacing("zbmd.torch.transformers.resilient()")
    arguments = trainer.args
    for name, wanted in (("auto_find_batch_size", False), ("include_num_input_tokens_seen", "no")):
        if getattr(arguments, name, wanted) != wanted:
            raise UserError(
                f"TrainingArguments({name}={getattr(arguments, name)!r}) cannot be made resilient: it "
                f"communicates in the middle of a step, or begins training again; leave it at {wanted!r}"
            )
    if arguments.fsdp:
        raise UserError(
            "TrainingArguments(fsdp=…) cannot be made resilient: accelerate shards models on accelerators "
            "alone, and on CPUs it would leave this one whole. Have transformers shard it: "
            "from_pretrained(…, distributed_config=DistributedConfig(fsdp_size=WORLD_SIZE))"
        )
    if trainer.is_deepspeed_enabled or trainer.neftune_noise_alpha is not None:
        raise UserError(
            "zbmd.torch.transformers.resilient() takes a Trainer over DistributedDataParallel or FSDP2: no "
            "deepspeed= or neftune_noise_alpha="
        )
    if "layerwise" in str(arguments.optim):
        raise UserError(
            f"TrainingArguments(optim={str(arguments.optim)!r}) updates in the backward pass, before all "
            "ranks have voted: use an optimizer without layerwise updates"
        )
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_Hooks, cls), {"__module__": cls.__module__})
    trainer.zbmd_loop = Loop(trainer, seed)
    return trainer


class TrainerFrame(Frame):
    """The state of a trainer's loop, but for the model: counters, flags, logs, callbacks."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.measured: tuple[float | None, float | None] = (None, None)
        """Norm of the gradients and learning rate of the last step."""
        self._log = (-1, "")
        """The logs as text, and their number."""

    def common(self) -> dict[str, Any]:
        """See `Frame`."""
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in self._fields}
        if self._log[0] != len(trainer.state.log_history):
            self._log = len(trainer.state.log_history), json.dumps(trainer.state.log_history)
        whole = {
            "state": state,
            "control": {name: getattr(trainer.control, name) for name in FLAGS},
            "callbacks": [each.state()["attributes"] for each in self._callbacks],
            "total_loss": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
            "first": trainer._initial_global_step,
            "measured": self.measured,
        }
        return {"whole": json.dumps(whole), "log": self._log[1]}

    def load_common(self, state: dict[str, Any]) -> None:
        """See `Frame`."""
        trainer, whole = self._trainer, json.loads(state["whole"])
        for name in self._fields:
            setattr(trainer.state, name, whole["state"][name])
        trainer.state.log_history = json.loads(state["log"])
        self._log = len(trainer.state.log_history), state["log"]
        for name in FLAGS:
            setattr(trainer.control, name, whole["control"][name])
        for callback, attributes in zip(self._callbacks, whole["callbacks"], strict=True):
            for name in callback.state()["attributes"]:
                setattr(callback, name, attributes[name])
        trainer._total_loss_scalar = whole["total_loss"]
        trainer._globalstep_last_logged = whole["logged"]
        trainer._initial_global_step = whole["first"]
        self.measured = tuple(whole["measured"])

    def own_state(self) -> dict[str, Any]:
        """See `Frame`."""
        return {"loss": self._trainer._tr_loss.clone(), "flos": float(self._trainer.current_flos)}

    def load_own(self, state: dict[str, Any]) -> None:
        """See `Frame`."""
        self._trainer._tr_loss.copy_(state["loss"])
        self._trainer.current_flos = state["flos"]

    @property
    def _fields(self) -> list[str]:
        """The names of what ranks have in common of a `TrainerState`, but for the logs."""
        names = [field.name for field in dataclasses.fields(self._trainer.state)]
        return [name for name in names if name not in (*OF_RANKS, "log_history")]

    @property
    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if hasattr(each, "state")]


class Loop:
    """The resilient loop of one trainer. It is opened where the first pass over the data begins."""

    def __init__(self, trainer: Any, seed: int | None) -> None:
        self._trainer, self._seed = trainer, seed
        self._frame = TrainerFrame(trainer)
        self._run: OwnedRun | None = None
        self._source: Source | None = None

    @property
    def run(self) -> OwnedRun:
        """The run, once `train` has begun."""
        assert self._run is not None
        return self._run

    @property
    def is_open(self) -> bool:
        """Whether `train` is in its loop."""
        return self._run is not None

    def run_epoch(
        self, run_epoch: Callable[..., None], follow: Callable[..., None], given: dict[str, Any]
    ) -> None:
        """Make a pass over the data, or what is left of it. follow: what logs, evaluates and saves."""
        trainer = self._trainer
        if self._run is None:
            self._open(given)
        run, number = self.run, given["epoch"]
        if number < run.position.passes:
            return
        if run.position.passes < number:  # the last pass was left before its end
            run.position = run.position._replace(passes=number, at=0)
        loader, skip = given["train_dataloader"], run.position.at * trainer.args.gradient_accumulation_steps
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(number)
        self._source = Source(
            loader,
            number=number,
            skip=skip,
            seed_for=run.seed_for,
            step=run.steps,
            ranks=trainer.args.world_size,
        )
        if skip:
            self._end_last_step(follow, given)
            given |= {
                "resume_from_checkpoint": IN_PLACE,
                "epochs_trained": number,
                "steps_trained_in_current_epoch": skip,
            }
            if trainer.control.should_training_stop or trainer.control.should_epoch_stop:
                given["num_update_steps_per_epoch"] = run.position.at
        run_epoch(**given)

    def _open(self, given: dict[str, Any]) -> None:
        trainer = self._trainer
        check_prepared(given["train_dataloader"])
        model = trainer.model_wrapped
        if not isinstance(model, parallel.DistributedDataParallel) and not has_shards([model]):
            raise UserError(
                f"Trainer.train() has a {type(model).__name__}, and can be resilient over "
                "DistributedDataParallel or FSDP2: start at least two ranks, each with one device"
            )
        if trainer.accelerator.scaler is not None:
            raise UserError("Trainer.train() with fp16=True cannot be made resilient: use bf16=True")
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        first = Position(
            step=trainer.state.global_step,
            passes=given["epochs_trained"],
            at=given["steps_trained_in_current_epoch"] // trainer.args.gradient_accumulation_steps,
        )
        self._run = open_run(model, optimizer, [trainer.lr_scheduler], self._frame, self._seed, first)

    def _end_last_step(self, follow: Callable[..., None], given: dict[str, Any]) -> None:
        """In a replacement: make what follows the last step, if the others are at that."""
        if self.run.position.every or not self._is_due:
            return
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        (norm, rate), after = self._frame.measured, [given[name] for name in names]
        self.run.transact(lambda: follow(self._trainer._tr_loss, norm, *after, learning_rate=rate))

    @property
    def _is_due(self) -> bool:
        control = self._trainer.control
        return bool(control.should_log or control.should_evaluate or control.should_save)

    def draw(self, count: int) -> list[Any]:
        """Begin a step; return its batches, none at the end of the pass."""
        assert self._source is not None
        self.run.seed_for("batch", self.run.steps)
        batches = [*islice(self._source, count)]
        if batches:
            self.run.begin_step()
        return batches

    def close(self, last: Callable[[], Any]) -> Any:
        """Make what follows the last pass; another call of `train` is refused, as another loop is."""
        if self._run is None:  # there was no pass to make
            return last()
        result = self._run.transact(last)
        self._run = None
        return result

    def end_step(self, after: Callable[[], None], norm: Any, rate: float | None) -> None:
        """The step has ended, or if none is under way the pass has: make what follows it."""
        if not self.run.in_step:
            self.run.transact(after, ends_pass=True)
            return
        self._frame.measured = None if norm is None else float(norm), rate
        self.run.end_step()
        if self._is_due:
            self.run.transact(after)


def _whole(norm: Any) -> Any:
    """Return a norm that ranks still have parts of as a number of all."""
    return norm.full_tensor() if is_sharded(norm) else norm


class _Hooks:
    """Methods of a trainer, in front of its own."""

    zbmd_loop: Loop

    def _run_epoch(self, **given: Any) -> None:
        follow = super()._maybe_log_save_evaluate  # type: ignore[misc]
        self.zbmd_loop.run_epoch(super()._run_epoch, follow, given)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of a step, and the number of items in them on all ranks."""
        loop, base = self.zbmd_loop, super().get_batch_samples  # type: ignore[misc]
        if not loop.is_open:
            return base(epoch_iterator, num_batches, device)
        batches = loop.draw(num_batches)
        if not batches:
            return base(iter(batches), 0, device)
        return batches, loop.run.compute(lambda: base(iter(batches), len(batches), device)[1])

    def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        """Make a pass over a micro-batch."""
        loop, base = self.zbmd_loop, super().training_step  # type: ignore[misc]
        if not loop.is_open:
            return base(model, inputs, *given, **more)
        unchanged, reduces = repeatable(inputs), loop.run.reduces

        def part() -> Any:
            unchanged()
            with loop.run.reducing(reduces):
                return base(model, copy.copy(inputs), *given, **more)

        return loop.run.compute(part)

    def _clip_grad_norm(self, *given: Any) -> Any:
        loop, base = self.zbmd_loop, super()._clip_grad_norm  # type: ignore[misc]
        return loop.run.compute(lambda: _whole(base(*given))) if loop.is_open else base(*given)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        loop, base = self.zbmd_loop, super()._get_grad_norm  # type: ignore[misc]
        if not loop.is_open or grad_norm is not None:
            return base(model, grad_norm)
        return loop.run.compute(lambda: _whole(base(model)))  # without clipping

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *given: Any, **more: Any) -> None:
        base = super()._maybe_log_save_evaluate  # type: ignore[misc]
        rate = more.get("learning_rate")
        self.zbmd_loop.end_step(partial(base, tr_loss, grad_norm, *given, **more), grad_norm, rate)

    def _finalize_training(self, *given: Any) -> Any:
        base = super()._finalize_training  # type: ignore[misc]
        return self.zbmd_loop.close(lambda: base(*given))

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self.zbmd_loop.is_open:  # random numbers of a step depend on its number
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
