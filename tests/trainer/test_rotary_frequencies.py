"""Rotary embeddings of every kind: what a sequence is turned by depends on no other one, and is what vLLM has.

The references are transformers' own models, each sequence by itself, of a configuration that says the chosen
frequencies outright and leaves nothing to choose.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.refusals import refuses
from tests.trainer.plain import logprobs_of, plain
from torch import nn

from slipstream import records
from slipstream.errors import ConfigError
from slipstream.trainer.learner import score
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.rotary_frequencies import changing_kinds, fix_rotary

SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 8.0]
THETA = {"rope_theta": 10_000.0}
LONGROPE = {
    **THETA,
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 4.0}
DEFAULT = {**THETA, "rope_type": "default"}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PHI3 = {"original_max_position_embeddings": 32}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALED = {"short_mscale": 1.3, "long_mscale": 1.3}
GEMMA = {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
MINISTRAL = {**YARN, "llama_4_scaling_beta": 0.5}


def both(factors):
    return {**LONGROPE, "short_factor": factors, "long_factor": factors}


KINDS = {
    "longrope-long": ("Phi3", PHI3, LONGROPE, both(LONG), 128),
    "longrope-short": ("Phi3", PHI3, LONGROPE, both(SHORT), 32),
    "longrope-experts": ("Phimoe", PHIMOE, LONGROPE | SCALED, both(LONG) | SCALED, 128),
    "dynamic": ("Llama", {}, DYNAMIC, DEFAULT, 128),
    "of-each-kind-of-layer": (
        "Gemma3Text",
        GEMMA,
        {"full_attention": LONGROPE, "sliding_attention": DEFAULT},
        {"full_attention": both(LONG), "sliding_attention": DEFAULT},
        128,
    ),
    "yarn": ("Llama", {}, YARN, YARN, 128),
    "llama3": ("Llama", {}, LLAMA3, LLAMA3, 128),
    "linear": ("Llama", {}, DYNAMIC | {"rope_type": "linear"}, DYNAMIC | {"rope_type": "linear"}, 128),
    "scaled-by-position": ("Ministral3", {"head_dim": 8}, MINISTRAL, MINISTRAL, 128),
}
"""Architecture, its configuration, its rotary embedding, the same with the frequencies that vLLM chooses for the
`max_model_len` that comes last."""


def sequences(*lengths):
    return [
        records.Sequence([(5 * i + 11 * k) % 60 + 3 for i in range(n)], [i > 0 for i in range(n)])
        for k, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_in_any_row_frequencies_are_those_of_the_engine(name, packing, save_model, tmp_path):
    kind, changes, rotary, chosen, max_model_len = KINDS[name]
    lengths = (20, 31, 9) if name == "longrope-short" else (20, 120, 9)
    folder = save_model(tmp_path / "model", kind, **changes, rope_parameters=copy.deepcopy(rotary))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = copy.deepcopy(chosen)
    theirs = plain(folder, attention="eager", config=config)
    model = PolicyModel.load(folder, packing=packing, max_model_len=max_model_len)
    batch = sequences(*lengths)
    for sequence, ours in zip(batch, score(model, batch, micro_batch_tokens=512).logprobs, strict=True):
        torch.testing.assert_close(ours, logprobs_of(theirs, sequence).detach(), atol=1e-5, rtol=1e-5)


def test_a_rank_that_has_no_values_yet_has_the_same_frequencies(save_model, tmp_path):
    folder = save_model(tmp_path, "Phi3", **PHI3, rope_parameters=LONGROPE)
    for max_model_len, factors in ((32, SHORT), (128, LONG)):
        whole, unread = (
            PolicyModel.load(folder, max_model_len=max_model_len, unread=unread, checked=False).network.model.rotary_emb
            for unread in (False, True)
        )
        assert torch.equal(whole.inv_freq, unread.inv_freq)
        expected = 1.0 / (torch.tensor(factors) * 10_000.0 ** (torch.arange(0, 8, 2) / 8))
        torch.testing.assert_close(whole.inv_freq, expected)
        assert "inv_freq" not in whole.state_dict(), "no weight"


def test_one_that_looks_at_the_whole_row_is_found_by_its_far_positions(save_model, tmp_path):
    model = PolicyModel.load(save_model(tmp_path, "Llama"))
    rotary = model.network.model.rotary_emb
    own = rotary.inv_freq.clone()

    def by_the_row(_module, _args, kwargs):
        rotary.inv_freq = own / (4.0 if kwargs["position_ids"].max() > 60 else 1.0)

    rotary.register_forward_pre_hook(by_the_row, with_kwargs=True)
    with pytest.raises(ConfigError, match="packed sequences see one another in LlamaForCausalLM"):
        check_isolation(model)
    model.max_model_len = 60
    check_isolation(model)  # no sequence is that long


REFUSED = {
    "beyond-the-table": ("Llama", {}, DYNAMIC, 256, r"max_model_len = 256 is above .*= 128.*use at most that"),
    "vllms-own-key": ("Llama", {}, DYNAMIC | {"max_trained_positions": 64}, 128, "max_trained_positions.*remove it"),
    "scaled-otherwise": ("Phi3", PHI3, LONGROPE | {"attention_factor": 2.0}, 128, "by 2, and vLLM by 1.1832.*agree"),
    "scaled-by-the-row": (
        "Phimoe",
        PHIMOE,
        LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5},
        128,
        "by the longest sequence of a row: lower",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_trainer_and_engine_would_have_otherwise_is_refused(name, save_model, tmp_path):
    kind, changes, rotary, max_model_len, says = REFUSED[name]
    save_model(tmp_path, kind, **changes, rope_parameters=rotary)
    with pytest.raises(ConfigError, match=says):
        PolicyModel.load(tmp_path, packing=False, max_model_len=max_model_len)


def test_factors_within_the_original_context_may_be_scaled_by_the_row(save_model, tmp_path):
    rotary = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.5}
    save_model(tmp_path, "Phimoe", **PHIMOE, rope_parameters=rotary)
    PolicyModel.load(tmp_path, max_model_len=32)


def test_code_that_is_not_transformers_is_taken_within_the_original_context_only():
    factors = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    config = transformers.Phi3Config(**PHI3, rope_parameters=LONGROPE | factors)
    fix_rotary(nn.Linear(1, 1), config, 32)
    with pytest.raises(ConfigError, match=r"Linear chooses its rotary frequencies \(longrope\).*at most 32"):
        fix_rotary(nn.Linear(1, 1), config, 33)


def test_attention_scaled_by_the_place_in_the_row_is_refused_when_packed(save_model, tmp_path):
    experts = {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48}
    save_model(tmp_path, "Llama4Text", **experts, layer_types=["full_attention"] * 2, no_rope_layers=[1, 0])
    with refuses("training.packing"):
        PolicyModel.load(tmp_path)


def test_older_names_of_a_configuration_are_read_too():
    given = {"type": "dynamic", "original_max_position_embeddings": 64}
    for key in ("rope_scaling", "rope_parameters"):
        config = SimpleNamespace(**{key: given}, max_position_embeddings=128)
        fix_rotary(nn.Linear(1, 1), config, 64)
        fix_rotary(nn.Linear(1, 1), config, None)
        with pytest.raises(ConfigError, match=r"\(dynamic\).*at most 64"):
            fix_rotary(nn.Linear(1, 1), config, 65)
    del given["original_max_position_embeddings"]
    with pytest.raises(ConfigError, match="at most 128"):
        fix_rotary(nn.Linear(1, 1), config, 129)
    config.original_max_position_embeddings = 100
    with pytest.raises(ConfigError, match="at most 100"):
        fix_rotary(nn.Linear(1, 1), config, 101)
    fix_rotary(nn.Linear(1, 1), SimpleNamespace(rope_scaling=DEFAULT, max_position_embeddings=128), 200)


def test_kinds_that_depend_on_the_row_are_told_apart():
    assert changing_kinds(None) == {}
    assert changing_kinds(DEFAULT) == changing_kinds(YARN) == {}
    assert changing_kinds(DYNAMIC) == {"dynamic": DYNAMIC}
    assert changing_kinds({"type": "longrope"}) == {"longrope": {"type": "longrope"}}
    assert changing_kinds({"full_attention": LONGROPE, "sliding_attention": DEFAULT}) == {"longrope": LONGROPE}


@pytest.mark.parametrize("longest", [32, 48])
def test_factors_of_a_context_that_is_hardly_longer_than_the_original_are_scaled_as_by_vllm(
    longest, save_model, tmp_path
):
    PolicyModel.load(
        save_model(tmp_path, "Phi3", **PHI3 | {"max_position_embeddings": longest}, rope_parameters=LONGROPE),
        max_model_len=longest,
    )


class ByTheRow(nn.Module):
    """Turns otherwise from a highest position of `first` on, as one tensor."""

    rope_type = "dynamic"

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.config = SimpleNamespace(rope_parameters=DYNAMIC)

    def forward(self, states, positions):
        angle = positions[..., None] * (0.5 if positions.max() >= self.first else 1.0)
        return torch.polar(torch.ones_like(angle), angle)


def test_the_last_position_is_tried():
    config = SimpleNamespace(max_position_embeddings=128)
    for max_model_len, longest in ((None, 128), (64, 64)):
        fix_rotary(nn.Sequential(ByTheRow(longest)), config, max_model_len)
        with pytest.raises(ConfigError, match="ByTheRow of Sequential chooses its rotary frequencies by the longest"):
            fix_rotary(nn.Sequential(ByTheRow(longest - 1)), config, max_model_len)
