"""The bridge `lora` into a running vLLM: the buffers hold the adapter's own numbers, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import peft
import pytest
import torch
from benchmarks.bridges import Bridge, create_adapter_bridge, create_bridge
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.commands.export import export
from slipstream.errors import EngineError, WeightsError
from slipstream.records import GenerateRequest, SamplingParams, Ticket
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder

from .conftest import PROMPTS, LiveEngine, mean_difference, sequence_of, start, stop
from .workers import FLIP_VARIABLE

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=24)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@dataclasses.dataclass
class LiveLora:
    live: LiveEngine
    policy: PolicyModel
    bridge: Bridge
    flip: Path
    step: int = 0

    def publish(self, seed: int) -> Ticket:
        assert self.policy.adapter is not None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, tensor in self.policy.adapter.named_weights():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        self.step += 1
        return self.bridge.publisher.publish(self.policy.adapter.named_weights(), self.step, 0, lambda ticket: None)

    def apply(self, ticket: Ticket):
        return self.live.call(self.bridge.receiver.apply(ticket, 60))

    def update(self, seed: int) -> Ticket:
        ticket = self.publish(seed)
        check_report(self.apply(ticket), ticket)
        return ticket


def start_lora(model: Path, folder: Path, dtype: str, rank: int, alpha: float, targets: tuple[str, ...]) -> LiveLora:
    policy = PolicyModel.load(model, dtype)
    adapter = policy.add_adapter(AdapterConfig(rank, alpha, targets, str(model)))
    flip = folder / "flip"
    os.environ[FLIP_VARIABLE] = str(flip)
    options = {"worker_extension_cls": "tests.engine.workers.FlippingWorker"}
    room = {"lora_rank": rank, "lora_target_modules": adapter.config.target_modules}
    live = start(model, folder, dtype, **room, options=options)
    bridge = create_adapter_bridge(
        folder=folder / "weights", engine=live.engine, adapter=adapter.config, base_weights=policy.base_weights()
    )
    return LiveLora(live, policy, bridge, flip)


@pytest.fixture(scope="module")
def lora(tiny_model, tmp_path_factory):
    """Rank 4 in buffers of rank 8, a scaling that no power of two is; whoever damages it updates it again."""
    started = start_lora(tiny_model, tmp_path_factory.mktemp("lora"), "float32", 4, 6.8, ("all-linear",))
    yield started
    stop(started.live)


def test_every_update_is_verified_and_the_probe_stays_small(lora):
    names = {name for name, _ in lora.policy.adapter.named_weights()}
    for seed in range(4):
        ticket = lora.publish(seed)
        assert {spec.name for spec in ticket.parameters} == names
        report = lora.apply(ticket)
        check_report(report, ticket)
        assert report.num_bytes == sum(t.nbytes for _, t in lora.policy.adapter.named_weights())
        assert mean_difference(lora.live, lora.policy, SAMPLING) < 0.001
        # What it would be with the adapter left out, so that the number above means something.
        assert mean_difference(lora.live, lora.policy.without_adapter(), SAMPLING) > 0.05
    report = lora.live.call(lora.live.engine.verify(ticket, 60))
    check_report(report, ticket)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("model.layers.1.self_attn.qkv_proj b 1 5 3", "layers.1.self_attn.k_proj.lora_B.weight"),
        ("model.layers.0.mlp.gate_up_proj a 1 2 63", "layers.0.mlp.up_proj.lora_A.weight"),
        ("model.layers.0.mlp.down_proj b 0 7 0", "layers.0.mlp.down_proj.lora_B.weight"),
        ("model.layers.1.self_attn.o_proj b 0 7 6", "model.layers.1.self_attn.o_proj (beside the adapter)"),
    ],
)
def test_one_flipped_bit_in_the_engines_buffers_is_found_and_named(lora, place, name):
    ticket = lora.publish(10)
    lora.flip.write_text(place)
    report = lora.apply(ticket)
    assert len(report.mismatched) == 1
    assert report.mismatched[0].endswith(name)
    with pytest.raises(WeightsError, match="1 of 28 parameters"):
        check_report(report, ticket)
    with pytest.raises(EngineError, match="did not verify"):
        lora.live.sample("refused", SAMPLING)
    lora.update(11)
    assert lora.live.sample("again", SAMPLING)


def test_a_damaged_or_missing_file_is_found(lora):
    ticket = lora.publish(20)
    file = Path(ticket.location) / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name].view(torch.int32).view(-1)[3] ^= 1
    save_file(weights, file)
    assert lora.apply(ticket).mismatched == (name,)
    missing = lora.publish(21)
    (Path(missing.location) / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match="tensors"):
        lora.apply(missing)
    with pytest.raises(EngineError, match="503"):
        lora.live.sample("refused", SAMPLING)
    lora.update(22)


def test_another_base_is_found(lora):
    ticket = lora.update(30)
    spec = ticket.base[3]
    other = msgspec.structs.replace(spec, fingerprint="0" * 16)
    changed = msgspec.structs.replace(ticket, base=(*ticket.base[:3], other, *ticket.base[4:]))
    assert lora.live.call(lora.live.engine.verify(changed, 60)).mismatched == (spec.name,)


def test_a_prompt_cached_under_an_old_adapter_is_computed_again(lora):
    prompt = [PROMPTS[7] * 4]
    lora.update(41)
    before = lora.live.sample("cached", GREEDY, prompt)
    lora.update(42)
    after = lora.live.sample("fresh", GREEDY, prompt)
    lora.update(41)
    again = lora.live.sample("again", GREEDY, prompt)
    assert before[0].logprobs != after[0].logprobs
    assert before[0].logprobs == again[0].logprobs


AS_SHIPPED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, adapter, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 27,
          enable_lora=bool(adapter))
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=24, temperature=0.0),
                       lora_request=LoRARequest("a", 1, adapter) if adapter else None, use_tqdm=False)
print("found " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def by_vllm_as_shipped(model: Path, adapter: Path | str = "") -> list[list[int]]:
    """Greedy tokens of a vLLM without our plugin."""
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", AS_SHIPPED, str(model), str(adapter), json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.full
def test_adapter_and_merged_export_give_the_same_greedy_tokens_everywhere(lora, live, tiny_model, tmp_path):
    lora.update(60)
    beside = [completion.token_ids for completion in lora.live.sample("beside", GREEDY)]
    adapter = lora.policy.adapter
    write_adapter_folder(tmp_path / "adapter", adapter.named_weights(), adapter.config)
    export(tmp_path / "adapter", tmp_path / "merged", merged=True)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    for model in (theirs, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        for prompt, expected in zip(PROMPTS, beside, strict=True):
            how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
            out = model.generate(input_ids=torch.tensor([prompt]), **how)
            assert out[0, len(prompt) :].tolist()[: len(expected)] == expected
    assert by_vllm_as_shipped(tiny_model, tmp_path / "adapter") == beside
    assert by_vllm_as_shipped(tmp_path / "merged") == beside
    merged = PolicyModel.load(tmp_path / "merged")
    restart = create_bridge("restart", folder=tmp_path / "weights", source=tiny_model, engine=live.engine)
    live.update(restart, merged.named_weights(), 1)
    assert [completion.token_ids for completion in live.sample("merged", GREEDY)] == beside


def test_running_requests_end_with_the_adapter_that_they_began_with(lora):
    """Three versions under requests that differ in length: the third waits for the last request of the first."""
    long, short = SamplingParams(max_tokens=200), SamplingParams(max_tokens=8)
    models, running = {}, []
    for step, params in ((1, long), (2, long), (3, short)):
        ticket = lora.update(70 + step)
        models[ticket.version.name] = {n: t.clone() for n, t in lora.policy.adapter.named_weights()}
        requests = [GenerateRequest(f"{step}-{i}", PROMPTS[i % 8], params, seed=i) for i in range(32)]
        running.append([lora.live.thread.submit(lora.live.engine.generate(request)) for request in requests])
        # A request that comes too late would begin with the next adapter.
        if step < 3:
            lora.live.until_running(32 * step, ended=lambda: sum(f.done() for futures in running for f in futures))
    versions = []
    for futures, (version, tensors) in zip(running, models.items(), strict=True):
        completions = [future.result(60) for future in futures]
        assert [[(span.start, span.version) for span in c.versions] for c in completions] == [[(0, version)]] * 32
        versions.append(version)
        with torch.no_grad():
            for name, tensor in lora.policy.adapter.named_weights():
                tensor.copy_(tensors[name])
        sequences = [sequence_of(PROMPTS[i % 8], c) for i, c in enumerate(completions)]
        ours = score(lora.policy, sequences, long, micro_batch_tokens=8192).logprobs
        theirs = [torch.tensor(c.logprobs) for c in completions]
        assert (torch.cat(ours) - torch.cat(theirs)).abs().mean() < 1e-4
    assert len(set(versions)) == 3
