"""GRPO in one file: a tiny policy learns to write digits backward, `314=413.`

The steps, their order and the functions of `slipstream.algo` are those of the full system: SFT on gold answers,
copy the weights to the engine, sample groups, grade, compute advantages, update with a clipped,
importance-weighted loss. It leaves out everything between processes: the engine here is a bfloat16 copy of
the policy, and the importance weights correct for its rounding.

    python examples/tiny/grpo.py --steps 60

Shape suffixes: P prompts, B sequences (a group's stand together), T positions of prompt and completion,
C positions of the completion, D hidden units, V characters, N sampled tokens.
"""

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.algo.advantages import group_advantages, signal_fraction
from slipstream.algo.balancing import split
from slipstream.algo.logprobs import processed_logits, processed_logprobs
from slipstream.algo.statistics import wilson_interval
from slipstream.algo.surrogate_losses import LossInputs, clip_loss, kl_estimate, token_weights

ALPHABET = "0123456789=."
EQUALS, END = 10, 11
NUM_DIGITS = 6
PROMPT_LENGTH = MAX_TOKENS = NUM_DIGITS + 1
TEMPERATURE = 1.0


@dataclass
class Settings:
    """What can be set on the command line; the names are those of a run file."""

    steps: int = 60
    warmup_steps: int = 180
    prompts_per_batch: int = 32
    group_size: int = 8
    updates_per_batch: int = 2
    learning_rate: float = 3e-4
    scale_rewards: str = "std"
    normalize: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    num_eval_tasks: int = 500
    seed: int = 0


