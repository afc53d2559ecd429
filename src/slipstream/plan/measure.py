"""Measures the facts of a plan: this machine, the model's shape, and the lengths of the tasks.

Guarantees: reads, never changes anything; whatever cannot be read is a ConfigError. Importing it is cheap:
torch, transformers and safetensors are imported when a fact needs them. The model's weights are not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import RunConfig
from slipstream.config.traits import uses_engine
from slipstream.errors import ConfigError, first_line
from slipstream.plan.deadlines import start_seconds
from slipstream.plan.facts import AdapterFacts, DataFacts, Facts, ModelFacts, ToolFacts, TowerFacts
from slipstream.plan.machine import describe_gpus, measure_disk, usable_cpus, usable_memory_bytes
from slipstream.plan.memory.cards import Gpus, with_gpus
from slipstream.plan.memory.last_run import last_run_memory
from slipstream.plan.memory.shortages import find_shortages
from slipstream.plan.memory.sizes import weights_bytes
from slipstream.plan.preflight.model_folder import hub_commit, read_config_file
from slipstream.plan.vllm_version import read_engine
from slipstream.records import Message, Task

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.inference.lending import ServerFacts
    from slipstream.weights.adapter_folder import AdapterConfig

MAX_MEASURED = 1000
START_S = 60.0
"""Seconds for a server to appear, if `inference.start_timeout_s` is `auto`."""
NAMES_IN_CONFIG = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "vocab_size": ("vocab_size",),
}


Gold = Callable[[Task], Sequence[Message]]
"""The messages after a task's prompt; none if unknown."""


def answer_turns(task: Task) -> list[Message]:
    """The task's own answer, as `Gold`."""
    return [] if task.answer is None else [Message("assistant", task.answer)]


def gather_facts(
    config: RunConfig,
    data: DataFacts,
    *,
    thinks: bool = False,
    tools: ToolFacts | None = None,
    images: Sequence[Sequence[tuple[str, int]]] = (),
    gpus: Gpus | None = None,
) -> Facts:
    """Measure the machine and the model at `config.model.path`. `gpus`: those to plan for; by default this machine's.

    `thinks`: see `ModelFacts`. `tools`: see `Facts`; the model's type is filled in. `images`: see `measure_tower`.
    Raises ConfigError when the model cannot be read.
    """
    gpus = describe_gpus() if gpus is None else gpus
    trusted, with_tower = config.model.trust_remote_code, config.model.train_tower
    model = read_trained_model(config.model.path, trust_remote_code=trusted, with_tower=with_tower)
    servers, blind = read_servers(config, model)
    last_run = last_run_memory(config.run.folder, config.model.path) if gpus.count else ""
    shortages, damage = find_shortages(config.run.folder)
    facts = Facts(
        num_cpus=usable_cpus(),
        memory_bytes=usable_memory_bytes(),
        model=dataclasses.replace(with_scores(config, model), thinks=thinks),
        data=data,
        adapter=measure_adapter(config),
        engine=read_engine(on_cpu=gpus.count == 0),
        tools=tools and dataclasses.replace(tools, model_type=_model_type(config.model.path, trusted)),
        tower=measure_tower(config, model, images),
        teacher=read_teacher(config),
        disk=measure_disk(config.run.folder),
        servers=servers,
        model_config=read_config_file(Path(config.model.path)) if servers else {},
        blind_servers=blind,
        shortages=shortages,
        notices=(*([last_run] if last_run else []), *damage),
    )
    return with_gpus(facts, gpus)


def read_servers(config: RunConfig, model: ModelFacts) -> tuple[tuple[ServerFacts, ...], tuple[str, ...]]:
    """The facts of all servers, and the addresses of those without the run folder, if weights go through it."""
    if not config.inference.servers or not uses_engine(config):
        return (), ()
    from slipstream.inference.server_client import read_facts

    folder: Path | None = None
    if config.weights.bridge in ("disk", "lora"):
        folder = (config.run.folder or Path("runs")).absolute()
        folder = next(each for each in (folder, *folder.parents) if each.is_dir())
    asked = config.inference.start_timeout_s
    wait_s, load_s = (START_S, start_seconds(weights_bytes(model, "float32"))) if asked == "auto" else (asked, asked)
    return read_facts(config.inference.servers, wait_s, load_s, folder)


