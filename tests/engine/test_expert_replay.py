"""Router replay with vLLM: its choices of experts come with every completion, for the right tokens, and replaying them
brings trainer and engine together."""

import pytest
import torch
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file

from slipstream.errors import EngineError
from slipstream.plan.derive import REPLAYED
from slipstream.records import SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.model_files import write_model_folder

from .conftest import PROMPTS, perturbed, sequence_of, start
from .mixtures import KINDS, close_choices

SAMPLING = SamplingParams(max_tokens=32, temperature=1.0)


def sequences_of(prompts, completions, *, replayed=True):
    pairs = zip(prompts, completions, strict=True)
    return [sequence_of(prompt, c, experts=c.experts if replayed else None) for prompt, c in pairs]


def difference(model, sequences, completions):
    ours = torch.cat(score(model, sequences, SAMPLING, micro_batch_tokens=4096).logprobs)
    return (ours - torch.tensor([value for c in completions for value in c.logprobs])).abs()


def share_that_differs(model):
    counted = {name: float(value) for name, value in model.replay.counted().items()}
    return counted["experts_differ"] / counted["experts_compared"]


def test_the_architectures_of_the_default_are_those_that_are_tested():
    assert {f"{kind}ForCausalLM" for kind in KINDS} == REPLAYED


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Qwen2Moe"])
def test_the_difference_falls(tmp_path, kind):
    folder, found = close_choices(tmp_path / "model", kind), {}
    with start(folder, tmp_path / "engine", "bfloat16", replay_experts=True) as live:
        completions = live.sample("compared", SAMPLING)
        text = live.sample("ended", SamplingParams(max_tokens=8, stop=("a", "e", "i", "o", "u")))
    model = PolicyModel.load(folder, "bfloat16", replay_experts=True)
    for replayed in (False, True):
        sequences = sequences_of(PROMPTS, completions, replayed=replayed)
        found[replayed] = difference(model, sequences, completions)
    share = share_that_differs(model)
    print({on: (values.mean().item(), values.max().item()) for on, values in found.items()}, share)
    assert [len(c.experts) for c in completions] == [len(s) - 1 for s in sequences]
    assert 0.0 < share < 0.1
    assert found[True].mean() < 0.6 * found[False].mean()
    assert found[True].max() < 0.5 * found[False].max()
    for c, prompt in zip(text, PROMPTS, strict=True):
        assert c.experts is None or len(c.experts) == len(prompt) + len(c.token_ids) - 1


@pytest.mark.engine
def test_every_token_has_its_own_choices(tmp_path):
    """In float32 engine and trainer choose alike, so that a row of another token would show: with prompts from the
    prefix cache, in a cache so small that requests are preempted, and after an update beside running requests."""
    folder = close_choices(tmp_path / "model", num_layers=2)
    prompts = [prompt for prompt in PROMPTS for _ in range(6)]
    sampling = SamplingParams(max_tokens=150, temperature=1.0)
    options = {"kv_cache_memory_bytes": 1 << 21, "max_num_batched_tokens": 64}  # 4,096 tokens
    with start(folder, tmp_path / "engine", replay_experts=True, options=options) as live:
        completions = live.sample("first", sampling, prompts)
        model = PolicyModel.load(folder, replay_experts=True)
        assert difference(model, sequences_of(prompts, completions), completions).max() < 1e-3
        assert share_that_differs(model) < 1e-3
        assert sum(len(c.experts) for c in completions) > 4096, "it had no room for all of them at once"

        bridge = create_bridge("disk", folder=tmp_path / "weights", source=folder, engine=live.engine)
        stored = load_file(folder / "model.safetensors")
        weights = perturbed({name: tensor.float() for name, tensor in stored.items()}, 1)
        with live.under_load("beside", prompts) as ended:
            live.update(bridge, weights.items(), 1, 7)
    crossed = [(prompt, completion) for prompt, completion in ended if len(completion.versions) > 1]
    assert crossed, "the update came between two tokens"
    write_model_folder(tmp_path / "new", weights.items(), folder)
    model = PolicyModel.load(tmp_path / "new", replay_experts=True)
    # Each was computed again under the new version, which made its last token; vLLM's own option keeps the old choices.
    score(model, sequences_of(*zip(*crossed, strict=True)), micro_batch_tokens=4096)
    assert (share_that_differs(model) < 1e-3) != torch.cuda.is_available()


@pytest.mark.engine
def test_without_being_asked_it_returns_none(live):
    assert all(c.experts is None for c in live.sample("unasked", SamplingParams(max_tokens=4)))


@pytest.mark.engine
@pytest.mark.full
def test_a_model_without_experts_is_refused(tiny_model, tmp_path):
    with pytest.raises(EngineError, match=r"model\.replay_experts = true is not possible .*routers choose"):
        start(tiny_model, tmp_path, replay_experts=True, max_restarts=0)


@pytest.mark.engine
@pytest.mark.full
def test_an_engine_of_several_processes_is_refused(tmp_path):
    """The scheduler could not see what the worker's routers choose."""
    folder = close_choices(tmp_path / "model", num_layers=1)
    with pytest.raises(EngineError, match=r"no scheduler in its worker's process.*set it to false"):
        start(folder, tmp_path / "engine", replay_experts=True, max_restarts=0, own_process=True)
