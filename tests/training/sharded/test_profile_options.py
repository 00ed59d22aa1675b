"""`--profile-ops`: on the command line, in the environment and in a recipe, and what it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.tools.train.command import recipe_of
from zbmd.transport.errors import UserError


def test_every_source_says_which_steps_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_of([]).profile_ops == 0
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('profile_ops = "every=7"\n')
    assert recipe_of([str(recipe)]).profile_ops == 7
    recipe.write_text("profile_ops = 7\n")  # as a run writes it
    assert recipe_of([str(recipe)]).profile_ops == 7
    monkeypatch.setenv("ZBMD_TRAIN_PROFILE_OPS", "every=50")
    assert recipe_of([str(recipe)]).profile_ops == 50
    assert recipe_of([str(recipe), "--profile-ops", "every=3"]).profile_ops == 3
    assert recipe_of([str(recipe), "--profile-ops", "off"]).profile_ops == 0


@pytest.mark.parametrize("text", ["", "every=", "every=-1", "on", "every=1e3", "every=10000000001"])
def test_what_is_no_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--profile-ops: expected off or every=N"):
        recipe_of([f"--profile-ops={text}"])
    with pytest.raises(UserError, match="sample_every"):
        recipe_of(["--sample-every", "-1"]).check()
