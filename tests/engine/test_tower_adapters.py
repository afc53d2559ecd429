"""An adapter of the vision tower, by the bridge `lora` into a running vLLM: proved in its buffers, and in what the
engine says of images that it has seen before, under another version."""

import pytest
import torch
from benchmarks.bridges import create_adapter_bridge

from slipstream.data.chat_template import ChatTokenizer
from slipstream.records import GenerateRequest, SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.adapter_folder import AdapterConfig

from .conftest import sequence_of, start, stop
from .test_image_agreement import save, talks_with_images

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "family", ["Qwen3_VL", *(pytest.param(name, marks=pytest.mark.full) for name in ("Qwen2_VL", "Qwen2_5_VL"))]
)
@pytest.mark.full
def test_each_version_is_proved_and_answers_as_the_trainer(family, tmp_path, sees):
    folder = save(tmp_path / "model", family)
    policy = PolicyModel.load(folder, train_tower=True)
    adapter = policy.add_adapter(AdapterConfig(4, 6.8, ("all-linear",), str(folder), with_tower=True))
    tokenizer = ChatTokenizer(folder)
    talks = talks_with_images()
    prompts = [(ids := tokenizer.render(talk), tokenizer.place_images(talk, ids)) for talk in talks]
    targets = tuple(name.rpartition(".")[2] for name in adapter.config.target_modules)
    live = start(folder, tmp_path, lora_rank=4, lora_target_modules=targets, lora_tower=True)
    bridge = create_adapter_bridge(
        folder=tmp_path / "weights", engine=live.engine, adapter=adapter.config, base_weights=policy.base_weights()
    )
    generator = torch.Generator().manual_seed(0)

    def update(step, *, only_tower=False):
        with torch.no_grad():
            for name, tensor in adapter.named_weights():
                if not only_tower or "visual" in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        assert policy.images is not None
        policy.images.clear()
        return live.update(bridge, adapter.named_weights(), step)

    def differences(step, *models):
        """Differences to the engine's log-probabilities of what it says to prompts with images."""
        requests = []
        for number, (ids, media) in enumerate(prompts):
            asked, images = tokenizer.request(ids, media)
            requests.append(GenerateRequest(f"{step}-{number}", asked, SamplingParams(max_tokens=12), 0, images=images))
        sequences, theirs = [], []
        for (ids, media), one in zip(prompts, live.generate(*requests), strict=True):
            assert one.error == ""
            assert one.prompt_ids == (ids if media else None)
            sequences.append(sequence_of(ids, one, media=list(media)))
            theirs.append(torch.tensor(one.logprobs))
        scored = [score(model, sequences, micro_batch_tokens=1024).logprobs for model in models]
        with_images = slice(len(prompts) - 1)
        return [(torch.cat(ours[with_images]) - torch.cat(theirs[with_images])).abs() for ours in scored]

    try:
        for step in (1, 2):
            ticket = update(step)
            names = {spec.name for spec in ticket.parameters}
            assert any("visual.blocks.1.attn.proj" in name for name in names)
            assert any("visual.merger" in name for name in names)
            ours, base = differences(step, policy, policy.without_adapter())
            assert ours.max() < 1e-3
            assert base.mean() > 0.05
        # The tower's alone: what the engine kept of the same images is of no use any more.
        before = {name: tensor.clone() for name, tensor in adapter.named_weights()}
        update(3, only_tower=True)
        (ours,) = differences(3, policy)
        assert ours.max() < 1e-3
        now = dict(adapter.named_weights())
        with torch.no_grad():
            for name, tensor in now.items():
                tensor.copy_(before[name])
        policy.images.clear()
        (old,) = differences(4, policy)
        assert old.mean() > 0.01
    finally:
        stop(live)
