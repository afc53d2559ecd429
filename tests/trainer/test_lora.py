"""LoRA against PEFT's own code: the same adapter, the same numbers; and what must not move does not. Some tests are of
DoRA, too."""

import contextlib
import json
import shutil
from functools import partial

import peft
import peft.optimizers
import pytest
import torch
from safetensors.torch import load_file
from tests.refusals import refuses
from tests.trainer.adapters import adapted, write
from tests.trainer.plain import logprobs_of, loss_of
from tests.trainer.steps import advance, apply
from transformers import AutoModelForCausalLM, dynamic_module_utils

from slipstream import records
from slipstream.commands.export import export
from slipstream.config import RLConfig
from slipstream.config.recipes import resolved
from slipstream.errors import ConfigError, TrainingError
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.learner import Reference, predicted, score
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.model.lora import LoraLinear, rate_in_adapter
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch
from slipstream.weights.adapter_folder import AdapterConfig, read_adapter_config, write_adapter_folder
from slipstream.weights.fingerprint import describe

ALL = ("all-linear",)


@pytest.fixture
def make_lora(model_folder):
    return lambda targets=ALL, **options: adapted(model_folder, targets, **options)


@pytest.fixture
def group():
    """Two prompts of four completions each, so that prompts are shared in the packed rows."""
    torch.manual_seed(1)
    sequences = []
    for prompt in (list(range(3, 33)), list(range(50, 60))):
        for _ in range(4):
            completion = torch.randint(3, 90, (9,)).tolist()
            mask = [False] * len(prompt) + [True] * 9
            sequences.append(records.Sequence(prompt + completion, mask, [0.0] * len(prompt) + [-4.0] * 9))
    return sequences


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj", "mlp.down_proj")])
def test_logprobs_and_gradients_are_those_of_peft(
    make_lora, model_folder, tmp_path, group, gradients_of, targets, dora
):
    learner = make_lora(targets, dora=dora)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    theirs = peft.PeftModel.from_pretrained(base, write(learner, tmp_path / "adapter"), is_trainable=True)
    for sequence, mine in zip(group, learner.forward(group).logprobs, strict=True):
        assert (mine - logprobs_of(theirs, sequence)).abs().max() < 1e-5
    loss_of(theirs, group).backward()
    learner.forward_backward(StepBatch(group), SFTObjective())
    mine = gradients_of(learner)
    named = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(named) == len(mine) == (2 + dora) * len(learner.model.adapter.layers)
    for name, gradient in mine.items():
        other = named[f"base_model.model.{name.replace('lora_magnitude', 'lora_magnitude_vector')}.default.weight"]
        assert (gradient - other).abs().max() < 1e-5 * max(1.0, other.abs().max().item())


def test_a_seed_draws_the_same_adapter_on_every_device():
    """A device that has no numbers stands for those that have a generator of their own."""
    states = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        LoraLinear(torch.nn.Linear(5, 3, device="meta").to_empty(device=device), rank=2, scaling=1.0)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained_with_fp32_masters(make_lora, make_batch, model_folder, dtype):
    learner = make_lora(dtype=dtype, random=False)
    before = describe(PolicyModel.load(model_folder, dtype).named_weights())
    assert describe(learner.model.base_weights()) == before
    adapter_before = describe(learner.model.adapter.named_weights())
    for seed in range(3):
        advance(learner, make_batch(seed=seed))
    assert describe(learner.model.base_weights()) == before
    assert describe(learner.model.named_weights()) != before
    assert all(a != b for a, b in zip(describe(learner.model.adapter.named_weights()), adapter_before, strict=True))
    masters = learner.optimizer.masters()
    assert {name.rpartition(".")[2] for name in masters} == {"lora_A", "lora_B"}
    assert all(master.dtype == torch.float32 for master in masters.values())


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_lora_plus_is_pefts(make_lora, model_folder, ratio):
    learner = make_lora(random=False)
    named = dict(learner.model.network.named_parameters())
    ours = MasterAdamW(named.items(), rate_of=partial(rate_in_adapter, ratio), max_grad_norm=1e9)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    theirs = peft.optimizers.create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=ratio, betas=(0.9, 0.95)
    )
    pefts = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    masters = ours.masters()
    assert pefts.keys() == masters.keys()
    rates = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in pefts.values()} == {1e-2, ratio * 1e-2}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in pefts.items():
            parameter.copy_(masters[name])
    for _ in range(3):
        for name, parameter in pefts.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            masters[name].grad = parameter.grad.clone()
        theirs.step()
        apply(ours, 1e-2)
    for name, parameter in pefts.items():
        torch.testing.assert_close(named[name].detach(), parameter.detach(), atol=1e-6, rtol=1e-6)


def test_the_reference_is_the_base_and_gives_its_kl(make_lora, model_folder, group):
    learner = make_lora()
    sampling = records.SamplingParams(max_tokens=9, temperature=0.8)
    separate = score(PolicyModel.load(model_folder), group, sampling, micro_batch_tokens=512).logprobs
    same_memory = score(learner.model.without_adapter(), group, sampling, micro_batch_tokens=512).logprobs
    kl = []
    for reference in (separate, same_memory):
        batch = StepBatch(group, [1.0, -1.0] * 4)
        batch.fill("reference_logprobs", reference)
        objective = PolicyObjective(resolved(RLConfig(kl_coef=0.1)), sampling)
        kl.append(learner.forward_backward(batch, objective)["kl_reference"])
    assert kl[0] == kl[1] > 0.01
    assert all(torch.equal(a, b) for a, b in zip(separate, same_memory, strict=True))
    # The policy itself still has its adapter.
    assert not torch.equal(learner.forward(group, sampling).logprobs[0], separate[0])