def read_teacher(config: RunConfig) -> ModelFacts | None:
    """The shape of the model at `teacher.path`."""
    if config.teacher is None or config.teacher.path is None:
        return None
    try:
        return read_model(config.teacher.path, trust_remote_code=config.model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "teacher.path")) from error


def measure_adapter(config: RunConfig) -> AdapterFacts | None:
    """Size and layers of the adapter that [lora] makes. Raises ConfigError when its targets are not in the model, or
    when the adapter to start from does not fit."""
    if config.lora is None:
        return None
    from slipstream.trainer.model.lora import blank_adapter
    from slipstream.trainer.model.vision_towers import names_in_towers
    from slipstream.weights.adapter_folder import adapted_modules, check_adapter_fits, read_adapter_shapes

    model, lora = config.model, config.lora
    adapter = blank_adapter(model.path, adapter_config(config), trust_remote_code=model.trust_remote_code)
    if lora.path is not None:
        modules = adapted_modules(read_adapter_shapes(Path(lora.path)))
        of_tower = names_in_towers(model.path, modules, trust_remote_code=model.trust_remote_code)
        if bool(of_tower) != model.train_tower:
            what, setting = ("layers", "true") if of_tower else ("no layers", "false")
            raise ConfigError(
                f"the adapter in {lora.path} has {what} of a vision tower: set model.train_tower = {setting}"
            )
        check_adapter_fits(Path(lora.path), adapter.config, adapter.shapes())
    if model.train_tower and not adapter.of_tower:
        raise ConfigError(
            "model.train_tower = true, and lora.target_modules names no layer of a vision tower: name some of its "
            'layers too, use "all-linear", or set model.train_tower = false'
        )
    decoding = [layer for name, layer in adapter.layers.items() if name not in adapter.of_tower]
    num_outputs = sum(layer.lora_A.shape[0] + layer.lora_B.shape[0] for layer in decoding)
    unreached = adapter.unreached
    return AdapterFacts(
        adapter.num_parameters,
        tuple(sorted(adapter.config.target_modules)),
        num_outputs,
        sum(unreached.values()),
        tuple(sorted(unreached)),
    )


def adapter_config(config: RunConfig) -> AdapterConfig:
    """[lora] as it is written into an adapter's folder."""
    from slipstream.weights.adapter_folder import AdapterConfig

    lora = config.lora
    assert lora is not None
    targets = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    base, revision = hub_commit(config.model.path)
    return AdapterConfig(
        *(lora.rank, lora.alpha, targets, base),
        dora=lora.dora,
        with_tower=config.model.train_tower,
        revision=revision,
    )


def measure_data(
    tasks: Sequence[Task],
    tokenizer: ChatTokenizer,
    eval_tasks: Sequence[Task] = (),
    lengths: Sequence[int] = (),
    eval_lengths: Sequence[int] = (),
    gold: Gold = answer_turns,
    **others: Any,
) -> DataFacts:
    """Count the tokens of the longest answers, among the 1,000 longest by their bytes, as the plan adds a margin to
    them. `lengths` and `eval_lengths`: the tokens of SFT's conversations and of the held-out ones. `others`: facts that
    the environment or the tokenizer has told."""
    return DataFacts(
        num_train_tasks=len(lengths) or len(tasks),
        max_answer_tokens=longest_answer((*tasks, *eval_tasks), tokenizer, gold),
        max_sequence_tokens=max((*lengths, *eval_lengths), default=None),
        num_eval_rows=len(eval_lengths),
        num_eval_tasks=len(eval_tasks) or None,
        **others,
    )


def longest_answer(tasks: Iterable[Task], tokenizer: ChatTokenizer, gold: Gold) -> int | None:
    """Tokens of the longest turn of a gold answer, with its end token, among the 1,000 of most bytes; None without
    any."""
    answers = sorted(_answered(tasks, gold), key=lambda turns: _num_bytes(turns[-1:]), reverse=True)[:MAX_MEASURED]
    return max((tokenizer.training_tokens(turns, "last").num_trainable for turns in answers), default=None)


def _answered(tasks: Iterable[Task], gold: Gold) -> list[tuple[Message, ...]]:
    """The tasks' conversations, up to each turn of the policy."""
    found: list[tuple[Message, ...]] = []
    for task in tasks:
        turns = (*task.prompt, *gold(task))
        ends = range(len(task.prompt) + 1, len(turns) + 1)
        found += [turns[:end] for end in ends if turns[end - 1].role == "assistant"]
    return found


