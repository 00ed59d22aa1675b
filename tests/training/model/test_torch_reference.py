"""The same numbers as PyTorch: each layer's forward and backward pass, the whole model, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from zbmd.training import ops
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import Activation, GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.ops import EPSILON
from zbmd.training.optim.clip import clip_scale, global_norm
from zbmd.training.optim.elementwise import AdamW, AdamWConfig, AdamWState
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.recipe import Recipe

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
functional: Any = torch.nn.functional

pytestmark = pytest.mark.optional

Floats = npt.NDArray[np.float64]
Ours = Callable[[Tape, Tensor, list[Parameter]], Tensor]
Theirs = Callable[..., Any]


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape)


def compare(ours: Ours, theirs: Theirs, x: Floats, *parameters: Floats) -> None:
    """Compare outputs, and the gradients of a random weighting of the output's elements."""
    reference = [torch.tensor(array, requires_grad=True) for array in (x, *parameters)]
    expected = theirs(*reference)
    weights = normal(*expected.shape, seed=9)
    (expected * torch.tensor(weights)).sum().backward()

    tape, leaf = Tape(np), Tensor(x)
    leaves = [Parameter(p, np.full_like(p, np.nan), i, None) for i, p in enumerate(parameters)]
    y = ours(tape, leaf, leaves)
    np.testing.assert_allclose(y.data, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    tape.backward(tape.record(np.asarray((y.data * weights).sum()), lambda dy: y.accumulate(dy * weights)))
    for tensor, grad in zip(reference, [leaf.grad, *(p.grad for p in leaves)], strict=True):
        if tensor.grad is None:
            assert grad is None
        else:
            assert grad is not None
            np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=1e-9, atol=1e-12)


def torch_attention(qkv: Any, by_distance: Any, batch: int, heads: int) -> Any:
    length, depth = len(qkv) // batch, qkv.shape[1] // (3 * heads)
    q, k, v = qkv.reshape(batch, length, 3, heads, depth).permute(2, 0, 3, 1, 4)
    back = torch.arange(length)[:, None] - torch.arange(length)
    bias = by_distance[:, back.abs()].masked_fill(back < 0, -math.inf)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return mixed.transpose(1, 2).reshape(batch * length, heads * depth)


def torch_activation(activation: Activation, x: Any) -> Any:
    return functional.relu(x) ** 2 if activation == "relu2" else functional.gelu(x, approximate="tanh")


def test_linear() -> None:
    compare(lambda t, x, p: ops.linear(t, x, p[0]), lambda x, w: x @ w, normal(6, 5), normal(5, 4))


def test_linear_onto_a_residual() -> None:
    compare(
        lambda t, x, p: ops.linear(t, x, p[0], residual=x), lambda x, w: x + x @ w, normal(6, 5), normal(5, 5)
    )


def test_rms_norm() -> None:
    compare(
        lambda t, x, p: ops.rms_norm(t, x, p[0]),
        lambda x, g: functional.rms_norm(x, x.shape[-1:], g, EPSILON),
        normal(6, 5),
        normal(5, seed=2),
    )


def test_squared_relu() -> None:
    compare(lambda t, x, _: ops.squared_relu(t, x), lambda x: torch_activation("relu2", x), normal(6, 5))


def test_gelu() -> None:
    compare(lambda t, x, _: ops.gelu(t, x), lambda x: torch_activation("gelu", x), normal(6, 5))


def test_embedding() -> None:
    tokens = np.array([3, 0, 3, 1])
    compare(
        lambda t, _, p: ops.embedding(t, tokens, p[0]),
        lambda _, table: functional.embedding(torch.tensor(tokens), table),
        normal(1),
        normal(5, 4),
    )


def test_causal_attention() -> None:
    bias = ops.causal_distance_bias(np, 4, 7, np.float64)
    compare(
        lambda t, x, _: ops.causal_attention(t, x, bias, batch=2, heads=4),
        lambda qkv: torch_attention(qkv, torch.tensor(bias), 2, 4),
        normal(14, 3 * 12),
    )


def test_cross_entropy() -> None:
    targets = np.array([0, 4, 4, 2])
    compare(
        lambda t, x, _: ops.cross_entropy(t, x, targets, weight=0.25),
        lambda x: functional.cross_entropy(x, torch.tensor(targets)),
        normal(4, 5),
    )


def torch_loss(model: GPT, parameters: list[Any], tokens: npt.NDArray[np.uint8]) -> Any:
    """The model written out in PyTorch, with nothing of ours but the attention bias."""
    config = model.config
    wide = torch.tensor(tokens.astype(np.int64))
    length = tokens.shape[1] - 1
    bias = torch.tensor(ops.causal_distance_bias(np, config.heads, length, np.float64)).to(
        parameters[0].dtype
    )
    rest = iter(parameters)

    def norm(x: Any) -> Any:
        return functional.rms_norm(x, (config.width,), next(rest), EPSILON)

    x = next(rest)[wide[:, :-1].reshape(-1)]
    for _ in range(config.layers):
        mixed = torch_attention(norm(x) @ next(rest), bias, len(tokens), config.heads)
        x = x + mixed @ next(rest)
        x = x + torch_activation(config.activation, norm(x) @ next(rest)) @ next(rest)
    return functional.cross_entropy(norm(x) @ next(rest), wide[:, 1:].reshape(-1))


