"""The logits of Hugging Face transformers, for a small random GPT-2 that goes from here to there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.hugging_face import load_gpt2, save_gpt2

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.optional
transformers.utils.logging.disable_progress_bar()  # it would leave a thread behind

SHAPE: dict[str, int] = {"vocab_size": 131, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}


def test_what_transformers_saves_computes_the_same_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path)
    params, config = load_gpt2(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 131, (3, 16))
    with torch.no_grad():
        wanted = theirs.double()(torch.tensor(tokens)).logits.numpy()
    found = GPT(config).logits(params.astype(np.float64), tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_what_is_saved_here_computes_the_same_in_transformers(tmp_path: Path) -> None:
    config = GPTConfig(
        family="gpt2", activation="gelu", vocabulary=131, context=16, width=32, heads=4, layers=3
    )
    params = GPT(config).init(7)
    save_gpt2(tmp_path, params, config)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval().double()
    tokens = np.random.default_rng(1).integers(0, 131, (2, 11))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        GPT(config).logits(params.astype(np.float64), tokens), wanted, rtol=1e-10, atol=1e-10
    )