def _num_bytes(turns: Sequence[Message]) -> int:
    return sum(len(str([turn.as_chat(), turn.tools]).encode(errors="surrogatepass")) for turn in turns)


def read_trained_model(path: str, *, trust_remote_code: bool = False, with_tower: bool = False) -> ModelFacts:
    """The same as `read_model`, and how much of it is an image tower; without `with_tower` it is not trained."""
    facts = read_model(path, trust_remote_code=trust_remote_code)
    if _config_values(path, trust_remote_code).get("vision_config") is None:
        return facts
    from slipstream.trainer.model.vision_towers import blank_network, frozen_parameters

    network = blank_network(path, trust_remote_code=trust_remote_code)
    num_tower = sum(parameter.numel() for parameter in frozen_parameters(network))
    return dataclasses.replace(facts, num_tower=num_tower, num_frozen=0 if with_tower else num_tower)


def measure_tower(
    config: RunConfig, model: ModelFacts, images: Sequence[Sequence[tuple[str, int]]]
) -> TowerFacts | None:
    """The vision tower, for `images`: of each conversation or prompt the digest of every image and its tokens. None
    without any, and for models that read none."""
    tokens = {digest: size for row in images for digest, size in row}
    values = _config_values(config.model.path, config.model.trust_remote_code).get("vision_config")
    if not tokens or values is None:
        return None
    from transformers import AutoConfig

    whole: Any = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    vision = whole.vision_config
    shape = _square_tower(whole) if whole.model_type == "gemma3" else _grid_tower(whole.model_type, vision)
    return TowerFacts(
        **shape,
        model_type=whole.model_type,
        is_trained=config.model.train_tower,
        num_parameters=model.num_tower,
        total_tokens=sum(tokens.values()),
        image_tokens=max(tokens.values()),
        row_tokens=max(sum(size for _, size in row) for row in images),
    )


def _grid_tower(model_type: str, vision: Any) -> dict[str, int]:
    """The shape of a tower of the Qwen families."""
    is_first = model_type == "qwen2_vl"
    hidden = vision.embed_dim if is_first else vision.hidden_size
    num_added = len(getattr(vision, "deepstack_visual_indexes", ()))
    return {
        "depth": vision.depth,
        "hidden_size": hidden,
        "intermediate_size": int(hidden * vision.mlp_ratio) if is_first else vision.intermediate_size,
        "num_heads": vision.num_heads,
        "patch_elements": 3 * vision.temporal_patch_size * vision.patch_size**2,
        "merged": vision.spatial_merge_size**2,
        "token_outputs": (vision.hidden_size if is_first else vision.out_hidden_size) * (1 + num_added),
        "num_added": num_added,
    }


