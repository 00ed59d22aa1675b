"""The plan of a run: what determines its bits, as JSON. Logs and checkpoints are resumed only under their
plan.

Every job writes the same plan: a single process, ranks with and without ZeRO, meshes. Plans of earlier
versions, which had other names for some fields, are understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.rng import Permutation
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.optim.mixed_precision import SCALE_FIRST, Precision
from zbmd.transport.errors import UserError

DIFFERENCES_MAX = 8
VALUE_CHARACTERS_MAX = 16
_HORIZON: Final = "training.horizon"
_PRECISION: Final = "precision"
_SCALED: Final = "float16"
"""The precision whose gradients have a loss scale; with others, the initial scale determines nothing."""


class Plan(msgspec.Struct, kw_only=True):
    """The fields of a plan that readers of a run need: the model, its training, and the digest of its
    text."""

    model: GPTConfig
    training: TrainingConfig
    corpus: str


def plan_text(
    model: GPTConfig,
    training: TrainingConfig,
    *,
    corpus: str,
    precision: Precision = "float32",
    loss_scale: float = SCALE_FIRST,
) -> str:
    """Return the plan of a run on text of digest `corpus`; stages, meshes and the number of ranks are not in
    it.
    """
    plan: dict[str, Any] = {
        "model": asdict(model),
        "training": asdict(training),
        "corpus": corpus,
        _PRECISION: precision,
    }
    if precision == _SCALED:
        plan["loss_scale"] = loss_scale
    return msgspec.json.encode(plan, order="deterministic").decode()


def read_plan(text: str, *, where: str = "the commit log") -> Plan:
    """Return the plan in a log or a checkpoint. Raises `UserError`."""
    try:
        return msgspec.json.decode(text, type=Plan)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the plan in {where} cannot be read ({error}): restore it.") from None


def require_plan(path: Path | str, there: str, here: str) -> None:
    """Raise `UserError` unless the plan of the checkpoint at `path` is ours.

    The number of steps may differ if the learning rates of steps do not depend on it.
    """
    if there == here:
        return
    wanted = _fixed_by(here)
    try:
        known = _fixed_by(there)
    except (ValueError, RecursionError):
        known, differing = {}, ["its plan cannot be read"]
    else:
        differing = _differences(known, wanted)
    if not differing:
        return
    raise UserError(
        f"{path} belongs to another run, so it cannot be resumed bit for bit. Differences (there, here): "
        f"{', '.join(differing)}.{_advice(known, wanted)} Give the options and "
        "data of that run, or omit --resume."
    )


def _advice(known: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Return what to do about a difference; empty if the plan could not be read."""
    if not known:
        return ""
    said, horizon, precision = "", known.get(_HORIZON), known.get(_PRECISION)
    if _differ(known, wanted, "model."):
        said += (
            " Weights of another model do not fit: give that run's --width, --heads, --layers and --context, "
            "and, with zbmd train, its --family and --tokens."
        )
    if _differ(known, wanted, "training.optimizer"):
        said += " Moments of another optimizer do not fit: zbmd train goes on with its --optimizer."
    if _differ(known, wanted, _PRECISION):
        said += f" It was trained in {_shortened(precision)}: --precision says so."
    if horizon is not None and horizon != wanted.get(_HORIZON, horizon):
        said += (
            f" The learning rate of that run goes down over {horizon} steps: with --horizon {horizon} it "
            "does so here, and is at its lowest behind them."
        )
    return said


def _differ(known: Mapping[str, object], wanted: Mapping[str, object], begins: str) -> bool:
    names = (name for name in {**known, **wanted} if name.startswith(begins))
    return any(known.get(name) != wanted.get(name) for name in names)


def _fixed_by(plan: str) -> dict[str, object]:
    """Return the leaves of a plan that determine bits, with one name each, and the horizon in place of the
    steps.
    """
    found = _leaves(msgspec.json.decode(plan))
    found.pop("reduction", None)  # one tree, in plans of before
    found.setdefault(_PRECISION, found.pop("storage", "float32"))
    if found[_PRECISION] != _SCALED:
        found.pop("loss_scale", None)
    steps, horizon = found.pop("training.steps", None), found.pop(_HORIZON, 0)
    if found.get("training.curve") != "constant":
        found[_HORIZON] = horizon or steps
    return found


def _differences(known: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """Describe the leaves in which two plans differ: at most `DIFFERENCES_MAX`, each shortened."""
    names = sorted(name for name in {**known, **wanted} if known.get(name) != wanted.get(name))
    return [
        f"{name} ({_shortened(known.get(name))}, {_shortened(wanted.get(name))})"
        for name in names[:DIFFERENCES_MAX]
    ]


def _leaves(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= _leaves(inner, f"{name}.{key}" if name else str(key))
    return found


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


class ExampleOrder(msgspec.Struct, frozen=True):
    """The order of the examples: a permutation for each pass over them, which follows from the seed."""

    examples: int
    shards: int
    samples: int
    seed: int

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """Return the examples of a step (from 0), (shards, samples)."""
        each = self.shards * self.samples
        passes, places = np.divmod(np.arange(step * each, (step + 1) * each), self.examples)
        ids = np.empty(each, np.int64)
        for number in np.unique(passes).tolist():
            here = passes == number
            ids[here] = Permutation(self.examples, seed=self.seed, index=number)(places[here])
        return ids.reshape(self.shards, self.samples)


class TaskPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of a task of the user's own."""

    task: str
    order: ExampleOrder
    steps: int

    @classmethod
    def read(cls, text: str) -> TaskPlan | None:
        """Return the plan in a log; None if it is another kind of plan."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        order = found.order
        return found if min(order.examples, order.shards, order.samples) > 0 else None
