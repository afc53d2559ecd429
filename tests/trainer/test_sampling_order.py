"""Credit over episodes of several conversations: the order is that in which turns were sampled, not that of sequences.

Episodes are recorded by the policy that environments talk to; its turns overlap, go back to earlier conversations,
branch, and begin with rewritten histories. Each sampled token has an id of its own, by which the reference, written
over the flat list of sampled tokens, is compared with what training reads.
"""

import asyncio
import itertools
import random
import zlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.credit import batch_from, credit_of

from slipstream import records
from slipstream.config.schema import CriticConfig
from slipstream.envs.policy import RecordingPolicy
from slipstream.errors import TrainingError
from slipstream.records import Completion, Message
from slipstream.trainer.turn_credit import sampling_order

_ROLES = {"user": 1, "assistant": 2}
_FIRST = 100


class Numbers:
    """A tokenizer of texts that are numbers."""

    def render(self, messages):
        found = []
        for message in messages:
            found += [_ROLES[message.role], *map(int, message.content.split())]
        return [*found, _ROLES["assistant"]]

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def decode_turn(self, token_ids):
        return self.decode(token_ids), self.decode(token_ids)


def play(seed, serial):
    """An episode of rounds of turns that overlap within a round. Returns its rollout, without rewards, and the ids of
    each turn's tokens, in the order in which the turns ended."""
    draw, ended = random.Random(seed), []

    async def main():
        waiting = []

        async def generate(prompt_ids, max_tokens, tools, media):
            may_end = asyncio.get_running_loop().create_future()
            waiting.append(may_end)
            await may_end
            tokens = [next(serial) for _ in range(draw.randint(1, 4))]
            ended.append(tokens)
            return Completion("c", tokens, [-0.5] * len(tokens), "stop")

        policy = RecordingPolicy(generate, Numbers(), call_tool=None)

        async def turn(history):
            reply = await policy.chat(history)
            conversations.append([*history, reply.message])

        conversations = [[]]
        for _ in range(draw.randint(1, 4)):
            chats = []
            for _ in range(draw.randint(1, 3)):
                history = draw.choice(conversations)
                if draw.random() < 0.3:  # compacted, or a template that drops earlier turns
                    history = history[-1:]
                chats.append(asyncio.create_task(turn([*history, Message("user", str(draw.randint(10, 12)))])))
            while len(waiting) < len(chats):
                await asyncio.sleep(0)
            draw.shuffle(waiting)
            for may_end in waiting:
                may_end.set_result(None)
            waiting.clear()
            await asyncio.gather(*chats)
        policy.close()
        return policy

    policy = asyncio.run(main())
    made = records.Rollout("r", "t", "g", policy.sequences, 0.0, "done", turn_spans=policy.spans)
    made.num_turns = len(ended)
    return made, ended


def fraction(name, token):
    """A number from 0 to 1, exact in float32, for a token."""
    return zlib.crc32(f"{name} {token}".encode()) % 65 / 64


def by_sequence(rollout, name):
    sampled = ([t for t, m in zip(s.token_ids, s.mask, strict=True) if m] for s in rollout.sequences)
    return [torch.tensor([fraction(name, token) for token in tokens]) for tokens in sampled]


def played_of(seed, rewards_the_whole):
    """Three episodes with rewards of their turns, and maybe one of each as a whole; their batch and penalties."""
    serial, draw = itertools.count(_FIRST), random.Random(seed)
    played = [play(f"{seed} {number}", serial) for number in range(3)]
    for rollout, turns in played:
        rollout.turn_rewards = [draw.randint(-4, 4) / 4 for _ in turns]
        rollout.reward = sum(rollout.turn_rewards) + (draw.randint(0, 4) / 4 if rewards_the_whole else 0)
    penalties = [[part.double() for part in by_sequence(rollout, "penalty")] for rollout, _ in played]
    return played, batch_from(rollout for rollout, _ in played), penalties


