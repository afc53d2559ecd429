"""Advantages of tokens and the critic's loss: against float64 references written from the formulas, by property, and
against TRL's own code; and the policy's loss of TRL's PPO."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algo.gae import explained_variance, generalized_advantages, value_loss, whitened
from slipstream.algo.surrogate_losses import LossInputs, clip_loss

NUMBER = st.floats(-10, 10, width=32)
PART = st.floats(0, 1)
TRAJECTORY = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=12)


def tensors(trajectory):
    rewards, values = zip(*trajectory, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)


def by_definition(rewards, values, gamma, gae_lambda):
    """Equation 16: the exponentially weighted mean of the k-step advantages, k up to the end."""
    end = len(rewards)
    found = []
    for t in range(end):
        total, weight = 0.0, 1.0 - gae_lambda
        for k in range(1, end - t + 1):
            bootstrap = values[t + k].item() if t + k < end else 0.0
            discounted = sum(gamma**i * rewards[t + i].item() for i in range(k))
            advantage = discounted + gamma**k * bootstrap - values[t].item()
            # All terms beyond the end are the last one again, and their weights sum to lambda ** (k - 1).
            total += advantage * (weight if k < end - t else gae_lambda ** (k - 1))
            weight *= gae_lambda
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


@given(TRAJECTORY, PART, PART)
def test_advantages_are_the_mean_of_all_k_step_ones(trajectory, gamma, gae_lambda):
    rewards, values = tensors(trajectory)
    torch.testing.assert_close(
        generalized_advantages(rewards, values, gamma, gae_lambda),
        by_definition(rewards, values, gamma, gae_lambda),
        atol=1e-9,
        rtol=1e-9,
    )


@given(st.lists(NUMBER, min_size=2, max_size=20), st.floats(0.5, 4), NUMBER)
def test_whitening_forgets_shift_and_scale(values, scale, shift):
    numbers = torch.tensor(values, dtype=torch.float64)
    if numbers.std() < 1e-2:
        return
    result = whitened(numbers)
    assert abs(result.mean()) < 1e-9
    assert result.std().item() == pytest.approx(1.0, abs=1e-3)
    torch.testing.assert_close(whitened(scale * numbers + shift), result, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("value", [0.1, -3.0, 1e6])
def test_equal_values_are_whitened_to_exactly_nothing(value):
    assert not whitened(torch.full((7,), value)).any()
    assert not whitened(torch.full((1,), value)).any()
    assert whitened(torch.zeros(0)).shape == (0,)
    assert whitened(torch.full((1,), value)).dtype == torch.float64


def made_up(num=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values, old_values, returns = torch.randn(3, num, generator=generator)
    return (values * 0.3).requires_grad_(), old_values * 0.3, returns


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_loss_and_its_gradient_are_the_formulas(clip):
    values, old_values, returns = made_up()
    loss, clipped = value_loss(values, old_values, returns, clip)
    loss.mean().backward()
    expected_loss, expected_gradient = 0.0, []
    for value, old, target in zip(values.tolist(), old_values.tolist(), returns.tolist(), strict=True):
        bounded = min(max(value, old - clip), old + clip)
        error, bounded_error = (value - target) ** 2, (bounded - target) ** 2
        if clip and bounded_error > error:
            expected_loss += 0.5 * bounded_error
            expected_gradient.append(0.0)
        else:
            expected_loss += 0.5 * error
            expected_gradient.append((value - target) / len(values))
    assert loss.mean().item() == pytest.approx(expected_loss / len(values), abs=1e-6)
    assert values.grad.tolist() == pytest.approx(expected_gradient, abs=1e-6)
    assert 0 < clipped.sum() < len(values) if clip else not clipped.any()
    assert clipped.dtype == torch.bool


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 5.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) is None
    assert explained_variance(returns / 10, returns / 10) == 1.0


TRAINER = Path(sys.prefix) / "reference/trl/experimental/ppo/ppo_trainer.py"
"""Of TRL 1.0, the last with PPO, which `scripts/install.py` puts there."""
HELPERS = {"masked_mean", "masked_var", "masked_whiten"}


def of_trl(first, last):
    """Of TRL's own file three functions, and of `train` the statements from the one that begins with `first` to the one
    that begins with `last`, as code."""
    assert TRAINER.exists(), f"{TRAINER} is missing: run scripts/install.py"
    module = ast.parse(TRAINER.read_text(encoding="utf-8"))
    helpers = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in HELPERS]
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        texts = [ast.unparse(each) for each in body] if isinstance(body, list) else []
        begin, end = (
            next((n for n, text in enumerate(texts) if text.startswith(each)), None) for each in (first, last)
        )
        if begin is not None and end is not None:
            return compile(ast.Module([*helpers, *body[begin : end + 1]], []), str(TRAINER), "exec")
    raise AssertionError(f"{TRAINER} has no statements from {first} to {last}")


class Settings:
    gamma, lam, cliprange_value, cliprange = 0.97, 0.9, 0.2, 0.2


def test_advantages_and_whitening_equal_trls():
    code = of_trl("lastgaelam = 0", "advantages = torch.masked_fill")
    lengths, longest = [5, 9, 1, 7], 9
    generator = torch.Generator().manual_seed(1)
    padding = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
    rewards, values = torch.randn(2, len(lengths), longest, generator=generator).double().masked_fill(padding, 0.0)
    scope = {
        "torch": torch, "args": Settings, "rewards": rewards, "values": values, "gen_length": longest,
        "padding_mask": padding, "responses": torch.zeros(len(lengths), longest),
    }  # fmt: skip
    exec(code, scope)
    rows = [
        generalized_advantages(r[:length], v[:length], Settings.gamma, Settings.lam)
        for r, v, length in zip(rewards, values, lengths, strict=True)
    ]
    returns = torch.cat(rows) + values[~padding]
    torch.testing.assert_close(returns, scope["returns"][~padding], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whitened(torch.cat(rows)), scope["advantages"][~padding], atol=1e-5, rtol=1e-5)


def test_the_loss_and_its_gradient_equal_trls():
    code = of_trl("vpredclipped =", "vf_clipfrac =")
    values, old_values, returns = made_up()
    theirs = values.detach().clone().requires_grad_()
    scope = {
        "torch": torch, "args": Settings, "vpred": theirs, "mb_values": old_values, "mb_return": returns,
        "micro_batch_inds": slice(None), "padding_mask_p1": torch.zeros(len(values), dtype=torch.bool),
    }  # fmt: skip
    exec(code, scope)
    scope["vf_loss"].backward()
    loss, clipped = value_loss(values, old_values, returns, Settings.cliprange_value)
    loss.mean().backward()
    assert loss.mean().item() == pytest.approx(scope["vf_loss"].item(), abs=1e-5)
    assert clipped.double().mean().item() == pytest.approx(scope["vf_clipfrac"].item(), abs=1e-5)
    torch.testing.assert_close(values.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_the_policys_loss_and_its_gradient_equal_trls():
    code = of_trl("logprobs_diff =", "pg_loss =")
    generator = torch.Generator().manual_seed(2)
    padding = torch.arange(9)[None] >= torch.tensor([5, 9, 1, 7])[:, None]
    ours, old, advantages = torch.randn(3, *padding.shape, generator=generator)
    ours, theirs = (ours.clone().requires_grad_() for _ in range(2))
    scope = {
        "torch": torch, "args": Settings, "new_logprobs": theirs, "mb_logprobs": old, "mb_advantage": advantages,
        "padding_mask": padding, "micro_batch_inds": slice(None),
    }  # fmt: skip
    exec(code, scope)
    scope["pg_loss"].backward()
    kept, index = ~padding, torch.nonzero(~padding)[:, 0]
    clip = {"clip_low": Settings.cliprange, "clip_high": Settings.cliprange}
    loss = clip_loss(LossInputs(ours[kept], old[kept], advantages[kept], index, len(padding), **clip))
    loss.loss_N.mean().backward()
    assert loss.loss_N.mean().item() == pytest.approx(scope["pg_loss"].item(), abs=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    assert loss.counts["clip_fraction_low"].any()
    assert loss.counts["clip_fraction_high"].any()