def test_the_reference_of_a_continued_adapter_is_the_policy_that_it_began_with(make_lora, make_batch, group):
    learner = make_lora()
    first = learner.forward(group).logprobs
    frozen = learner.model.as_it_is()
    reference = Reference(partial(predicted, frozen), 512)
    weights = {name: tensor.clone() for name, tensor in learner.adapter_weights()}
    assert all(map(torch.equal, reference.forward(group).logprobs, first))
    advance(learner, make_batch(seed=1))
    assert all(map(torch.equal, reference.forward(group).logprobs, first))
    assert not torch.equal(learner.forward(group).logprobs[0], first[0])
    changed = {name: tensor.clone() for name, tensor in learner.adapter_weights()}
    assert not all(torch.equal(weights[name], tensor) for name, tensor in changed.items())
    with contextlib.suppress(RuntimeError), learner.model.adapter.exchanged(frozen._adapter_values):
        assert all(torch.equal(weights[name], tensor) for name, tensor in learner.adapter_weights())
        raise RuntimeError
    assert all(torch.equal(changed[name], tensor) for name, tensor in learner.adapter_weights())


def test_checkpoints_are_adapters_that_peft_loads_and_resume_bit_for_bit(make_lora, make_batch, tmp_path, group):
    learner = make_lora(random=False)
    store = CheckpointStore(tmp_path / "checkpoints")
    advance(learner, make_batch(seed=1))
    path = store.save(1, learner, learner.model.folder, {"step": 1})
    assert sorted(file.name for file in (path / "weights").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = AutoModelForCausalLM.from_pretrained(read_adapter_config(path / "weights").base)
    theirs = peft.PeftModel.from_pretrained(model, path / "weights")
    ids = torch.tensor([group[0].token_ids])
    mine = learner.forward(group[:1]).logprobs[0]
    assert (theirs(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]] - mine[-1]).abs() < 1e-5
    resumed = make_lora(random=False, seed=99)
    store.load(path, resumed)
    for one in (learner, resumed):
        advance(one, make_batch(seed=2))
    assert describe(learner.model.adapter.named_weights()) == describe(resumed.model.adapter.named_weights())
    with pytest.raises(TrainingError, match=r"another model: .*lora_A has shape"):
        store.load(path, make_lora(rank=2))
    with pytest.raises(TrainingError, match="is in only one of them"):
        store.load(path, make_lora(("q_proj",)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_made_by_peft_is_continued(make_lora, model_folder, tmp_path, group, dtype):
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype))
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path)
    learner = make_lora(("q_proj", "down_proj"), path=tmp_path, dtype=dtype)
    ids = torch.tensor([group[0].token_ids])
    mine = learner.forward(group[:1]).logprobs[0][-1]
    difference = (theirs(ids).logits[0, -2].float().log_softmax(-1)[ids[0, -1]] - mine).abs()
    assert difference < (1e-5 if dtype == "float32" else 0.1)


def greedy(model, prompt, num=16):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def test_exports(make_lora, make_batch, model_folder, tmp_path):
    learner = make_lora()
    path = CheckpointStore(tmp_path / "checkpoints").save(1, learner, learner.model.folder, {})
    export(path, tmp_path / "merged", merged=True)
    export(path / "weights", tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = [list(range(3, 13)), list(range(40, 60))]
    assert [greedy(merged, prompt) for prompt in prompts] == [greedy(theirs, prompt) for prompt in prompts]
    assert [greedy(base, prompt) for prompt in prompts] != [greedy(theirs, prompt) for prompt in prompts]
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(model_folder / "model.safetensors").keys()
    )
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        export(path, tmp_path / "merged", merged=True)
    export(tmp_path / "merged", tmp_path / "copy")
    assert load_file(tmp_path / "copy" / "model.safetensors").keys()
    with pytest.raises(ConfigError, match="nothing to merge"):
        export(tmp_path / "merged", tmp_path / "again", merged=True)
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        export(tmp_path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


OWN_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_an_adapter_of_a_base_that_brings_its_own_code_is_merged_when_that_is_trusted(
    model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    base, out = tmp_path / "base", tmp_path / "merged"
    shutil.copytree(model_folder, base)
    (base / "own_code.py").write_text(OWN_CODE)
    config = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    model = PolicyModel.load(str(base), "float32", trust_remote_code=True, packing=False)
    adapter = model.add_adapter(AdapterConfig(4, 8.0, ("q_proj",), str(base)))
    write_adapter_folder(tmp_path / "adapter", adapter.named_weights(), adapter.config, durable=False)
    with refuses("model.trust_remote_code"):
        export(tmp_path / "adapter", out, merged=True)
    assert not out.exists()
    export(tmp_path / "adapter", out, merged=True, trust_remote_code=True)
    assert load_file(out / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
