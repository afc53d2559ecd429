"""Builds the trainer's models, optimizers and learners from a planned config; under `single_copy` in engine memory."""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import PlannedConfig, RLConfig, SFTConfig
from slipstream.config.traits import BY_BITSANDBYTES, uses_critic
from slipstream.errors import ConfigError, one_line
from slipstream.plan.facts import Facts
from slipstream.plan.measure import adapter_config
from slipstream.plan.memory.trainer import needs_reference
from slipstream.processes.temporary import temporary
from slipstream.records import SamplingParams, Sequence

if TYPE_CHECKING:
    from torch import nn

    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.launch.ranks.processes import RankProcesses
    from slipstream.orchestrator.control import commands
    from slipstream.trainer.critic import Critic
    from slipstream.trainer.distributed.fsdp import RankGroup
    from slipstream.trainer.distributed.worker import RankModel
    from slipstream.trainer.learner import Learner, Scorer
    from slipstream.trainer.loss import Objective
    from slipstream.trainer.model.loading import SharedTensors
    from slipstream.trainer.model.policy import PolicyModel
    from slipstream.trainer.optim.base import Optimizer, RateOf
    from slipstream.trainer.packing import StepBatch
    from slipstream.weights.bridges.single_copy import SharedWeights

Stage = Callable[[str], AbstractContextManager[object]]
"""Names and times what is done inside it (`stages.Stages.stage`)."""
_log = logging.getLogger("slipstream.trainer.rehearsal")
"""Its records are events of the run (`launch.messages`)."""
_GROUP_TOKENS = 295
"""Room in a row for eight completions of 32 tokens after a prompt of as many."""
_LONGEST_SEGMENT = 256
"""Tokens of prompts and completions up to which graphs have the same shape."""
POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
"""Names of a run's models in commands to the ranks."""


class CompilerFailed(ConfigError):
    """`training.compile` is on and the model's layers cannot be compiled; `problem` says why."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True)
class Trained:
    """The models of a run."""

    learner: Learner
    reference: Scorer | None
    """The reference model of the KL term; under LoRA the base model with the adapter of `lora.path`, in the same
    memory."""
    critic: Critic | None


def load_model(
    config: PlannedConfig, shared: SharedTensors | None = None, group: RankGroup | None = None
) -> PolicyModel:
    """Load the model onto the trainer's device; its parameters are the `shared` tensors, if given. With a `group`, rank
    0 loads it on the CPU and the others on the meta device, to be sharded, and to get its float32 head, afterwards."""
    import torch

    from slipstream.shared_kernels.products import be_deterministic
    from slipstream.trainer.model.policy import PolicyModel

    model, training = config.model, config.training
    if config.run.exact:
        be_deterministic()
    loaded = PolicyModel.load(
        model.path,
        model.dtype,
        "cuda" if torch.cuda.is_available() and group is None else "cpu",
        model.trust_remote_code,
        packing=training.packing,
        checkpointing=training.gradient_checkpointing,
        offload=training.offload_activations,
        shared=shared,
        unread=group is not None and group.rank > 0,
        checked=group is None,
        fp32_head=model.fp32_head and group is None,
        fp32_residual=model.fp32_residual,
        max_model_len=config.inference.max_model_len or None,
        train_tower=model.train_tower,
        shared_kernels=model.shared_kernels,
        replay_experts=config.model.replay_experts,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # loading and checking leave gigabytes in the cache that an engine may use
    return loaded


def import_trainer(config: PlannedConfig) -> None:
    """Import what `build` needs, and build the network on the meta device: work that need not wait for the engine that
    holds the weights."""
    import torch
    from transformers import AutoConfig

    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.trainer.model.vision_towers import auto_class

    importlib.import_module("slipstream.trainer.critic")
    if config.training.compile is True:
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("slipstream.trainer.model.compilation")
    trusted = config.model.trust_remote_code
    settings = AutoConfig.from_pretrained(resolve_folder(config.model.path), trust_remote_code=trusted)
    with torch.device("meta"):
        auto_class(settings).from_config(settings, trust_remote_code=trusted)


def rehearse(config: PlannedConfig) -> None:
    """Train a small network like the policy's for a step of SFT while the engine that holds the weights starts. Then
    the policy's layers are found in the compile cache, and its kernels are built and loaded. A failure costs only time:
    the policy's own first step does the same."""
    import torch

    try:
        _train_stand_in(config)
    except Exception as error:  # noqa: BLE001 - the policy's own step comes in any case, and reports the failure
        _log.info("no step is rehearsed before the model is loaded (%s)", one_line(error))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def _train_stand_in(config: PlannedConfig) -> None:
    import torch

    from slipstream.trainer.loss import SFTObjective
    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.trainer.model.stand_in import save_stand_in
    from slipstream.trainer.packing import StepBatch
    from slipstream.weights.fingerprint import describe

    model, training = config.model, config.training
    sequences = [Sequence(list(range(64)), [place >= 32 for place in range(64)]) for _ in range(2)]
    with temporary("stand-in") as folder, torch.random.fork_rng(devices=[]):  # new weights are random numbers
        save_stand_in(resolve_folder(model.path), folder, model.dtype, trust_remote_code=model.trust_remote_code)
        small = config.model_copy(update={"model": model.model_copy(update={"path": str(folder)})})
        learner = _learner(small, load_model(small), row_tokens=training.micro_batch_tokens)
        learner.forward_backward(StepBatch(sequences), SFTObjective())
        if training.optimizer not in BY_BITSANDBYTES:  # it never frees the memory of paged states
            learner.optim_prepare(training.learning_rate)
            learner.optim_commit()
        describe(learner.named_weights())