def disturbed(model: GPT) -> Floats:
    """Initial weights with noise on all of them, so that no gradient vanishes."""
    params = model.init(1).astype(np.float64)
    for view in model.layout.views(params):
        view += 0.1 * normal(*view.shape)
    return params


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_the_whole_model(activation: Activation) -> None:
    model = GPT(GPTConfig(context=9, width=12, heads=4, layers=2, activation=activation))
    params = disturbed(model)
    grads = np.zeros_like(params)
    tokens = np.random.default_rng(0).integers(0, 256, (3, 10), dtype=np.uint8)
    reference = [torch.tensor(view, requires_grad=True) for view in model.layout.views(params)]
    expected = torch_loss(model, reference, tokens)
    expected.backward()
    loss = model.loss_and_grads(params, grads, tokens, global_batch=3)
    assert math.isclose(loss, expected.item(), rel_tol=1e-12)
    for slot, ours, theirs in zip(model.layout.slots, model.layout.views(grads), reference, strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-8, atol=1e-12, err_msg=slot.name)


def torch_adamw(
    config: AdamWConfig, layout: ParameterLayout, weights: npt.NDArray[Any], *, rate: float
) -> tuple[list[Any], Any]:
    """PyTorch's parameters, which begin with `weights`, and its optimizer of them."""
    parameters = [torch.tensor(view, requires_grad=True) for view in layout.views(weights.copy())]
    by_decay = [
        {
            "params": [p for p in parameters if (p.ndim == 2) is decayed],
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    betas = (config.beta1, config.beta2)
    return parameters, torch.optim.AdamW(by_decay, lr=rate, betas=betas, eps=config.epsilon)


def test_clipping_and_adamw_over_several_steps() -> None:
    model = GPT(GPTConfig(context=4, width=4, heads=2, layers=1))
    layout = model.layout
    config = AdamWConfig(beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.2)
    optimizer = AdamW(config, layout, dtype=np.float64)
    states = [AdamWState(*(np.zeros(layout.size) for _ in range(3))) for _ in range(2)]
    states[0].weights[:] = disturbed(model)
    theirs, reference = torch_adamw(config, layout, states[0].weights, rate=0.05)
    for step in range(4):
        grads = np.zeros(layout.size)
        for view, parameter in zip(layout.views(grads), theirs, strict=True):
            view[...] = normal(*view.shape, seed=step)
            parameter.grad = torch.tensor(view)
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0).item()
        reference.step()
        norm = global_norm(grads, xp=np)
        assert math.isclose(norm, expected_norm, rel_tol=1e-12)
        scale = clip_scale(norm, limit=2.0)
        old, new = states[step % 2], states[1 - step % 2]
        optimizer.update(old, new, grads, step=step, learning_rate=0.05, grad_scale=scale)
        for view, parameter in zip(layout.views(new.weights), theirs, strict=True):
            np.testing.assert_allclose(view, parameter.detach().numpy(), rtol=1e-6, atol=1e-8)


def test_100_steps_of_training_have_the_loss_curve_of_pytorch(tmp_path: Path) -> None:
    """The same initial weights and windows, float32 on both sides; nats a byte."""
    text = tmp_path / "text"
    text.write_text("".join(f"{i} green bottles, {i * i % 97} on the wall\n" for i in range(2000)))
    model = GPT(GPTConfig(context=32, width=64, heads=4, layers=3))
    config = TrainingConfig(steps=100, shards=2, sequences_per_shard=4, learning_rate=4e-3, warmup_steps=10)
    recipe = Recipe(model, Corpus(prepare_corpus(str(text), tmp_path, context=32), context=32), config)
    trainer = PlainTrainer(recipe)
    optimizer = config.optimizer
    assert isinstance(optimizer, AdamWConfig)
    theirs, reference = torch_adamw(optimizer, model.layout, trainer.state.weights, rate=0.0)
    ours, expected = list[float](), list[float]()
    for step in range(config.steps):
        windows = recipe.corpus.windows(recipe.sample_ids(step).reshape(-1))
        reference.zero_grad()
        loss = torch_loss(model, theirs, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs, config.clip_norm)
        for group in reference.param_groups:
            group["lr"] = recipe.learning_rate(step)
        reference.step()
        expected.append(loss.item())
        ours.append(trainer.run_step().loss)
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) <= 1e-4
    assert math.isclose(ours[0], math.log(256), rel_tol=1e-6) and ours[-1] < 1.5, "it has learned"
