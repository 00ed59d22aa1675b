"""The measurements of a group: those of members that have met before stay, whoever is new among them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.communicator import group_trials
from zbmd.collectives.communicator.cost_model import Model

N = 3
Numbers = tuple[float, float, float]


class Known(dict[Any, Numbers]):
    """The measurements of each member's process; here, each member is a thread."""

    def __init__(self, of_members: list[Numbers | None]) -> None:
        super().__init__()
        self.here = threading.local()
        self.of_members = of_members

    def get(self, _key: Any, default: Any = None) -> Any:
        return self.of_members[self.here.place] or default

    def __setitem__(self, _key: Any, numbers: Numbers) -> None:
        self.of_members[self.here.place] = numbers


class Member:
    """A member of a group of threads that meet at a barrier."""

    hosts, members, size = (0,) * N, tuple(range(N)), N

    def __init__(self, place: int, rows: list[Any], meet: threading.Barrier) -> None:
        self.place, self._rows, self._meet = place, rows, meet

    def barrier(self, *, deadline_ns: int = 0) -> None:
        self._meet.wait()

    def all_gather(
        self, x: Any, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> np.ndarray:
        self._rows[self.place] = np.array(x)
        self._meet.wait()
        every = np.stack(self._rows)
        self._meet.wait()
        return every

    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        x[...] = self.all_gather(x)[root]
        return x


def agreed(monkeypatch: pytest.MonkeyPatch, of_members: list[Numbers | None]) -> list[Model]:
    known, rows, meet = Known(of_members), [None] * N, threading.Barrier(N)
    monkeypatch.setattr(group_trials, "_known", known)

    def model(place: int) -> Model:
        known.here.place = place
        return group_trials.agree_on_model(Member(place, rows, meet), 0)

    with ThreadPoolExecutor(N) as pool:
        return list(pool.map(model, range(N)))


def test_a_new_first_member_takes_what_another_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers could mean another algorithm, whose sums have another order."""
    of_members: list[Numbers | None] = [None, (5_000.0, 0.5, 0.25), (9_000.0, 0.7, 0.1)]
    models = agreed(monkeypatch, of_members)
    assert {(one.alpha_ns, one.beta_ns_per_byte, one.gamma_ns_per_byte) for one in models} == {
        (5_000.0, 0.5, 0.25)
    }
    assert of_members == [(5_000.0, 0.5, 0.25)] * N


def test_members_of_which_none_has_measured_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of_members: list[Numbers | None] = [None] * N
    models = agreed(monkeypatch, of_members)
    assert len(set(models)) == 1 and models[0].alpha_ns >= 1.0
    assert len({found for found in of_members if found is not None}) == 1
    assert agreed(monkeypatch, of_members) == models
