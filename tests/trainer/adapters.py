"""Adapters of tests, and PEFT's own code beside them."""

import torch
from tests.trainer.steps import learner_of

from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder


def adapted(
    folder, targets, *, rank=4, alpha=12.0, dtype="float32", path=None, random=True, seed=0, dora=False, tower=False
):
    """A learner of an adapter; with `random` it changes what the model computes."""
    torch.manual_seed(seed)
    model = PolicyModel.load(folder, dtype, train_tower=tower)
    adapter = model.add_adapter(AdapterConfig(rank, alpha, targets, str(folder), dora=dora, with_tower=tower), path)
    if random and path is None:
        with torch.no_grad():
            for layer in adapter.layers.values():
                layer.lora_B.normal_(std=0.1)
                if dora:
                    layer.lora_magnitude.mul_(1 + 0.2 * torch.randn_like(layer.lora_magnitude))
    return learner_of(model)


def write(learner, folder):
    write_adapter_folder(folder, learner.model.adapter.named_weights(), learner.model.adapter.config)
    return folder
