"""What the check of packed rows accepts and refuses, of a network that is no more than a table of logits."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.trainer.model.packing_check import check_isolation

WORDS = 64


class Model:
    """Logits by a sequence's own tokens alone, with what `more` adds for a row."""

    def __init__(self, more=lambda row, others: 0.0, *, dtype=torch.float32, scale=1.0, windows=(0,), **config):
        self.network, self.max_model_len = nn.Linear(1, 1), None
        self.config = SimpleNamespace(vocab_size=WORDS, **config)
        self.device, self.dtype = torch.device("cpu"), dtype
        self.more, self.scale, self.windows = more, scale, windows
        drawn = torch.randn(4, WORDS, generator=torch.Generator().manual_seed(0))
        self.own = drawn / drawn.std()

    def logits(self, row):
        row.layout.windows_seen.update(self.windows)
        parts = []
        for place in range(len(row.sequences)):
            own = self.own.roll(len(parts) if row.sequences[place] == 0 else 0, 0)
            parts.append(self.scale * (own + self.more(row, 1 - place)))
        return torch.cat(parts).to(self.dtype)


def check(model, problem=""):
    """The problem that it is refused with, if with any."""
    with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
        check_isolation(model)


def leak(size):
    """What the tokens of another sequence add."""
    return lambda row, others: size * bool((row.token_ids_T >= WORDS // 2).any())


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(
    ("dtype", "size", "is_refused"),
    [
        (torch.float32, 0.5e-4, False),
        (torch.float32, 2e-4, True),
        (torch.bfloat16, 0.01, False),
        (torch.bfloat16, 0.2, True),
    ],
)
def test_a_leak_is_what_rounding_cannot_explain(dtype, size, is_refused, scale):
    model = Model(leak(size), dtype=dtype, scale=scale)
    check(model, "packed sequences see one another in Linear" if is_refused else "")


@pytest.mark.parametrize(
    ("max_model_len", "config", "last"),
    [
        (100, {}, 98),
        (None, {"max_position_embeddings": 128}, 126),
        (100, {"max_position_embeddings": 128}, 98),
        (200, {"max_position_embeddings": 128}, 126),
        (None, {}, 7),
    ],
)
def test_positions_up_to_the_end_of_the_context_are_tried(max_model_len, config, last):
    """The last token of a sequence is only a target."""
    for first in (last, last + 1):
        model = Model(lambda row, others, first=first: float(row.position_ids_T.max() >= first), **config)
        model.max_model_len = max_model_len
        check(model, "packed sequences see one another" if first == last and last > 7 else "")


@pytest.mark.parametrize(("size", "is_refused"), [(5e-4, False), (2e-3, True)])
def test_a_shared_prompt_must_be_continued_as_an_own_one(size, is_refused):
    model = Model(lambda row, others: size * any(prefix is not None for prefix in row.layout.prefixes))
    check(model, "Linear does not continue a shared prompt as its own" if is_refused else "")


@pytest.mark.parametrize(
    ("windows", "config", "text"),
    [
        ((), {}, "does not use its attention interface"),
        ((0,), {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, "the sliding window"),
        ((0, 6), {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, ""),
        ((6,), {"sliding_window": 6, "layer_types": ["sliding_attention"]}, ""),
        ((0,), {"sliding_window": 6, "layer_types": ["full_attention"]}, ""),
        ((0,), {"sliding_window": 6, "layer_types": None}, ""),
        ((0,), {"sliding_window": 6}, ""),
        ((0,), {"sliding_window": None, "layer_types": ["sliding_attention"]}, ""),
    ],
)
def test_attention_must_have_been_told_of_layout_and_window(windows, config, text):
    check(Model(windows=windows, **config), text)
