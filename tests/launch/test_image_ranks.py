"""Images over several trainer processes: the numbers of one process, whichever rank reads which image."""

import pytest
import torch

from slipstream.config import RunConfig
from slipstream.launch.build import build_objective
from slipstream.plan.decided import planned_config
from slipstream.trainer.packing import StepBatch
from slipstream.weights.fingerprint import describe
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import matched
from tests.launch.test_ranks import GRPO, PPO, RATE, SAMPLING, make_config, one_step, trained
from tests.matching.matching_runs import answer_ids, new_detector, rollout
from tests.trainer.test_image_rows import save, sequences

TOWERS = ("visual", "vision_tower", "projector")


def compare_weights(several, one):
    for name, tensor in several.items():
        of_tower = any(part in name for part in TOWERS)
        assert (tensor - one[name]).abs().max() <= (0.0 if of_tower else 4 * RATE), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "algorithm", "changes"),
    [
        ("qwen3-vl", GRPO, {}),
        ("qwen2.5-vl", {"kind": "sft"}, {"lora": {"rank": 4}, "reshard": "layer"}),
        ("gemma3", GRPO, {"gradient_checkpointing": True}),
        ("qwen3-vl", PPO, {"fp32_head": True}),
    ],
)
def test_images_over_ranks(family, algorithm, changes, tmp_path):
    """Each rank reads the images of its rows; the batches have two, and one."""
    model = save(tmp_path / "model", family)
    batches = [(StepBatch(sequences(model), [0.5, -1.0, 0.3, 0.8, -0.2, 1.0])), StepBatch(sequences(model)[:1], [1.0])]
    for batch in batches:
        for sequence in batch.sequences:
            sequence.logprobs = [-4.0 * trained for trained in sequence.mask]
    found = {}
    for ranks in (1, 2):
        config = make_config(model, ranks, algorithm, **changes)
        with trained(config, tmp_path) as (parts, _):
            rows = []
            for batch in batches:
                if parts.critic is not None:
                    values = parts.critic.learner.values(batch.sequences)
                    batch.fill("old_values", values)
                    batch.fill("returns", [value + 1.0 for value in values])
                    rows.append(parts.critic.train([batch]))
                rows.append(one_step(parts, config, batch))
            scores = parts.learner.forward(batches[0].sequences, SAMPLING)
            weights = parts.learner.adapter_weights() if config.lora else parts.learner.named_weights()
            described = describe(weights)
            tensors = dict(parts.learner.adapter_weights() if config.lora else parts.learner.named_weights())
            assert describe(tensors.items()) == described
        found[ranks] = rows, scores, tensors
    for several, one in zip(found[2][0], found[1][0], strict=True):
        numbers = {name for name in one if "loss" in name or name == "grad_norm"}
        assert numbers
        for name in numbers:
            assert several[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name
    for several, one in zip(found[2][1].logprobs, found[1][1].logprobs, strict=True):
        torch.testing.assert_close(several, one, atol=2e-4, rtol=0)
    compare_weights(found[2][2], found[1][2])


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return new_detector(tmp_path_factory.mktemp("detector") / "model")


@pytest.mark.parametrize(
    "settings",
    [
        {"softctx_iterations": 3},
        pytest.param({"softctx_iterations": 2, "softctx_unrolled": True}, marks=pytest.mark.full),
    ],
)
def test_rollout_matching_over_ranks(settings, detector, tmp_path):
    """Of both channels; with one sequence, for which a rank makes as many passes of nothing, too."""
    ids = answer_ids(detector, ("tiny", (9, 590, 95, 705)), ("x", (500, 500, 600, 600)))
    rollouts = [rollout(detector, 1, ids), rollout(detector, 0, ids[:3])]
    found = matched(rollouts, [detector.tasks[1], detector.tasks[0]], detector.tokens, MatchingConfig(), 512)
    channel_b = [each.sequences[0] for each in found.rollouts]
    steps = [list(detector.examples), channel_b, list(detector.examples)[:1]]
    rows = {}
    for ranks in (1, 2):
        sections = {
            "model": {"path": str(detector.folder), "dtype": "float32", "fp32_head": False},
            "environment": {"name": "detection", "settings": {"path": "none"}},
            "algorithm": {"kind": "sft"},
            "matching": settings,
            "training": {"steps": 3, "ranks": ranks, "micro_batch_tokens": 512, "rank_timeout_s": 120.0},
            "run": {"threads": 2},
        }
        config = planned_config(RunConfig.model_validate(sections))
        objective = build_objective(config, SAMPLING)
        rows[ranks] = []
        with trained(config, tmp_path) as (parts, _):
            for step in steps:
                metrics = parts.learner.forward_backward(StepBatch(step), objective)
                stats = parts.learner.optim_prepare(RATE)
                parts.learner.optim_commit()
                rows[ranks].append({**metrics, "grad_norm": stats.grad_norm})
            rows[ranks].append(dict(parts.learner.named_weights()))
    *several, weights = rows[2]
    for ours, one in zip(several, rows[1], strict=False):
        for name in one:
            if "loss" in name or name in ("grad_norm", "token_accuracy", "stage2/num_boxes"):
                assert ours[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name
    compare_weights(weights, rows[1][-1])
