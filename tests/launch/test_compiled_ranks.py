"""Compiled layers over ranks: the same losses, gradients and weights as uncompiled ones of one process, no graph more
than one process has, and one sentence where a rank's compiler fails."""

import json

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.launch import ranks
from slipstream.trainer import layers
from slipstream.trainer.state import read_state

from . import quick_rank, test_ranks
from .test_ranks import BATCHES, CASES, PPO, RATE, four_steps, make_config, model, one_step, trained

__all__ = ["model"]


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """Dynamo and AOTAutograd as they are, on every rank."""
    monkeypatch.setattr(layers, "COMPILER", quick_rank.COMPILER)
    monkeypatch.setattr(ranks, "PROGRAM", quick_rank.__name__)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("case", ["grpo", pytest.param("lora", marks=pytest.mark.slow)])
def test_losses_gradients_and_weights_are_those_of_one_process(case, model, tmp_path):
    """Under `lora` layers are computed again, and compute without their adapter too."""
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    one = four_steps(make_config(model, 1, compile=False, **CASES[case]), tmp_path / "one")
    several = four_steps(make_config(model, 2, compile=True, **CASES[case]), tmp_path / "several")
    test_ranks.compare(several, one)
