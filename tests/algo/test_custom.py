"""A user's own loss or advantage: found early, checked by a call, told in one sentence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algo.problem import make_problem
from tests.recipe_settings import rl

from slipstream.algo.advantages import BASELINES
from slipstream.algo.custom import user_function
from slipstream.algo.surrogate_losses import LOSSES
from slipstream.algo.trial import check_algorithm
from slipstream.config.recipes import BUILT_IN, RECIPES, choices, needs_engine_logprobs, resolved
from slipstream.errors import ConfigError

OWN = """
import torch
def half(inputs):
    return -0.5 * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N) * inputs.advantages_N
def centred(rewards_S, group_ids_S):
    return rewards_S - rewards_S.mean()
def two(a, b):
    return a
def raises(inputs):
    return inputs.nothing
def short(inputs):
    return inputs.logprobs_N[:2]
def number(inputs):
    return 3
def detached(inputs):
    return inputs.logprobs_N.detach()
def infinite(inputs):
    return inputs.logprobs_N / 0
CONSTANT = 3
"""


def check_user_function(kind, name):
    check_algorithm(resolved(rl(**{kind: name})))


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_the_tables_hold_what_a_run_file_can_name():
    assert {*BASELINES, "gae"} == set(BUILT_IN["advantage"])
    assert tuple(LOSSES) == BUILT_IN["loss"]
    for name in RECIPES:
        check_user_function("loss", resolved(rl(kind=name)).loss)


@pytest.mark.parametrize("of_package", [True, False])
def test_a_loss_and_an_advantage_of_another_package_or_from_a_file(of_package, own, installed):
    if of_package:
        points = (
            "[slipstream.losses]\nhalf = their_losses:half\n[slipstream.advantages]\ncentred = their_losses:centred\n"
        )
        installed("their_losses", OWN, points)
        with pytest.raises(ConfigError, match=r"did you mean 'half'"):
            check_user_function("loss", "halv")
    half, centred = ("half", "centred") if of_package else (f"{own}:half", f"{own}:centred")
    check_user_function("loss", half)
    check_user_function("advantage", centred)
    problem = make_problem()
    value, gradients, _ = problem.ours(rl(loss=half))
    built_in = problem.ours(rl(loss="policy_gradient"))
    assert value == pytest.approx(built_in[0] / 2)
    torch.testing.assert_close(gradients, built_in[1] / 2)
    assert user_function("advantage", centred)(torch.tensor([1.0, 3.0]), None).tolist() == [-1.0, 1.0]
    assert resolved(rl(advantage=centred)).scale_rewards == "none"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "names a file and no function"),
        (":missing", "has no function 'missing'"),
        (":CONSTANT", "is not a function"),
        (":two", "cannot be called with (inputs)"),
        (":raises", "has no attribute 'nothing'"),
        (":short", "returned a tensor of shape [2] for 6 tokens"),
        (":number", "returned int for 6 tokens"),
        (":detached", "a loss without a gradient"),
        (":infinite", "return finite numbers"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(own, name, says):
    with pytest.raises(ConfigError) as error:
        check_user_function("loss", f"{own}{name}")
    assert says in str(error.value)
    assert str(error.value).startswith("algorithm.loss")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("loss", "clipp", "did you mean 'clip'?"),
        ("advantage", "group", "'group_mean'"),
        ("loss", "zzz", "use one of clip, gspo, gspo_token, cispo, policy_gradient, or path/to/file.py:function"),
        ("loss", "nowhere.py:f", "there is no file nowhere.py"),
    ],
)
def test_unknown_names(kind, name, says):
    with pytest.raises(ConfigError) as error:
        check_user_function(kind, name)
    assert says in str(error.value)


@given(st.sampled_from(sorted(RECIPES)), st.booleans(), st.sampled_from(["auto", "masked", "none"]))
def test_resolving_is_idempotent_and_leaves_what_was_set(kind, in_reward, correction):
    given = rl(kind=kind, clip_high=0.5, importance_sampling=correction, kl_in="reward" if in_reward else "auto")
    final = resolved(given)
    assert "auto" not in final.model_dump().values()
    assert resolved(final) == final
    assert list(choices(final)) == []
    assert final.clip_high == 0.5
    assert correction in ("auto", final.importance_sampling)
    assert needs_engine_logprobs(final) == (final.importance_sampling != "none")


def test_a_class_of_hooks_is_named_beside_what_it_may_replace():
    found = {each.name: each.reason for each in choices(rl(hooks="own.py:Mine"))}
    replaced = {name for name, reason in found.items() if reason.endswith("; unless own.py:Mine has its own")}
    assert replaced == {"advantage", "scale_rewards", "loss"}


def test_the_recipe_of_this_project_is_what_it_was():
    final = resolved(rl())
    assert (final.advantage, final.scale_rewards, final.loss, final.normalize) == ("group_mean", "std", "clip", "token")
    assert (final.clip_low, final.clip_high, final.importance_sampling) == (0.2, 0.28, "truncated")
    assert (final.arguments.kl_estimator, final.arguments.kl_in) == ("k3", "loss")
    assert (final.arguments.importance_cap, final.arguments.importance_floor) == (2.0, 0.0)


def test_the_made_up_tokens_are_as_in_a_training(tmp_path):
    """A user may check what training always gives."""
    path = tmp_path / "checks.py"
    path.write_text("""
import torch
def loss(inputs):
    for each in (inputs.logprobs_N.detach(), inputs.old_logprobs_N, inputs.streams["behaviour_logprobs"]):
        assert (each < 0).all() and (each - inputs.logprobs_N.detach()).abs().max() < 0.2
    assert sorted(set(inputs.sequence_index_N.tolist())) == list(range(inputs.num_sequences))
    means = inputs.sequence_means(inputs.advantages_N)
    assert torch.equal(means, inputs.advantages_N) and means.min() < 0 < means.max()
    assert 0 < inputs.clip_low < 1 and 0 < inputs.clip_high < 1
    return inputs.logprobs_N
def advantage(rewards_S, group_ids_S):
    assert rewards_S.dtype == torch.float64 and rewards_S.min() == 0 and rewards_S.max() == 1
    assert sorted(group_ids_S.bincount().tolist()) == [1, 2]
    return rewards_S
""")
    check_user_function("loss", f"{path}:loss")
    check_user_function("advantage", f"{path}:advantage")
