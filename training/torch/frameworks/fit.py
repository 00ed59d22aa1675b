"""Lightning's `Trainer.fit` as a resilient loop: `zbmd.torch.lightning.Resilient`, a strategy.

A step begins where its first batch is drawn. Its parts are the closures of Lightning's automatic
optimization, and clipping; the vote is in the optimizer's hook. Validation, the end of an epoch and that of
the fit are transactions of their own. The hooks are put on the loops of the trainer where the fit begins.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, Final

from zbmd.training.torch.batches import Source, has_state
from zbmd.training.torch.frameworks.owned import (
    Frame,
    OwnedRun,
    open_run,
    repeatable,
    require_methods,
    require_replacing,
)
from zbmd.training.torch.transfer import Position
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
try:
    optimization: Any = importlib.import_module("lightning.pytorch.loops.optimization.automatic")
    results: Any = importlib.import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")
    torchmetrics: Any = importlib.import_module("torchmetrics")
except ImportError as error:
    raise UserError(f"Lightning cannot be imported ({error}): pip install lightning") from None

METHODS: Final = ("_broadcast_sigterm_tensor", "_should_accumulate", "_should_check_val_fx", "on_advance_end")
"""Methods of the training epoch's loop that are used here, as of Lightning 2.6."""

_UNSAVED: Final = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Of a `ModelCheckpoint`: a rank without them would save, by calls of all ranks, when others do not."""
_KEPT: Final = ("_update_count", "_forward_cache")
"""Of a metric, beside its states."""


class Logged(results._ResultCollection):  # type: ignore[misc]
    """The values that a module logs: one that is new in a replacement goes on from its predecessor's."""

    waiting: dict[str, dict[str, Any]]

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, metric)
        if key in self.waiting and metric.is_tensor:
            _restore(metric, self.waiting.pop(key))