def _square_tower(whole: Any) -> dict[str, int]:
    """The shape of SigLIP, whose patches are pooled to equally many tokens for every image."""
    vision = whole.vision_config
    return {
        "depth": vision.num_hidden_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_attention_heads,
        "patch_elements": 3 * vision.patch_size**2,
        "merged": (vision.image_size // vision.patch_size) ** 2 // whole.mm_tokens_per_image,
        "token_outputs": whole.get_text_config().hidden_size,
        "num_added": 0,
    }


def with_scores(config: RunConfig, model: ModelFacts) -> ModelFacts:
    """`model` as attention without packing computes it."""
    from slipstream.trainer.model.loading import packing_obstacle, unpacked_attention
    from slipstream.trainer.model.vision_towers import read_config

    if config.training.packing is True:
        return model
    found = read_config(config.model.path, config.model.trust_remote_code)
    if config.training.packing == "auto":
        model = dataclasses.replace(model, unpackable=packing_obstacle(found))
        if not model.unpackable:
            return model
    implementation, is_capped = unpacked_attention(found)
    if implementation != "eager":
        return model
    return dataclasses.replace(model, scores="capped" if is_capped else "plain")


def read_model(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """The shape of the model in a local folder, or of the hub id `path`.

    Parameters are counted in the folder's safetensors files; where these are still to come, in the network that
    transformers makes of the configuration, without memory.
    """
    folder = Path(path)
    values = _config_values(path, trust_remote_code)
    shape = values.get("text_config") or values
    if folder.is_dir() and any(_first(shape, names) is None for names in NAMES_IN_CONFIG.values()):
        # A config file may leave out defaults of its class.
        values = _library_config(path, trust_remote_code)
        shape = values.get("text_config") or values
    num_parameters = _count_parameters(folder) if folder.is_dir() else None
    found: dict[str, Any] = {}
    for name, alternatives in NAMES_IN_CONFIG.items():
        value = _first(shape, alternatives)
        if not isinstance(value, int):
            raise ConfigError(
                f'the config of model.path = "{path}" has no {alternatives[0]}: use a decoder-only language model'
            )
        found[name] = value
    hidden, num_heads = found["hidden_size"], found["num_heads"]
    dtype = values.get("dtype") or values.get("torch_dtype") or shape.get("dtype") or "float32"
    is_tied = bool(shape.get("tie_word_embeddings", values.get("tie_word_embeddings", True)))
    if is_tied and num_parameters is not None:
        from slipstream.weights.model_files import has_own_head

        is_tied = not has_own_head(folder)
    facts = ModelFacts(
        **found,
        tied_embeddings=is_tied,
        num_parameters=num_parameters or 0,
        intermediate_size=_first(shape, ("intermediate_size", "n_inner", "ffn_dim")) or 4 * hidden,
        num_kv_heads=_first(shape, ("num_key_value_heads",)) or num_heads,
        head_dim=_first(shape, ("head_dim",)) or hidden // num_heads,
        dtype=str(dtype).removeprefix("torch."),
        num_experts=_first(shape, ("num_experts", "num_local_experts", "n_routed_experts")) or 0,
        original_context=_original_context(shape),
        rotary=_rotary(shape),
        window=_window(shape),
        architecture="" if values.get("auto_map") else next(iter(values.get("architectures") or ()), ""),
    )
    if num_parameters is not None:
        return facts
    from slipstream.trainer.model.vision_towers import blank_network

    network = blank_network(path, trust_remote_code=trust_remote_code)
    return dataclasses.replace(facts, num_parameters=sum(each.numel() for each in network.parameters()))


def _model_type(path: str, trust_remote_code: bool) -> str:
    return str(_config_values(path, trust_remote_code).get("model_type") or "")


def _config_values(path: str, trust_remote_code: bool) -> dict[str, Any]:
    folder = Path(path)
    if folder.is_dir():
        return read_config_file(folder)
    if folder.exists() or path.startswith(("/", "./", "../", "~")):
        raise ConfigError(f'model.path = "{path}" is not a folder: give a folder in Hugging Face format or a hub id')
    return _library_config(path, trust_remote_code)


def _window(shape: Mapping[str, Any]) -> int:
    is_used = bool(shape.get("use_sliding_window")) or "sliding_attention" in (shape.get("layer_types") or ())
    return int(shape.get("sliding_window") or 0) if is_used else 0


def _rotary_parts(shape: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parameters of rotary embeddings, or of each layer type's, with their kind; `rope_scaling` is what older
    config files call them."""
    given = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    for part in (given, *given.values()):
        if isinstance(part, Mapping) and (kind := part.get("rope_type", part.get("type"))):
            yield str(kind), part


def _rotary(shape: Mapping[str, Any]) -> str:
    return next((kind for kind, _ in _rotary_parts(shape) if kind != "default"), "default")


def _original_context(shape: Mapping[str, Any]) -> int:
    """See `ModelFacts`; `su` is what older config files call the kind."""
    for kind, part in _rotary_parts(shape):
        if kind in ("longrope", "su"):
            return int(_first({**shape, **part}, ("original_max_position_embeddings", "max_position_embeddings")) or 0)
    return 0


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _library_config(path: str, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f'model.path = "{path}" is neither a local folder nor a hub id that can be read ({first_line(error)}): '
            "check the spelling, or give the path of a folder"
        ) from None


def _count_parameters(folder: Path) -> int | None:
    """Elements of all tensors in the model's files; None when there are none."""
    from safetensors import SafetensorError, safe_open

    from slipstream.weights.model_files import weight_files

    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"the index of {folder} cannot be read ({error}): save the model again") from None
    total = 0
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    total += size
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): save the model again") from None
    return total if files else None