class Policy(nn.Module):
    """A causal transformer over twelve characters."""

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4):
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(0.02 * torch.randn(PROMPT_LENGTH + MAX_TOKENS, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        hidden_BTD = self.characters(tokens_BT) + self.positions[:length]
        causal_TT = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, src_mask=causal_TT)
        return self.head(hidden_BTD).float()


def completion_logprobs(policy: Policy, prompts_BT: Tensor, completions_BC: Tensor) -> Tensor:
    """`[B, C]`, under the distribution that tokens are sampled from."""
    logits_BTV = policy(torch.cat([prompts_BT, completions_BC[:, :-1]], 1))
    logits_NV = logits_BTV[:, PROMPT_LENGTH - 1 :].flatten(0, 1)
    logprobs_N, _ = processed_logprobs(logits_NV, completions_BC.flatten(), TEMPERATURE)
    return logprobs_N.view(completions_BC.shape)


def draw(numbers: Tensor, num_prompts: int, generator: torch.Generator) -> Tensor:
    return as_prompts(numbers[torch.randint(len(numbers), (num_prompts,), generator=generator)])


def as_prompts(numbers_P: Tensor) -> Tensor:
    """`[P, PROMPT_LENGTH]`: the digits of each number and an equals sign."""
    digits_PT = numbers_P[:, None] // 10 ** torch.arange(NUM_DIGITS).flip(0) % 10
    return torch.cat([digits_PT, torch.full((len(numbers_P), 1), EQUALS)], 1)


def gold(prompts_PT: Tensor) -> Tensor:
    """The right completion: the digits backwards and the end."""
    return torch.cat([prompts_PT[:, :NUM_DIGITS].flip(1), torch.full((len(prompts_PT), 1), END)], 1)


def reward(prompts_BT: Tensor, completions_BC: Tensor) -> Tensor:
    """1 for the right completion, otherwise 0."""
    return (completions_BC == gold(prompts_BT)).all(1).float()


@dataclass
class Rollouts:
    """`mask_BC` is true for sampled tokens: after the end there is only padding."""

    prompts_BT: Tensor
    completions_BC: Tensor
    mask_BC: Tensor
    behaviour_logprobs_BC: Tensor
    rewards_B: Tensor


@torch.no_grad()
def generate(engine: Policy, prompts_BT: Tensor, generator: torch.Generator) -> Rollouts:
    """Sample a completion for each prompt and grade it."""
    tokens_BT, running_B = prompts_BT, torch.ones(len(prompts_BT), dtype=torch.bool)
    masks, logprobs = [], []
    for _ in range(MAX_TOKENS):
        logprobs_BV = processed_logits(engine(tokens_BT)[:, -1], TEMPERATURE).log_softmax(-1)
        next_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        next_B1[~running_B] = END
        masks.append(running_B)
        logprobs.append(logprobs_BV.gather(1, next_B1)[:, 0])
        tokens_BT = torch.cat([tokens_BT, next_B1], 1)
        running_B = running_B & (next_B1[:, 0] != END)
    completions_BC = tokens_BT[:, PROMPT_LENGTH:]
    rewards_B = reward(prompts_BT, completions_BC)
    return Rollouts(prompts_BT, completions_BC, torch.stack(masks, 1), torch.stack(logprobs, 1), rewards_B)


def synchronise(policy: Policy) -> Policy:
    """The engine: it holds the policy's weights and computes a little differently."""
    return copy.deepcopy(policy).to(torch.bfloat16)


def evaluate(policy: Policy, numbers: Tensor, seed: int) -> tuple[float, str]:
    """Accuracy on these numbers, also with its 95 % interval as text."""
    rollouts = generate(synchronise(policy), as_prompts(numbers), torch.Generator().manual_seed(seed))
    num_right, num_tasks = int(rollouts.rewards_B.sum()), len(rollouts.rewards_B)
    low, high = wilson_interval(num_right, num_tasks)
    return num_right / num_tasks, f"{num_right / num_tasks:.3f} [{low:.3f}, {high:.3f}]"


def grpo_loss(
    settings: Settings,
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    reference_logprobs_N: Tensor | None,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
) -> Tensor:
    """One optimizer step's mean of `min(old / behaviour, cap) * clipped(new / old) + kl_coef * KL`."""
    num_sequences, clips = int(sequence_index_N.max()) + 1, (settings.clip_low, settings.clip_high)
    inputs = LossInputs(logprobs_N, old_logprobs_N, advantages_N, sequence_index_N, num_sequences, *clips)
    correction_N = torch.exp(old_logprobs_N - behaviour_logprobs_N).clamp(max=settings.importance_cap)
    loss_N = clip_loss(inputs).loss_N * correction_N
    if reference_logprobs_N is not None:
        kl_N = kl_estimate(logprobs_N, reference_logprobs_N, settings.kl_estimator)
        loss_N = loss_N + settings.kl_coef * kl_N
    weights_N = token_weights(sequence_index_N, num_sequences, settings.normalize)
    return (loss_N * weights_N).sum() / weights_N.sum()


def update(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def warm_up(policy: Policy, numbers: Tensor, generator: torch.Generator, settings: Settings) -> None:
    """Supervised fine-tuning on gold answers: the format, and a part of the task."""
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    for _ in range(settings.warmup_steps):
        prompts_BT = draw(numbers, settings.prompts_per_batch, generator)
        update(policy, optimizer, -completion_logprobs(policy, prompts_BT, gold(prompts_BT)).mean())


def train_on(rollouts: Rollouts, policy: Policy, reference: Policy | None, optimizer, settings: Settings):
    """The optimizer steps of one batch; returns its signal fraction and the last step's sample size."""
    num_groups = len(rollouts.rewards_B) // settings.group_size
    groups_B = torch.arange(num_groups).repeat_interleave(settings.group_size)
    advantages_B = group_advantages(rollouts.rewards_B, groups_B, settings.scale_rewards)
    with torch.no_grad():
        texts = rollouts.prompts_BT, rollouts.completions_BC
        old_BC = completion_logprobs(policy, *texts)
        reference_BC = completion_logprobs(reference, *texts) if reference else None
    sample_size = 1.0
    for part in split(num_groups, settings.updates_per_batch):
        rows_B = torch.isin(groups_B, torch.tensor(part))
        mask_BC = rollouts.mask_BC & rows_B[:, None]
        sequence_index_N = mask_BC[rows_B].nonzero()[:, 0]
        behaviour_N = rollouts.behaviour_logprobs_BC[mask_BC]
        reference_N = None if reference_BC is None else reference_BC[mask_BC]
        logprobs_BC = completion_logprobs(policy, *(text[rows_B] for text in texts))
        logprobs_N = logprobs_BC[rollouts.mask_BC[rows_B]]
        advantages_N = advantages_B[rows_B][sequence_index_N]
        inputs = logprobs_N, old_BC[mask_BC], behaviour_N, reference_N, advantages_N, sequence_index_N
        update(policy, optimizer, grpo_loss(settings, *inputs))
        ratio_N = torch.exp(logprobs_N.detach() - behaviour_N)
        sample_size = float(ratio_N.sum() ** 2 / (len(ratio_N) * ratio_N.square().sum()))
    return signal_fraction(rollouts.rewards_B, groups_B), sample_size


def main(settings: Settings) -> None:
    torch.set_num_threads(1)  # Its operations are too small to be shared.
    begin = time.monotonic()
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    numbers = torch.randperm(10**NUM_DIGITS, generator=generator)
    held_out, numbers = numbers[: settings.num_eval_tasks], numbers[settings.num_eval_tasks :]
    policy = Policy()
    warm_up(policy, numbers, generator, settings)
    before, text = evaluate(policy, held_out, settings.seed)
    print(f"before {text}")

    reference = copy.deepcopy(policy) if settings.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(policy.parameters(), settings.learning_rate)
    for step in range(1, settings.steps + 1):
        engine = synchronise(policy)
        prompts_PT = draw(numbers, settings.prompts_per_batch, generator)
        rollouts = generate(engine, prompts_PT.repeat_interleave(settings.group_size, 0), generator)
        signal, sample_size = train_on(rollouts, policy, reference, optimizer, settings)
        if step % 10 == 0:
            print(f"step {step:4d}  reward {rollouts.rewards_B.mean():.3f}", end="  ")
            print(f"groups with signal {signal:.2f}  effective sample size {sample_size:.3f}")

    after, text = evaluate(policy, held_out, settings.seed)
    print(f"after  {text}, {after - before:+.3f} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    main(Settings(**vars(parser.parse_args())))