def generalized(rewards, values, gamma, gae_lambda):
    """Equations 11, 12 and 16 of arXiv 1506.02438, as sums."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * b - v for r, b, v in zip(rewards, after, values, strict=True)]
    size = len(errors)
    return [sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, size)) for t in range(size)]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**9),
    credit=st.sampled_from(["episode", "turn"]),
    with_kl=st.booleans(),
    gamma=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([1.0, 0.5, 0.0]),
)
def test_a_critics_credit_follows_the_order_of_sampling(seed, credit, with_kl, gamma, gae_lambda):
    played, batch, penalties = played_of(seed, True)
    critic = SimpleNamespace(
        values=lambda given: [by_sequence(rollout, "value") for rollout in given.rollouts],
        config=CriticConfig(gamma=gamma, gae_lambda=gae_lambda),
    )
    settings = {"kind": "ppo", "scale_rewards": "none", "credit": credit}
    credit_of(batch, penalties if with_kl else None, critic, **settings)
    for rollout, turns in played:
        flat = [token for tokens in turns for token in tokens]
        rewards = {token: -fraction("penalty", token) if with_kl else 0.0 for token in flat}
        rewards[flat[-1]] += rollout.reward
        if credit == "turn":
            for tokens, reward in zip(turns, rollout.turn_rewards, strict=True):
                rewards[flat[-1]] -= reward
                rewards[tokens[-1]] += reward
        values = [fraction("value", token) for token in flat]
        expected = generalized([rewards[token] for token in flat], values, gamma, gae_lambda)
        advantage = dict(zip(flat, expected, strict=True))
        for sequence in rollout.sequences:
            trained = [t for t, m in zip(sequence.token_ids, sequence.mask, strict=True) if m]
            assert sequence.values("advantages") == pytest.approx([advantage[token] for token in trained], abs=1e-9)
            old = [fraction("value", token) for token in trained]
            assert sequence.values("old_values") == old
            returns = [advantage[token] + value for token, value in zip(trained, old, strict=True)]
            assert sequence.values("returns") == pytest.approx(returns, abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9), with_kl=st.booleans())
def test_credit_of_turns_without_a_critic_follows_the_order_of_sampling(seed, with_kl):
    """Returns to go, less the mean of the group's returns of the turn with the same number."""
    played, batch, penalties = played_of(seed, False)
    credit_of(batch, penalties if with_kl else None, scale_rewards="none", credit="turn")

    def to_go(rollout, turns, number):
        cost = sum(fraction("penalty", token) for tokens in turns[number:] for token in tokens)
        return sum(rollout.turn_rewards[number:]) - cost * with_kl

    for rollout, turns in played:
        expected = {}
        for number, tokens in enumerate(turns):
            others = [to_go(r, t, number) for r, t in played if number < len(t)]
            own = to_go(rollout, turns, number) - sum(others) / len(others)
            expected |= dict.fromkeys(tokens, own)
        for sequence in rollout.sequences:
            tokens = itertools.compress(sequence.token_ids, sequence.mask)
            wanted = [expected[token] for token in tokens]
            assert sequence.values("advantages") == pytest.approx(wanted, abs=1e-5)


def side(spans):
    """Turn 1, turn 3 in sequence 0; turn 2 in sequence 1: an answer, a critique of it elsewhere, a second answer."""
    mask = [False, True, True, False, True]
    sequences = [records.Sequence([1] * 5, mask), records.Sequence([1] * 3, [False, True, True])]
    return records.Rollout("r", "t", "g", sequences, 1.0, "done", turn_spans=spans)


ANSWER, CRITIQUE, SECOND = records.TurnSpan(0, 1, 3), records.TurnSpan(1, 1, 3), records.TurnSpan(0, 4, 5)


def test_a_side_conversation_comes_before_the_answer_that_follows_it():
    assert sampling_order(side([ANSWER, CRITIQUE, SECOND])) == [0, 1, 3, 4, 2]


def test_a_record_without_spans_is_read_in_the_order_of_its_sequences():
    assert sampling_order(side([])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("spans", [[ANSWER, SECOND], [ANSWER, ANSWER, CRITIQUE, SECOND], [ANSWER, CRITIQUE]])
def test_turns_that_do_not_hold_each_sampled_token_once_are_refused(spans):
    with pytest.raises(TrainingError, match="turn_spans"):
        sampling_order(side(spans))
