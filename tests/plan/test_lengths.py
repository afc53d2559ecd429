"""How long completions may get, and at which rate is learnt, where nobody said."""

import pytest

from slipstream.config import with_values
from slipstream.plan import make_plan
from slipstream.plan.derive import RATES, learning_rate
from slipstream.plan.lengths import least_tokens, wanted_tokens
from slipstream.plan.memory.sizes import GIB

from .test_plan import GRPO, LORA, SFT, facts, note, reasons, refusal

CHAT = {"num_parameters": 30_000_000, "context_length": 4096}


def planned(values=None, config=GRPO, **changes):
    return make_plan(with_values(config, values or {}), facts(memory_bytes=64 * GIB, **changes))


class TestMaxTokens:
    def test_a_chat_model_has_room_to_reason_whatever_the_gold_answers_are(self):
        made = planned(**CHAT)
        assert made.config.sampling.max_tokens == 2048
        assert "half of the model's context of 4096" in reasons(made)["sampling.max_tokens"]

    @pytest.mark.parametrize(
        ("changes", "tokens"),
        [
            (CHAT | {"context_length": 131_072}, 2048),  # no half of a long context
            (CHAT | {"max_turns": 4}, 512),  # turns share it
            ({}, 19),  # a tiny model says the answer
        ],
    )
    def test_others_have_less(self, changes, tokens):
        assert planned(**changes).config.sampling.max_tokens == tokens

    def test_few_tokens_for_a_model_that_thinks_are_warned_of(self):
        thinking = CHAT | {"thinks": True}
        few = {"sampling.max_tokens": 255}
        assert any("thinks before it answers" in text for text in planned(few, **thinking).warnings)
        assert planned(few, **CHAT).warnings == ()
        assert planned(few | {"model.thinking": False}, **thinking).warnings == ()
        assert planned({"sampling.max_tokens": 256}, **thinking).warnings == ()

    def test_one_long_prompt_does_not_shorten_all_completions(self):
        assert least_tokens([60] * 39 + [4000], 4096, 2048) == 2048
        assert least_tokens([60] * 10 + [4000] * 10, 4096, 2048) == 96, "every other prompt is long: that is the task"
        assert least_tokens([5000] * 5, 4096, 2048) == 1
        assert wanted_tokens(4096, 12, 1, says_only_answers=False)[0] == 2048


class TestLearningRate:
    @pytest.mark.parametrize("kind", RATES)
    def test_it_falls_with_the_size_to_what_is_usual(self, kind):
        sizes = [10**5, 800_000, 10**7, 135_000_000, 5 * 10**8, 7 * 10**9]
        rates = [learning_rate(kind, size) for size in sizes]
        assert rates == sorted(rates, reverse=True)
        assert (rates[0], rates[-1]) == RATES[kind][::-1]

    def test_by_kind(self):
        large = {"num_parameters": 7 * 10**9, "num_gpus": 1, "gpu_memory_bytes": 4000 * GIB}
        assert planned(**large).config.training.learning_rate == 1e-6
        sft = make_plan(SFT, facts(max_sequence_tokens=90, **large))
        assert sft.config.training.learning_rate == 1e-5
        assert "usual in SFT" in reasons(sft)["training.learning_rate"]
        assert planned(config=LORA, **large).config.training.learning_rate == 1e-4

    def test_the_critics_follows(self):
        assert planned({"algorithm.kind": "ppo"}).config.critic.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("values", "tasks", "named"),
    [
        (
            {"training.prompts_per_batch": 10**6, "algorithm.group_size": 10_000},
            10**6,
            "lower training.prompts_per_batch or algorithm.group_size",
        ),
        ({"training.micro_batch_tokens": 10**9}, 1000, "training.micro_batch_tokens = 1000000000"),
        ({"inference.replicas": 256}, 1000, "inference.replicas = 256"),
        ({"training.ranks": 256, "training.micro_batch_tokens": 300_000}, 1000, "training.ranks = 256"),
    ],
)
def test_what_is_refused_names_the_setting_that_did_it(values, tasks, named):
    assert named in refusal(values, num_train_tasks=tasks)


def test_fewer_held_out_tasks_than_asked_for_are_planned_with_both_numbers():
    made = planned(num_eval_tasks=115)
    assert made.config.evaluation.num_tasks == 115
    assert reasons(made)["evaluation.num_tasks"].startswith("lowered from 500: there are only 115 held-out tasks")
    assert note(made, "evaluations").how == "of 115 held-out tasks"
    assert planned(num_eval_tasks=500).config.evaluation.num_tasks == 500