class FitFrame(Frame):
    """The state of a fit, but for the model: progress, callbacks, and what is logged and measured."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.validates = False
        """Whether validation follows the last step, and is not over."""
        logged = trainer.fit_loop.epoch_loop._results
        logged.__class__, logged.waiting = Logged, {}
        self._logged = logged

    def end_pass(self) -> None:
        """Forget what a predecessor has logged, and this rank has not."""
        self._logged.waiting.clear()

    @property
    def _watched(self) -> dict[str, Any]:
        """The values by which callbacks decide."""
        watched: dict[str, Any] = self._trainer._logger_connector._callback_metrics
        return watched

    @property
    def _metrics(self) -> dict[str, Any]:
        named = self._trainer.lightning_module.named_modules()
        return {name: each for name, each in named if isinstance(each, torchmetrics.Metric)}

    def common(self) -> dict[str, Any]:
        """See `Frame`."""
        trainer = self._trainer
        return {
            "loops": json.dumps(trainer.fit_loop.state_dict()),
            "callbacks": [(each.state_dict(), _unsaved_of(each)) for each in trainer.callbacks],
            "stops": trainer.should_stop,
            "validates": self.validates,
        }

    def load_common(self, state: dict[str, Any]) -> None:
        """See `Frame`."""
        trainer = self._trainer
        _load_loops(trainer.fit_loop, json.loads(state["loops"]), "")
        for callback, (value, unsaved) in zip(trainer.callbacks, state["callbacks"], strict=True):
            if value:
                callback.load_state_dict(value)
            for name in _unsaved_of(callback):
                setattr(callback, name, unsaved[name])
        trainer.should_stop, self.validates = state["stops"], state["validates"]

    def own_state(self) -> dict[str, Any]:
        """See `Frame`."""
        return {
            "logged": {
                **self._logged.waiting,
                **{key: _state_of(each) for key, each in self._logged.items() if each.is_tensor},
            },
            "metrics": {name: _state_of(each) for name, each in self._metrics.items()},
            "watched": {name: _copied(value) for name, value in self._watched.items()},
        }

    def load_own(self, state: dict[str, Any]) -> None:
        """See `Frame`."""
        for name, metric in self._metrics.items():
            _restore(metric, state["metrics"][name])
        self._watched.clear()
        self._watched.update({name: _copied(value) for name, value in state["watched"].items()})
        self._logged.waiting.clear()
        for key in [key for key in self._logged if key not in state["logged"]]:
            if self._logged[key].is_tensor:
                del self._logged[key]
        for key, value in state["logged"].items():
            if key in self._logged:
                _restore(self._logged[key], value)
            else:
                self._logged.waiting[key] = value


def _unsaved_of(callback: Any) -> dict[str, Any]:
    """Return what a callback decides by, and leaves out of its state."""
    return {name: getattr(callback, name) for name in _UNSAVED if hasattr(callback, name)}


def _state_of(metric: Any) -> dict[str, Any]:
    return {name: _copied(getattr(metric, name)) for name in (*metric._defaults, *_KEPT)}


def _restore(metric: Any, state: Mapping[str, Any]) -> None:
    for name in (*metric._defaults, *_KEPT):
        setattr(metric, name, _copied(state[name]))
    metric._computed = None


def _copied(value: Any) -> Any:
    """Return a copy of tensors and lists of them, without their graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _load_loops(loop: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Load the progress of a loop and those in it, without telling them that they start again."""
    loop._load_from_state_dict(state, prefix)
    for name, each in vars(loop).items():
        if isinstance(each, optimization._Loop):
            _load_loops(each, state, f"{prefix}{name}.")


class Batches:
    """The batches of each pass, of which those of committed steps are skipped: in the place of the loader."""

    def __init__(self, loader: Any, run: OwnedRun, accumulates: int, ranks: int) -> None:
        self.loader = loader
        self._run, self._accumulates, self._ranks = run, accumulates, ranks

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        yield from Source(
            self.loader,
            number=run.position.passes,
            skip=min(run.position.at * self._accumulates, len(self)),
            seed_for=run.seed_for,
            step=run.steps,
            ranks=self._ranks,
        )


class _Part(optimization.Closure):  # type: ignore[misc]
    """A forward and backward pass over one batch, as a part of the step under way."""

    loop: Loop
    batch: Any

    def closure(self, *given: Any, **more: Any) -> Any:
        base, frame = super().closure, self.loop.frame
        run, kept = self.loop.run, frame.own_state()
        reduces, unchanged, runs = run.reduces, repeatable(self.batch), count()

        def part() -> Any:
            if next(runs):
                unchanged()
                frame.load_own(kept)
            with run.reducing(reduces):
                return base(*given, **more)

        return run.compute(part)


class Loop:
    """The resilient loop of one fit, over the loops of its trainer."""

    def __init__(self, trainer: Any, seed: int | None) -> None:
        self.trainer, self.model = trainer, trainer.strategy.model
        fit = self._fit = trainer.fit_loop
        self._epoch = fit.epoch_loop
        _check(trainer)
        progress, accumulates = self._epoch.batch_progress.current.completed, trainer.accumulate_grad_batches
        first = Position(
            step=trainer.global_step,
            passes=fit.epoch_progress.current.processed,
            at=-(-progress // accumulates),
        )
        self.frame = FitFrame(trainer)
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        self.run = open_run(self.model, trainer.optimizers[0], schedulers, self.frame, seed, first)
        self._begun = False
        (loader,) = fit._combined_loader.flattened
        fit._combined_loader.flattened = [Batches(loader, self.run, accumulates, trainer.world_size)]
        iter(fit._data_fetcher)
        self._follow = self._epoch.on_advance_end
        self._epoch._broadcast_sigterm_tensor = self._draws
        self._epoch.on_advance_end = self._advanced
        fit.on_advance_end = self._as_transaction(fit.on_advance_end, ends_pass=True)
        fit.on_run_end = self._as_transaction(fit.on_run_end)
        make = self._epoch.automatic_optimization._make_closure

        def part(kwargs: Any, *given: Any) -> Any:
            closure = make(kwargs, *given)
            closure.__class__, closure.loop, closure.batch = _Part, self, kwargs.get("batch")
            return closure

        self._epoch.automatic_optimization._make_closure = part
        if self.run.version:
            self._enter()

    def _enter(self) -> None:
        """In a replacement: be where the others are."""
        reset, ready = self._epoch.reset, self._fit.epoch_progress
        if ready.total.ready > ready.total.processed:  # which the loop counts when it enters the epoch
            for each in (ready.total, ready.current):
                each.ready, each.started = each.ready - 1, each.started - 1

        def keep() -> None:
            self._epoch.reset = reset

        self._epoch.reset = keep
        if self.frame.validates:
            self._validate()

    def _as_transaction(self, body: Callable[[], None], *, ends_pass: bool = False) -> Callable[[], None]:
        def transaction() -> None:
            self.run.transact(body, ends_pass=ends_pass)
            if ends_pass:
                self.frame.end_pass()

        return transaction

    def _draws(self) -> None:
        """In the place of the exchange of signals: a batch is about to be drawn."""
        if not self.frame.in_step:
            self.frame.enter_step()
            self.run.seed_for("batch", self.run.steps)

    def begin(self) -> None:
        """A batch is here."""
        if not self._begun:
            self.run.begin_step()
            self._begun = True

    def update(self, optimizer: Any, closure: Callable[[], Any], module: Any, **more: Any) -> Any:
        """Make the last parts of the step, and update."""
        result = closure()
        self.run.compute(lambda: self.trainer.precision_plugin._after_closure(module, optimizer))
        return optimizer.step(closure=lambda: result, **more)

    def _advanced(self, fetcher: Any) -> None:
        """The pass over a batch has ended, and the step, unless it accumulates."""
        if self._epoch._should_accumulate():
            self._follow(fetcher)
            return
        self._begun = False
        self.run.end_step()
        self.frame.validates = bool(self._epoch._should_check_val_fx(fetcher))
        if self.frame.validates:
            self._validate()
        else:
            self._follow(fetcher)

    def _validate(self) -> None:
        def body() -> None:
            self._follow(self._fit._data_fetcher)
            self.frame.validates = False

        self.run.transact(body)


class _Survives(strategies.ParallelStrategy):  # type: ignore[misc]
    """The hooks of a strategy whose fit survives, in front of Lightning's own."""

    def __init__(self, *given: Any, seed: int | None = None, **more: Any) -> None:
        super().__init__(*given, **{"process_group_backend": "zbmd", **more})
        self._seed = seed
        self._loop: Loop | None = None

    def on_train_start(self) -> None:
        """Meet the other ranks; a replacement gets their state."""
        super().on_train_start()
        self._loop = Loop(self.lightning_module.trainer, self._seed)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A step begins, or goes on with another batch."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._loop is not None
        self._loop.begin()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **more: Any
    ) -> Any:
        """Make the passes over the last batch, and the update once all ranks have voted."""
        assert self._loop is not None
        return self._loop.update(optimizer, closure, model or self.lightning_module, **more)


