"""Checks of steps, batches and warm-ups. The plan repeats some, once it has decided `training.steps`."""

from __future__ import annotations

from slipstream.config.bounds import Problems
from slipstream.config.schema import RunConfig
from slipstream.config.traits import uses_critic


def batch_problems(config: RunConfig) -> Problems:
    """A sentence for each contradiction among steps, epochs, batches and warm-ups."""
    training = config.training
    if training.steps is not None:
        yield from warmup_problems(config, training.steps)
    if training.overprovision and _follows_data(config):
        yield (
            f"training.overprovision = {training.overprovision:g} has the groups that finish last cancelled, and "
            'training.order = "data" waits for all of them: set training.order = "ready", or remove it'
        )
    sentence = divisor_problem(training.updates_per_batch, training.prompts_per_batch)
    if sentence:
        yield sentence


def _follows_data(config: RunConfig) -> bool:
    """Whether batches are made in the order of the data, as far as the settings say."""
    order = config.training.order
    return order == "data" or (order == "auto" and not config.training.staleness)


def warmup_problems(config: RunConfig, steps: int) -> Problems:
    """A sentence for each warm-up that `steps` batches do not reach the end of."""
    training, warmup = config.training, config.critic.warmup_steps
    if uses_critic(config) and warmup >= steps:
        yield (
            f"critic.warmup_steps = {warmup} is not below training.steps = {steps}, so the policy would never be "
            f"trained: use at most {steps - 1}"
        )
    num_updates = steps * training.updates_per_batch * training.epochs_per_batch
    if training.warmup_steps > 0 and training.warmup_steps >= num_updates:
        yield (
            f"training.warmup_steps = {training.warmup_steps} is not below the run's {num_updates} optimizer steps, so "
            f"the learning rate would never be reached: use at most {num_updates - 1}"
        )


def divisor_problem(updates: int, prompts: int) -> str:
    """Why a batch of `prompts` prompts cannot be split into `updates` optimizer steps of whole groups; empty if it
    can."""
    if prompts % updates == 0:
        return ""
    divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
    below = [number for number in divisors if number < updates][-1:]
    near = below + [number for number in divisors if number > updates][:1]
    return (
        f"training.updates_per_batch = {updates} does not divide training.prompts_per_batch = {prompts}: "
        f"use {' or '.join(str(number) for number in near)}"
    )
