"""TRL's own code on the same numbers: `_compute_loss` and `_generate_and_score_completions` of its trainers, called on
objects that hold what these methods read and no more."""

import collections
import types

import pytest
import torch
from tests.algo.problem import LENGTHS, MAX_TOKENS, make_problem, stream
from tests.recipe_settings import rl
from tests.trainer.test_credit_assignment import batch_of

from slipstream.algo.advantages import group_advantages, leave_one_out
from slipstream.algo.importance_sampling import importance_weights
from slipstream.algo.shaping import overlong_punishment
from slipstream.config.recipes import resolved
from slipstream.trainer.credit_assignment import assign_credit
from slipstream.trainer.old_logprobs import kl_penalties_of

pytest.importorskip("trl")
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, rloo_trainer

COMPLETIONS = [[3] * length for length in LENGTHS]


def padded(rows):
    """`[S, longest]`, zeros behind each row."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class Model:
    training = True
    is_gradient_checkpointing = False


class Accelerator:
    device, num_processes, process_index = torch.device("cpu"), 1, 0
    sync_gradients = is_main_process = True

    def gather(self, value):
        return value

    def reduce(self, value, reduction):
        return value


class _Scripted:
    """Instead of the constructor, which wants a model and a data set: the attributes; instead of generating, scoring
    and forward passes: what they would have given."""

    def __init__(self, problem, **settings):
        self.problem = problem
        self.model, self.accelerator, self.ref_model = Model(), Accelerator(), "reference"
        self._tokenizer = types.SimpleNamespace(pad_token_id=0)
        self.processing_class = types.SimpleNamespace(batch_decode=lambda ids, **_: ["x"] * len(ids))
        self.args = types.SimpleNamespace(
            use_bias_correction_kl=False,
            delta=settings.pop("delta", None),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=len(LENGTHS),
            gradient_checkpointing_kwargs=None,
            report_to=[],
        )
        self.state = types.SimpleNamespace(num_input_tokens_seen=0, global_step=0)
        self._metrics = {"train": collections.defaultdict(list)}
        self._logs = collections.defaultdict(lambda: collections.defaultdict(list))
        for name in ("prompt", "completion", "advantages", "images"):
            self._logs[name] = []
        nothing = ("environment_factories", "environments", "tools", "pad_to_multiple_of", "off_policy_mask_threshold",
                   "rollout_func", "reward_clip_range")  # fmt: skip
        off = ("aux_loss_enabled", "use_adaptive_entropy", "mask_truncated_completions", "log_multimodal",
               "_is_vlm", "normalize_advantages", "use_vllm", "log_completions")  # fmt: skip
        self.__dict__ |= dict.fromkeys(nothing) | dict.fromkeys(off, False)
        self._pending_metrics, self._pending_extra_logs, self.eos_token_ids = {}, {}, [1]
        self.num_generations = 2
        self.num_iterations = self.current_gradient_accumulation_steps = 1
        self.reward_weights, self.reward_func_names, self.reward_funcs = torch.ones(1), ["r"], [None]
        self.multi_objective_aggregation = "sum_then_normalize"
        self.top_entropy_quantile, self.beta, self.max_completion_length = 1.0, 0.0, MAX_TOKENS
        self.importance_sampling_level = "token"
        self.vllm_importance_sampling_correction = True
        self.entropy_coef = settings.get("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef > 0
        self.__dict__ |= settings

    def _calculate_rewards(self, *_):
        return self.rewards[:, None]

    def _get_per_token_logps_and_entropies(self, model, *_, **__):
        batch = self.problem.batch
        if model == "reference":
            return padded(stream(batch, "reference_logprobs")), None, None
        if not torch.is_grad_enabled():
            return padded(stream(batch, "old_logprobs")), None, None
        rows = [x.log_softmax(-1) for x in self.problem.logits]
        ids = [torch.tensor(s.token_ids[2:])[:, None] for s in batch.sequences]
        logps = [row.gather(1, index)[:, 0] for row, index in zip(rows, ids, strict=True)]
        return padded(logps), padded([-(row.exp() * row).sum(-1) for row in rows]), None


class MinimalGRPO(_Scripted, grpo_trainer.GRPOTrainer):
    def _generate(self, prompts):
        sampled = [s.logprobs[2:] for s in self.problem.batch.sequences]
        texts = ["x"] * len(prompts)
        return [[1, 2]] * len(prompts), COMPLETIONS, None, texts, sampled, None, None, {}


class MinimalRLOO(_Scripted, rloo_trainer.RLOOTrainer):
    def _generate(self, prompts):
        return [[1, 2]] * len(prompts), COMPLETIONS, ["x"] * len(prompts)


@pytest.fixture
def problem():
    return make_problem()


def inputs_of(problem, config):
    batch = problem.batch
    ids = padded([torch.tensor(s.token_ids[2:]) for s in batch.sequences])
    mask = padded([torch.ones(length, dtype=torch.long) for length in LENGTHS])
    prompts = torch.ones(len(LENGTHS), 2, dtype=torch.long)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(batch.advantages),
        "old_per_token_logps": padded(stream(batch, "old_logprobs")).double(),
        "ref_per_token_logps": padded(stream(batch, "reference_logprobs")).double(),
        "num_items_in_batch": mask.sum(),
    }


NONE = {"importance_sampling": "none"}
LOSSES = {
    "grpo": ({"normalize": "sequence", **NONE}, {"loss_type": "grpo"}),
    "dr_grpo": ({"kind": "dr_grpo", "clip_high": 0.28, **NONE}, {"loss_type": "dr_grpo"}),
    "dapo": ({"kind": "dapo", **NONE}, {"loss_type": "dapo"}),
    "bnpo": ({"normalize": "token", **NONE}, {"loss_type": "bnpo"}),
    "cispo": ({"kind": "cispo", "clip_high": 0.5, **NONE}, {"loss_type": "cispo", "epsilon_high": 1.5}),
    "gspo": (
        {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.28, **NONE},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "dual clip": ({"clip_dual": 1.5, **NONE}, {"loss_type": "dapo", "delta": 1.5}),
    "kl": ({"kl_coef": 0.3, **NONE}, {"loss_type": "dapo", "beta": 0.3}),
    "kl and sequences": ({"kl_coef": 0.3, "normalize": "sequence", **NONE}, {"loss_type": "grpo", "beta": 0.3}),
    "entropy": (
        {"entropy_coef": 0.2, "normalize": "sequence", **NONE},
        {"loss_type": "grpo", "entropy_coef": 0.2},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, problem):
    ours, theirs = LOSSES[name]
    config = rl(**ours)
    trainer = MinimalGRPO(problem, **{"epsilon_low": 0.2, "epsilon_high": 0.28} | theirs)
    loss = trainer._compute_loss(trainer.model, inputs_of(problem, config))
    loss.backward()
    value, gradients, metrics = problem.ours(config)
    assert value == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(gradients, torch.cat([x.grad for x in problem.logits]), rtol=1e-5, atol=1e-5)
    assert metrics["entropy"] == pytest.approx(trainer._metrics["train"]["entropy"][0], abs=1e-5)
    if "clip_ratio/low_mean" in trainer._metrics["train"] and theirs.get("importance_sampling_level") != "sequence":
        assert metrics["clip_fraction_low"] == pytest.approx(trainer._metrics["train"]["clip_ratio/low_mean"][0])


def scored(trainer, rewards):
    trainer.rewards = torch.tensor(rewards)
    with torch.no_grad():
        return trainer._generate_and_score_completions([{"prompt": "x"}] * len(rewards))


REWARDS = [0.5, 1.0, 0.25, 0.25, -1.0, 3.0]
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(("ours", "theirs"), [("std", "group"), ("batch", "batch"), ("none", "none")])
def test_grpos_advantages(ours, theirs, problem):
    output = scored(MinimalGRPO(problem, scale_rewards=theirs), REWARDS)
    torch.testing.assert_close(group_advantages(torch.tensor(REWARDS), GROUPS, ours), output["advantages"])


@pytest.mark.parametrize(("ours", "theirs"), [("whiten", True), ("none", False)])
def test_rloos_advantages(ours, theirs, problem):
    output = scored(MinimalRLOO(problem, normalize_advantages=theirs), REWARDS)
    torch.testing.assert_close(
        group_advantages(torch.tensor(REWARDS), GROUPS, ours, leave_one_out), output["advantages"]
    )


def test_rloos_kl_in_the_reward(problem):
    output = scored(MinimalRLOO(problem, beta=0.1), REWARDS)
    batch = problem.batch
    rollouts = batch_of(REWARDS, 2)
    for rollout, sequence in zip(rollouts.rollouts, batch.sequences, strict=True):
        rollout.sequences = [sequence]
    penalties, _ = kl_penalties_of(
        rollouts, stream(batch, "old_logprobs"), stream(batch, "reference_logprobs"), "k1", 0.1
    )
    credit = assign_credit(rollouts, resolved(rl(kind="rloo", kl_coef=0.1)), MAX_TOKENS, penalties)
    torch.testing.assert_close(torch.tensor(credit.advantages), output["advantages"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("floor", [None, 0.6])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("truncated", "token_truncate"),
        ("masked", "token_mask"),
        ("sequence_truncated", "sequence_truncate"),
        ("sequence_masked", "sequence_mask"),
    ],
)
def test_importance_corrections(ours, theirs, floor, problem):
    """The weights, and the loss with them: TRL's two methods one after the other."""
    trainer = MinimalGRPO(
        problem,
        use_vllm=True,
        vllm_importance_sampling_mode=theirs,
        vllm_importance_sampling_clip_max=1.4,
        vllm_importance_sampling_clip_min=floor,
        scale_rewards="group",
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.28,
    )
    ratio = scored(trainer, REWARDS)["importance_sampling_ratio"].expand(-1, max(LENGTHS))
    batch, index = problem.batch, torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    behaviour = torch.tensor([x for s in batch.sequences for x in s.logprobs[2:]])
    weights, _ = importance_weights(
        torch.cat(stream(batch, "old_logprobs")), behaviour, index, len(LENGTHS), ours, floor or 0.0, 1.4
    )
    mask = padded([torch.ones(length) for length in LENGTHS]).bool()
    torch.testing.assert_close(weights, ratio[mask])
    assert (weights == 1.4).any() or (weights == 0.0).any(), "the bounds must be at work"

    config = rl(importance_sampling=ours, importance_cap=1.4, importance_floor=floor or 0.0)
    loss = trainer._compute_loss(trainer.model, inputs_of(problem, config) | {"importance_sampling_ratio": ratio})
    loss.backward()
    value, gradients, _ = problem.ours(config)
    assert value == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(gradients, torch.cat([x.grad for x in problem.logits]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("buffer", [0, 4, 20])
def test_overlong_punishment(buffer):
    lengths = list(range(1, 30))
    theirs = get_soft_overlong_punishment(20, buffer)([[7] * length for length in lengths])
    assert overlong_punishment(torch.tensor(lengths), 20, buffer).tolist() == pytest.approx(theirs)
