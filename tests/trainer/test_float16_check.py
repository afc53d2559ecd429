"""The trial of a model in float16: which tokens it computes, and which module it names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.trainer.model.float16_check import check_float16


class Part(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, states):
        return self.output(states)


class Model:
    def __init__(self, *outputs, words=1280):
        self.network = nn.Sequential(nn.Sequential(*map(Part, outputs)))
        self.packing, self.device = True, torch.device("cpu")
        self.config = SimpleNamespace(vocab_size=words)
        self.rows = []

    def logits(self, row):
        self.rows.append(row)
        return self.network(row.token_ids_T.float())


def same(states):
    return states


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_the_first_module_that_does_not_fit_is_named(wrong):
    def last_only(states):
        return torch.where(states == states.max(), wrong, states)

    for outputs, name in (((same, last_only, last_only), "0.1"), ((last_only, same), "0.0")):
        with pytest.raises(ConfigError, match=rf"^Sequential computes values in {name} that float16 cannot hold"):
            check_float16(Model(*outputs))
    check_float16(Model(same, same))


def test_of_several_outputs_the_first_counts():
    check_float16(Model(lambda states: (states, states / 0.0)))
    with pytest.raises(ConfigError, match=r"in 0\.0 that"):
        check_float16(Model(lambda states: (states / 0.0, states)))
    check_float16(Model(lambda states: {"no": "tensor"}))


@pytest.mark.parametrize(("words", "step"), [(1280, 10), (1400, 10), (128, 1)])
def test_tokens_are_from_all_over_the_vocabulary(words, step):
    model = Model(same, words=words)
    check_float16(model)
    (row,) = model.rows
    assert row.target_ids_N.tolist() == list(range(step, 128 * step, step))
    assert row.token_ids_T.tolist() == list(range(0, 127 * step, step))


def test_a_small_vocabulary_is_tried_as_a_whole():
    model = Model(same, words=97)
    check_float16(model)
    assert set(model.rows[0].token_ids_T.tolist()) == set(range(97))


def test_afterwards_modules_are_as_they_were():
    for outputs in ((same,), (lambda states: states / 0.0,)):
        model = Model(*outputs)
        try:
            check_float16(model)
        except ConfigError:
            assert outputs != (same,)
        assert not any(module._forward_hooks for module in model.network.modules())
