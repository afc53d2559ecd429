"""Batches of rollouts, and the credit that they get."""

from tests.recipe_settings import rl

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.trainer.credit_assignment import assign_credit


def batch_from(rollouts, **fields):
    return records.Batch(0, records.Version(0, 0), list(rollouts), **fields)


def credit_of(batch, penalties=None, critic=None, **algorithm):
    """With these settings, and completions of at most 10 tokens."""
    return assign_credit(batch, resolved(rl(**algorithm)), 10, penalties, critic)