def capture_graphs(learner: Learner, most_tokens: int, is_over: Callable[[], bool]) -> None:
    """Capture the decoder's CUDA graphs for rows of up to `most_tokens`, if graphs serve the model, until `is_over`.
    The largest are the first, as the others share their memory. Gradients are discarded. A failure costs only time."""
    import torch

    from slipstream.trainer.learner import add_gradients
    from slipstream.trainer.loss import SFTObjective
    from slipstream.trainer.model.decoder_graphs import DecoderGraphs
    from slipstream.trainer.packing import micro_batches

    model, objective = learner.model, SFTObjective()
    if model.graphs is None or not most_tokens:
        return
    try:
        for batch in usual_rows(most_tokens):
            if is_over() or model.graphs.problem:
                break
            rows = micro_batches(batch, most_tokens, device=model.device)
            add_gradients(model, rows, objective, objective.counts(batch))
    except Exception as error:  # noqa: BLE001 - the steps' own rows come in any case, and report the failure
        _log.info("no more graphs are captured before the first step (%s)", one_line(error))
    learner.optimizer.discard_gradients()
    if model.graphs.problem:  # perhaps as this row was larger than all to come
        model.graphs = DecoderGraphs.of(model, learner.micro_batch_tokens)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def most_row_tokens(config: PlannedConfig, facts: Facts) -> int:
    """Bound on the tokens of the trainer's rows. 0 if their shapes are not those of `usual_rows`: without prompts in
    common, with long segments, or with several turns."""
    algorithm, prompt, completion = config.algorithm, facts.data.max_prompt_tokens, config.sampling.max_tokens
    if not isinstance(algorithm, RLConfig) or algorithm.group_size == 1 or facts.data.max_turns > 1:
        return 0
    if max(prompt, completion) > _LONGEST_SEGMENT:
        return 0
    num_groups = -(-config.training.prompts_per_batch // config.training.updates_per_batch)
    return min(config.training.micro_batch_tokens, num_groups * (prompt + algorithm.group_size * completion))


def usual_rows(most_tokens: int) -> Iterator[StepBatch]:
    """Batches that fill a row of `most_tokens`, half of it and a quarter: groups of eight with a prompt in common."""
    from slipstream.trainer.packing import StepBatch

    mask = [False] * 32 + [True] * 32
    for tokens in (most_tokens, most_tokens // 2, most_tokens // 4):
        groups = range(tokens // _GROUP_TOKENS)
        prompts = [[number >> bit & 1 for bit in range(32)] for number in groups]  # any vocabulary has these tokens
        if prompts:
            yield StepBatch([Sequence([*prompt, *[0] * 32], mask) for prompt in prompts for _ in range(8)])


def build(
    config: PlannedConfig, workers: Values[SharedWeights], planned_bytes: int, stage: Stage = nullcontext
) -> Trained:
    """Build all models in this process; the policy's weights are those in the memory of the engine's worker, if
    `workers` has one. `planned_bytes`: memory that the plan gives the trainer. Raises CompilerFailed where layers
    cannot be compiled: uncompiled they need more memory than planned."""
    from slipstream.trainer.critic import Critic, ValueModel
    from slipstream.trainer.learner import Reference, predicted
    from slipstream.trainer.model.loading import open_shared

    tokens = config.training.micro_batch_tokens
    with stage("load the trainer's model"):
        model = load_policy(config, open_shared(config.model.path, config.model.dtype, workers))
    policy = _learner(config, model, stage)
    policy.planned_bytes = planned_bytes
    reference = None
    if needs_reference(config):
        with stage("load the reference"):
            reference = load_model(config) if policy.model.adapter is None else _initial(config, policy.model)
        reference.replay = None  # it is another policy, with experts of its own choice
    critic = None
    if uses_critic(config):
        with stage("load the critic"):
            value_model = ValueModel(with_adapter(config, load_model(config)))
        critic = Critic(_learner(config, value_model, stage), config.critic)
    return Trained(policy, None if reference is None else Reference(partial(predicted, reference), tokens), critic)


def _learner(config: PlannedConfig, model: PolicyModel, stage: Stage = nullcontext, *, row_tokens: int = 0) -> Learner:
    """`row_tokens`: see `compile_if_asked`."""
    from slipstream.trainer.learner import Learner
    from slipstream.trainer.model.decoder_graphs import DecoderGraphs

    tokens = config.training.micro_batch_tokens
    with stage("compile the layers") if config.training.compile is True else nullcontext():
        compile_if_asked(config, model, row_tokens=row_tokens)
    trained = Learner(model, build_optimizer(config, model.network), micro_batch_tokens=tokens)
    if not config.inference.sleep:  # a waking engine takes the memory of graphs
        model.graphs = DecoderGraphs.of(model, tokens)
    return trained


def compile_if_asked(
    config: PlannedConfig, model: PolicyModel, group: RankGroup | None = None, *, row_tokens: int = 0
) -> None:
    """Compile the layers of `model` under `training.compile`, and run them once for rows of `row_tokens` if given. With
    a `group` it is a collective, which fails on all ranks alike. Raises CompilerFailed, see `build`."""
    from slipstream.trainer.model.compilation import compile_layers

    if config.training.compile is not True:
        return
    if problem := compile_layers(model, None if group is None else group.first_problem, row_tokens=row_tokens):
        raise CompilerFailed(
            problem,
            f"training.compile is on and the model's layers could not be compiled ({problem}): set "
            "training.compile = false, with which less fits on the GPU",
        )


def build_sharded(
    config: PlannedConfig,
    sampling: SamplingParams,
    ranks: RankProcesses,
    planned_bytes: int,
    stage: Stage = nullcontext,
) -> Trained:
    """Build all models sharded over the trainer's ranks: this rank's shards, and the connection to the others.
    `planned_bytes`: memory that the plan gives each rank."""
    from slipstream.trainer.critic import Critic
    from slipstream.trainer.distributed.learner import ShardedLearner, ShardedModel
    from slipstream.trainer.learner import Reference

    tokens = config.training.micro_batch_tokens
    with stage("start the ranks"):
        group = ranks.join()
    with stage("load and compile on all ranks"), ranks.loading():
        parts = build_parts(config, sampling, group, ranks.shared)
    learner = ShardedLearner(POLICY, parts[POLICY], ranks, micro_batch_tokens=tokens)
    learner.planned_bytes = planned_bytes
    reference = critic = None
    if REFERENCE in parts:
        reference = Reference(ShardedModel(REFERENCE, parts[REFERENCE], ranks).predictions, tokens)
    if CRITIC in parts:
        critic = Critic(ShardedLearner(CRITIC, parts[CRITIC], ranks, micro_batch_tokens=tokens), config.critic)
    return Trained(learner, reference, critic)


def build_parts(
    config: PlannedConfig,
    sampling: SamplingParams,
    group: RankGroup,
    shared: Values[SharedWeights] = (),
    *,
    trains: bool = True,
) -> dict[str, RankModel]:
    """Build one rank's shard of every model of the run, a collective of all ranks. The policy's shard lies in the
    `shared` memory of the engine's workers, if given. Unless it `trains`, there is only the policy."""
    from slipstream.trainer.critic import ValueModel, ValueObjective
    from slipstream.trainer.distributed.engine_memory import WorkerMemory
    from slipstream.trainer.distributed.worker import Objectives, RankModel

    def shard(model: PolicyModel, *, memory: WorkerMemory | None = None) -> PolicyModel:
        group.shard(model, memory=memory)
        if config.model.fp32_head:
            model.use_fp32_head()
        return model

    policy = load_policy(config, group=group)
    policy.check_parts()
    memory = WorkerMemory(policy, shared, group.rank) if shared else None
    shard(policy, memory=memory)
    if not trains:
        return {POLICY: RankModel(group, policy, memory=memory)}
    compile_if_asked(config, policy, group)
    keeps_whole = config.training.reshard == "step"
    optimizer = build_optimizer(config, policy.network, place=group.place)
    objective = build_objective(config, sampling)
    parts = {POLICY: RankModel(group, policy, optimizer, Objectives(objective), memory, keeps_whole)}
    if needs_reference(config):
        frozen = shard(load_model(config, group=group)) if policy.adapter is None else _initial(config, policy)
        parts[REFERENCE] = RankModel(group, frozen)
    if uses_critic(config):
        model = ValueModel(with_adapter(config, load_model(config, group=group)))
        group.shard(model, checked=False)
        compile_if_asked(config, model, group)
        optimizer = build_optimizer(config, model.network, place=group.place)
        objective = ValueObjective(config.critic.value_clip)
        parts[CRITIC] = RankModel(group, model, optimizer, Objectives(objective), keeps_whole=keeps_whole)
    return parts


def _initial(config: PlannedConfig, policy: PolicyModel) -> PolicyModel:
    """The policy as it starts, before a resume: the base with the adapter of `lora.path`, if there is one."""
    continues = config.lora is not None and config.lora.path is not None
    return policy.as_it_is() if continues else policy.without_adapter()


def build_objective(
    config: PlannedConfig, sampling: SamplingParams, tokenizer: ChatTokenizer | None = None
) -> Objective:
    """Build the loss that `algorithm`, or the section of a method, asks for. `tokenizer`: the model's, if loaded."""
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.orchestrator.method import method_of
    from slipstream.trainer.loss import PolicyObjective, SFTObjective

    if (method := method_of(config)) is not None:
        model = config.model
        return method.objective(tokenizer or ChatTokenizer(model.path, trust_remote_code=model.trust_remote_code))
    if isinstance(config.algorithm, SFTConfig):
        return SFTObjective()
    return PolicyObjective(config.algorithm, sampling, config.teacher)


def with_adapter(config: PlannedConfig, model: PolicyModel) -> PolicyModel:
    """Add the adapter that [lora] asks for, if any, and return `model`."""
    if (lora := config.lora) is not None:
        model.add_adapter(adapter_config(config), Path(lora.path) if lora.path else None)
    return model


def load_policy(
    config: PlannedConfig, shared: SharedTensors | None = None, group: RankGroup | None = None
) -> PolicyModel:
    """The trained model with its adapter, or the reward model that a method asks for."""
    from transformers import AutoTokenizer

    from slipstream.trainer.critic import RewardModel

    model = with_adapter(config, load_model(config, shared, group))
    if config.method is None or not config.method.scores:
        return model
    tokenizer: Any = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=config.model.trust_remote_code)
    is_own = tokenizer.pad_token_id != tokenizer.eos_token_id
    return RewardModel(model, tokenizer.pad_token_id if is_own else None)


def build_optimizer(config: PlannedConfig, network: nn.Module, place: int = 0) -> Optimizer:
    """Build `training.optimizer` for all trainable parameters of `network`, or for the shards at this `place`."""
    from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW
    from slipstream.trainer.optim.base import MasterAdamW
    from slipstream.trainer.optim.muon import MasterMuon

    training, named = config.training, network.named_parameters()
    options: dict[str, Any] = {
        "betas": (training.adam_beta1, training.adam_beta2),
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "rate_of": _rate_of(config, network),
    }
    if training.optimizer == "adamw_bf16":
        return RoundedAdamW(named, seed=config.run.seed + (place << 32), **options)
    if training.optimizer in BY_BITSANDBYTES:
        from slipstream.trainer.optim import bitsandbytes

        kinds = {
            "adamw_8bit": bitsandbytes.MasterAdamW8bit,
            "adamw_paged": bitsandbytes.MasterPagedAdamW,
            "adamw_paged_8bit": bitsandbytes.MasterPagedAdamW8bit,
        }
        return kinds[training.optimizer](named, **options)
    if training.optimizer == "muon":
        return MasterMuon(named, network, momentum=training.muon_momentum, **options)
    return MasterAdamW(named, **options)


def _rate_of(config: PlannedConfig, network: nn.Module) -> RateOf:
    """The factors on `training.learning_rate`: of LoRA+, and of a vision tower."""
    from slipstream.trainer.critic import SCORE_HEAD, VALUE_HEAD
    from slipstream.trainer.model.lora import rate_in_adapter
    from slipstream.trainer.model.vision_towers import in_modules, tower_names

    training = config.training
    in_adapter = partial(rate_in_adapter, 1.0 if config.lora is None else config.lora.plus_ratio)
    if training.tower_learning_rate is None:
        return in_adapter
    of_tower = training.tower_learning_rate / training.learning_rate
    # These heads belong to neither decoder nor LM head either.
    towers = [name for name in tower_names(network) if name not in (SCORE_HEAD, VALUE_HEAD)]
    return lambda name: in_adapter(name) * (of_tower if in_modules([name], towers) else 1.0)


def share_weights(config: PlannedConfig, ask: Callable[[commands.Share], commands.Answer]) -> tuple[SharedWeights, ...]:
    """Ask an engine that is ready where each worker has its live weights. Raises CannotShare when the engine is alive
    and cannot share them."""
    from slipstream.orchestrator.control import commands
    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.weights.bridges.single_copy import CannotShare
    from slipstream.weights.model_files import stored_parameters

    parameters = stored_parameters(resolve_folder(config.model.path), config.model.dtype)
    answer = ask(commands.Share(parameters, config.weights.apply_timeout_s))
    if isinstance(answer, commands.NotShared):
        raise CannotShare(answer.problem)
    assert isinstance(answer, commands.Shared)
    return answer.workers