class Resilient(_Survives, strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP over zbmd, with a fit that survives the loss of ranks. See docs/GUIDE_TORCH.md.

    seed: of random numbers in steps; default: that of `torch.manual_seed` on rank 0. more: options of
    `DDPStrategy`. What cannot be continued is refused by a `UserError` before the first step.
    """


class ResilientModelParallel(_Survives, strategies.ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's `ModelParallelStrategy` over zbmd, with a fit that survives the loss of ranks.

    For modules that `fully_shard` shards in `configure_model`, over `device_mesh["data_parallel"]`, which has
    all ranks: `data_parallel_size` is their number, and `tensor_parallel_size` 1. seed: as of `Resilient`.
    """


def _check(trainer: Any) -> None:
    """Raise `UserError` for a fit that cannot be made resilient."""
    who = "zbmd.torch.lightning.Resilient"
    require_replacing(who)
    require_methods(trainer.fit_loop.epoch_loop, METHODS, f"{who} is made for Lightning 2.6")
    module, loaders = trainer.lightning_module, trainer.fit_loop._combined_loader.flattened
    batches, accumulates = trainer.val_check_batch, trainer.accumulate_grad_batches
    often = batches not in (None, float("inf"), trainer.fit_loop.max_batches)
    inside = trainer.enable_validation and often
    for refused, why in (
        (not module.automatic_optimization, "manual optimization: its steps are not known"),
        (len(trainer.optimizers) != 1, f"{len(trainer.optimizers)} optimizers: it takes one"),
        (
            trainer.precision_plugin.__class__.__name__ == "MixedPrecision" and trainer.scaler is not None,
            "fp16",
        ),
        (len(loaders) != 1, f"{len(loaders)} training loaders: it takes one"),
        (has_state(loaders[0]), "a loader with a state of its own: use a DataLoader"),
        (trainer.fit_loop.max_batches == float("inf"), "a training loader without a length"),
        (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs"),
        (trainer._val_check_time_interval is not None, "validation by the clock, which ranks read apart"),
        (inside and batches % accumulates, f"val_check_interval within {accumulates} accumulated batches"),
    ):
        if refused:
            raise UserError(f"{who}: this fit cannot be made resilient: {why}")
