"""Episodes in which the policy samples nothing: they are counted, and nothing is learned or judged by them."""

import math

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.envs import Environment, Episode, Message, Score, Task
from slipstream.orchestrator.evaluate import evaluate
from slipstream.records import Version
from slipstream.runlog.ledger import Ledger, balance
from tests.orchestrator.test_orchestrator import SAMPLING, make_batcher, make_runner, say

TASKS = [Task(letter, (Message("user", letter),)) for letter in "ab"]


class Silent(Environment):
    """Half of the episodes of task a, and all of b, end before the first turn; such a one would earn 10."""

    max_turns = 1

    def __init__(self):
        super().__init__()
        self.num_played, self.graded = 0, []

    def tasks(self, split, num_tasks):
        return TASKS

    async def run(self, task, policy):
        self.num_played += 1
        if task.id == "b" or self.num_played % 2:
            return Episode("", "done", num_turns=0)
        return Episode((await policy.chat(task.prompt)).text, "done")

    def score(self, task, completion):
        self.graded.append(completion)
        return Score(10.0 if not completion else 1.0)


class Together(Silent):
    scores_groups = True

    def score_group(self, task, episodes):
        self.graded += [episode.completion for episode in episodes]
        return [Score(1.0)] * len(episodes)


def runner_of(environment, **options):
    return make_runner(ScriptedEngine(say("z")), environment, request_timeout_s=5.0, **options)


def batcher_of(environment, warnings, ledger=None, **options):
    how = {"group_size": 4, "max_reward_failures": 0.0, "needs_logprobs": False, "warn": warnings.append}
    return make_batcher(None, runner=runner_of(environment, **options), ledger=ledger, **how)


@pytest.mark.parametrize("kind", [Silent, Together])
async def test_they_are_in_no_batch_and_no_grade(kind, tmp_path):
    environment, warnings = kind(), []
    ledger = Ledger(tmp_path, 0, 0, staleness=0, shape={})
    batcher = batcher_of(environment, warnings, ledger)
    batches = [await batcher.make(step, Version(0, step), TASKS) for step in range(2)]
    ledger.close(2, is_whole=True)
    for batch in batches:
        assert [(rollout.task_id, rollout.reward) for rollout in batch.rollouts] == [("a", 1.0)] * 2
        assert batch.dropped == {"no_tokens": 6}
    assert environment.graded == ["z"] * 4
    assert len(warnings) == 1, "said once for a run"
    found = {(entry.state, entry.reason): entry.num_groups for entry in balance(tmp_path).entries}
    # Groups without a rollout to train on are `failed`; their rollouts' tokens, none, are counted by outcome.
    assert found == {("trained", ""): 2, ("dropped", "failed"): 2, ("dropped", "no_tokens"): 0}


async def test_a_first_observation_beyond_the_context_is_one_of_them():
    batch = await batcher_of(Together(), [], context_length=1).make(0, Version(0, 0), TASKS)
    assert (batch.rollouts, batch.dropped) == ([], {"no_tokens": 8})


async def test_in_an_evaluation_they_are_wrong_and_have_no_reward():
    warnings = []
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.0, "samples_per_task": 2}
    found = await evaluate(runner_of(Silent()), TASKS, **how, warn=warnings.append)
    assert (found.num_right, found.num_failed, found.mean_reward) == (1, 3, 1.0)
    assert found.accuracy == 0.25
    assert found.further["eval/pass@2"] == 0.5
    assert len(warnings) == 1
    assert not math.isnan(found.mean_length)
