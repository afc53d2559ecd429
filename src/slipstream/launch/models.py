"""The trainer's model and learner as a planned config asks for them; with `single_copy`, in the engine's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import RunConfig
from slipstream.config.checks import uses_critic
from slipstream.launch.engines import RunEngine
from slipstream.launch.facts import adapter_config

if TYPE_CHECKING:
    from torch import nn

    from slipstream.trainer.critic import Critic
    from slipstream.trainer.learner import Learner
    from slipstream.trainer.model import PolicyModel, SharedTensors
    from slipstream.trainer.optimizer import Optimizer


Warn = Callable[[str], None]


def load_model(config: RunConfig, shared: SharedTensors | None = None) -> PolicyModel:
    """The model on the trainer's device; its parameters are `shared`, or its own."""
    import torch

    from slipstream.trainer.model import PolicyModel

    model, training = config.model, config.training
    assert model.dtype != "auto"
    return PolicyModel.load(
        model.path,
        model.dtype,
        "cuda" if torch.cuda.is_available() else "cpu",
        model.trust_remote_code,
        packing=training.packing,
        checkpointing=False if training.gradient_checkpointing == "auto" else training.gradient_checkpointing,
        offload=training.offload_activations,
        shared=shared,
    )


def load_reference(config: RunConfig, model: PolicyModel) -> PolicyModel | None:
    """What the KL term measures from: under LoRA the base, in the same memory."""
    if config.algorithm.kind == "sft" or config.algorithm.kl_coef == 0:
        return None
    return load_model(config) if model.adapter is None else model.without_adapter()


def build_learner(config: RunConfig, shared: SharedTensors | None, warn: Warn, planned_bytes: int) -> Learner:
    """Model, adapter if there is one, and optimizer. `warn` hears what could not be done as the config asks.
    `planned_bytes`: what the trainer was planned to take."""
    learner = _learner(config, _with_adapter(config, load_model(config, shared)), warn)
    learner.planned_bytes = planned_bytes
    return learner


def build_critic(config: RunConfig, warn: Warn) -> Critic | None:
    """The critic, where advantages are one's: made of a copy of the start model of its own, adapter included."""
    from slipstream.trainer.critic import Critic, ValueModel

    if not uses_critic(config):
        return None
    return Critic(_learner(config, ValueModel(_with_adapter(config, load_model(config))), warn), config.critic)


def _with_adapter(config: RunConfig, model: PolicyModel) -> PolicyModel:
    if (lora := config.lora) is not None:
        model.add_adapter(adapter_config(config), Path(lora.path) if lora.path else None)
    return model


def _learner(config: RunConfig, model: PolicyModel, warn: Warn) -> Learner:
    from slipstream.trainer.compiled import compile_layers
    from slipstream.trainer.learner import Learner

    assert isinstance(config.training.micro_batch_tokens, int)
    if config.training.compile is True and (problem := compile_layers(model)):
        warn(f"training.compile: the layers could not be compiled and run as they are ({problem})")
    optimizer = build_optimizer(config, model.network)
    return Learner(model, optimizer, micro_batch_tokens=config.training.micro_batch_tokens)


def build_optimizer(config: RunConfig, network: nn.Module) -> Optimizer:
    """What `training.optimizer` names, for all that is trainable in `network`."""
    from slipstream.trainer.lora import rate_in_adapter
    from slipstream.trainer.muon import MasterMuon
    from slipstream.trainer.optimizer import MasterAdamW
    from slipstream.trainer.rounding import RoundedAdamW

    training, named = config.training, network.named_parameters()
    options: dict[str, Any] = {
        "betas": (training.adam_beta1, training.adam_beta2),
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "rate_of": partial(rate_in_adapter, 1.0 if config.lora is None else config.lora.plus_ratio),
    }
    if training.optimizer == "adamw_bf16":
        return RoundedAdamW(named, seed=config.run.seed, **options)
    if training.optimizer == "adamw_8bit":
        from slipstream.trainer.eight_bit import MasterAdamW8bit

        return MasterAdamW8bit(named, **options)
    if training.optimizer == "muon":
        return MasterMuon(named, network, momentum=training.muon_momentum, **options)
    return MasterAdamW(named, **options)


async def share_weights(config: RunConfig, engine: RunEngine) -> SharedTensors:
    """The live weights of an engine that is ready, checked against the model's files."""
    from slipstream.trainer.model import SharedTensors, resolve_folder
    from slipstream.weights.files import stored_parameters
    from slipstream.weights.single_copy import check_loaded, open_weights

    folder = resolve_folder(config.model.path)
    shared = await engine.share(stored_parameters(folder, config.model.dtype), config.weights.apply_timeout_s)
    tensors = open_weights(shared)
    check_loaded(tensors, folder)
    return SharedTensors(tensors, shared.refused)
