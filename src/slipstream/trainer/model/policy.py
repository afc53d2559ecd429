"""A Hugging Face causal language model that computes logits at chosen positions of a packed row.

Guarantees: scaling and soft-capping of logits are the model's own; only positions that predict a trainable token reach
the LM head; dropout is off, so that equal weights give equal log-probabilities; a model in which packed sequences
attend to one another is refused when it is loaded, by a test (`packing_check.py`) rather than by a list.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.algo.logprobs import HeadLogits
from slipstream.errors import ConfigError, TrainingError, one_line
from slipstream.trainer.attention import packed
from slipstream.trainer.model.image_features import (
    ImageFeatures,
    RowEmbeddings,
    embed_images,
    uses_its_own_attention,
)
from slipstream.trainer.model.layers import Checkpointing, LayerOptions, configure_layers
from slipstream.trainer.model.lora import Adapter
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.rotary_frequencies import fix_rotary
from slipstream.trainer.model.vision_towers import auto_class, freeze_towers, reads_images, text_config, unusable
from slipstream.trainer.packing import MicroBatch, StepBatch, micro_batches
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.bridges.single_copy import CannotShare
from slipstream.weights.model_files import stored_parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel:
    """A network and its weights. `folder`, which they were loaded from, has the tokenizer and configuration files."""

    def __init__(self, network: nn.Module, folder: Path, *, packing: bool = True) -> None:
        self.network = network.eval()
        self.folder = folder
        self.packing = packing
        self.adapter: Adapter | None = None
        """The LoRA adapter, if only that is trained."""
        self.layers = LayerOptions()
        """How the decoder layers compute."""
        self.max_model_len: int | None = None
        """The engine's `max_model_len`, if known."""
        self.images: ImageFeatures | None = None
        """What the vision tower makes of images, if there is one."""
        self._uses_adapter = True
        self._fp32_head: nn.Linear | None = None
        self._stored: list[tuple[str, Tensor]] = []
        """Cache: the tensors that a checkpoint stores, as views of the weights."""
        self._stored_of: list[tuple[int, int, torch.dtype, torch.Size]] = []
        """Key of the cache: identity, address, dtype and shape of the live tensors."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        *,
        packing: bool = True,
        checkpointing: Checkpointing = False,
        offload: bool = False,
        shared: SharedTensors | None = None,
        unread: bool = False,
        checked: bool = True,
        fp32_head: bool = False,
        max_model_len: int | None = None,
        train_tower: bool = False,
    ) -> PolicyModel:
        """Load the model in `path`, a folder or a hub id. Raises ConfigError, with the reason, for a model that
        cannot be trained.

        `packing`: False uses transformers' attention, with one sequence per row. `checkpointing`: layers save only
        their input, or with "selective" also matmul and attention outputs, and recompute the rest in the backward pass.
        `offload`: saved activations wait in host memory. `shared`: tensors to use as the parameters; the folder gives
        names and configuration. `unread`: parameters take no memory and have no values. `checked`: False leaves the
        packing check to the caller. `fp32_head`: see `use_fp32_head`. `max_model_len`: the engine's, which determines
        rotary frequencies (`rotary_frequencies.py`). `train_tower`: vision towers are trained too.
        """
        hide_progress_bars()
        folder = resolve_folder(path)
        check_architecture(folder, trust_remote_code, packing=packing)
        implementation = packed.register() if packing else unpacked_attention(folder, trust_remote_code)[0]
        network = load_network(
            folder, dtype, trust_remote_code, implementation=implementation, shared=shared, unread=unread
        )
        if "logits_to_keep" not in inspect.signature(network.forward).parameters:
            raise ConfigError(f"{type(network).__name__} cannot restrict its logits to positions: use another model")
        if not train_tower:
            freeze_towers(network)
        fix_rotary(network, text_config(cast("Any", network).config), max_model_len)
        model = cls(network.to(device), folder, packing=packing)
        model.layers, model.max_model_len = LayerOptions(checkpointing, offload), max_model_len
        if reads_images(network.config):
            uses_its_own_attention(network)
            model.images = ImageFeatures(network, folder, trained=train_tower, trust_remote_code=trust_remote_code)
        configure_layers(network, model.layers)
        if packing and checked:
            check_isolation(model)
        if fp32_head:
            model.use_fp32_head()
        return model

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that are called to compute; together they have every parameter."""
        return [self.network]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The live weights' dtype."""
        return next(self.network.parameters()).dtype

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.network.config

    def add_adapter(self, config: AdapterConfig, folder: Path | None = None) -> Adapter:
        """Freeze all weights and train a LoRA adapter beside them: a fresh one, or the one in `folder`."""
        self.adapter = Adapter.attach(self.network, config)
        if folder is not None:
            self.adapter.load(folder)
        return self.adapter

    def without_adapter(self) -> PolicyModel:
        """The base model: the same memory, computing without the adapter."""
        base = copy.copy(self)
        base._uses_adapter = False
        return base

    def logits(self, row: MicroBatch) -> Tensor | HeadLogits:
        """Compute logits `[N, V]` at `row.predict_index_N` in the model's dtype; lazy ones after `use_fp32_head`."""
        with self._switched():
            return self._logits(row)

    def embed(self, row: MicroBatch) -> RowEmbeddings:
        """What the decoder reads of a row: its tokens' embeddings, with the features of its images in their places."""
        network: Any = self.network
        embeds_TD: Tensor = network.get_input_embeddings()(row.token_ids_T)
        if not row.images:
            return RowEmbeddings(embeds_TD)
        if self.images is None:
            raise TrainingError(f"{type(network).__name__} has no vision tower, and a row has images: remove them")
        return embed_images(embeds_TD, row.images, self.images.of(row.images))

    def forward(self, embeddings: RowEmbeddings, row: MicroBatch) -> Tensor:
        """The decoder's last hidden states `[T, D]` for `embeddings`, at the row's positions and in its layout."""
        network: Any = self.network
        positions = row.position_ids_T[None]
        if row.rotary_ids_3T is not None:
            # Transformers takes the row of token positions first, and tells packed sequences by it.
            positions = torch.cat([positions, row.rotary_ids_3T])[:, None]
        segments = {"segments": row.layout} if self.packing else {}
        with self._switched():
            output = network.get_decoder()(
                inputs_embeds=embeddings.embeds_TD[None],
                position_ids=positions,
                use_cache=False,
                **segments,
                **embeddings.further(),
            )
        return output.last_hidden_state.squeeze(0)

    def head(self, hidden_TD: Tensor, index_N: Tensor) -> Tensor | HeadLogits:
        """Logits `[N, V]` at row positions `index_N`, of models whose logits are the LM head's outputs."""
        network: Any = self.network
        logits_NV = network.get_output_embeddings()(hidden_TD[index_N])
        return logits_NV if self._fp32_head is None else HeadLogits(logits_NV, self._fp32_head.weight)

    def _switched(self) -> AbstractContextManager[object]:
        return nullcontext() if self.adapter is None else self.adapter.switched(self._uses_adapter)

    def use_fp32_head(self) -> None:
        """Compute logits in float32, lazily and in chunks (`HeadLogits`). Raises ConfigError if the network's logits
        are not just the LM head's outputs."""
        network: Any = self.network
        head, name = network.get_output_embeddings(), type(network).__name__
        if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
            raise ConfigError(f"{name} has no plain output head: set model.fp32_head = false")
        (row,) = micro_batches(
            StepBatch([records.Sequence([0, 1, 2, 3], [False, True, True, True])]), 8, device=self.device
        )
        with torch.no_grad():
            # Scaling or soft-capping after the head would change this constant.
            head.forward = _mark_logits
            marked = self.logits(row)
        if not isinstance(marked, Tensor) or not bool((marked == _MARK).all()):
            del head.forward
            raise ConfigError(
                f"{name} changes its logits after the output head, which model.fp32_head = true computes itself: set "
                "it to false"
            )
        head.forward = _identity
        self._fp32_head = head

    def _logits(self, row: MicroBatch) -> Tensor | HeadLogits:
        if row.images:
            return self.head(self.forward(self.embed(row), row), row.predict_index_N)
        segments = {"segments": row.layout} if self.packing else {}
        output = self.network(
            input_ids=row.token_ids_T[None],
            position_ids=row.position_ids_T[None],
            logits_to_keep=row.predict_index_N,
            use_cache=False,
            **segments,
        )
        # `squeeze`: the backward of indexing would allocate zeros and copy, for the largest tensor of all.
        logits_NV = output.logits.squeeze(0)
        return logits_NV if self._fp32_head is None else HeadLogits(logits_NV, self._fp32_head.weight)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors under the names that `save_pretrained` writes, each once (without a tied LM head), with an
        adapter merged in."""
        return self._model_weights(merged=True)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same without the adapter."""
        return self._model_weights(merged=False)

    def stored(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that the network's parameter `name` is saved and published as, without the adapter; none for an
        adapter's parameter. Valid for single parameters if `check_parts` passes."""
        state = {name: tensor}
        if self.adapter is not None:
            state = self.adapter.model_state(state, merged=False)
        return list(stored_weights(self.network, state))

    def check_parts(self) -> None:
        """Raise ConfigError if a stored tensor is assembled from several parameters, which ranks cannot do one
        parameter at a time."""
        seen: set[str] = set()
        for own, parameter in self.network.named_parameters():
            names = {
                name for name, _ in self.stored(own, torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape))
            }
            if twice := seen & names:
                raise ConfigError(
                    f"{type(self.network).__name__} stores several parameters as one, {min(twice)}, which ranks have "
                    "parts of: set training.ranks = 1"
                )
            seen |= names

    def _model_weights(self, *, merged: bool) -> Iterator[tuple[str, Tensor]]:
        # A generator, so that the work begins only when it is consumed.
        if self.adapter is not None:
            state = self.adapter.model_state(dict(self.network.state_dict()), merged=merged)
            yield from stored_weights(self.network, state)
            return
        # Every update waits for this: cached while all stored tensors are views of live ones.
        live = [*self.network.parameters(), *self.network.buffers()]
        places = [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in live]
        if places != self._stored_of or not self._stored:
            self._stored, self._stored_of = list(stored_weights(self.network, self.network.state_dict())), places
        stored = self._stored
        if not {_memory(weight) for _, weight in stored} <= {_memory(tensor) for tensor in live} - {0}:
            self._stored = []
        yield from stored


def shares_memory(stored: Tensor, own: Tensor) -> bool:
    """Whether the stored tensor has the same shape and memory as the network's own."""
    return stored.shape == own.shape and _memory(stored) == _memory(own)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_MARK = 64.0


def _mark_logits(input: Tensor) -> Tensor:
    return torch.full_like(input, _MARK)


def _identity(input: Tensor) -> Tensor:
    return input


def stored_weights(network: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, by name, that `save_pretrained` would write for this state of the network. Tensors that need no
    conversion are the state's own, even if many share one storage."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    own: Any = network
    # Transformers identifies tied weights by storage and clones other tensors in it: it gets a placeholder for each
    # distinct memory range instead.
    alike = {_extent(tensor): torch.empty(1) for tensor in state.values() if tensor.data_ptr()}
    untied = remove_tied_weights_from_state_dict(
        {name: alike.get(_extent(tensor), tensor) for name, tensor in state.items()}, own
    )
    yield from revert_weight_conversion(own, {name: state[name] for name in untied}).items()


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class SharedTensors:
    """Model parameters in memory shared with another process, by Hugging Face name, and by name why others are not
    shared."""

    tensors: Mapping[str, Tensor]
    refused: Mapping[str, str]


def load_network(
    folder: Path,
    dtype: Literal["float32", "bfloat16"],
    trust_remote_code: bool = False,
    *,
    implementation: str = "sdpa",
    shared: SharedTensors | None = None,
    unread: bool = False,
) -> nn.Module:
    """Load the network in `folder`, with its vision tower if it has one; see `PolicyModel.load`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = auto_class(config)
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "attn_implementation": implementation,
        "output_loading_info": True,
    }
    try:
        network, loading = cast(
            "tuple[Any, dict[str, Any]]",
            kind.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
            if shared is None and not unread
            else _place(kind, config, folder, shared, trust_remote_code, options),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.path {str(folder)!r} cannot be loaded ({one_line(error)}): save it again") from error
    if missing := sorted(loading.get("missing_keys") or ()):
        # Transformers would initialize them at random.
        raise ConfigError(
            f"model.path {str(folder)!r} lacks {len(missing)} of the model's parameters, first {missing[0]}: save or "
            "download it again"
        )
    return network


def _place(
    auto: Any, config: Any, folder: Path, shared: SharedTensors | None, trust_remote_code: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Build the network with the parameters `shared`, or without values if that is None. Transformers loads
    placeholders of the stored names and shapes, which take no memory; each is then replaced by the tensor of its
    name."""
    with torch.device("meta"):
        kind: Any = type(auto.from_config(config, trust_remote_code=trust_remote_code))
    dtype = options["dtype"]
    specs = stored_parameters(folder, str(dtype).removeprefix("torch."))
    placeholders = {spec.name: torch.zeros(1, dtype=dtype).expand(spec.shape) for spec in specs}
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in placeholders.items()}
    network, loading = kind.from_pretrained(None, config=config, state_dict=placeholders, **options)
    if shared is None:
        return network, loading
    for own_name, parameter in network.named_parameters():
        name = names.get(parameter.untyped_storage().data_ptr())
        tensor = shared.tensors.get(name) if name else _fused(network, own_name, parameter.shape, shared)
        if tensor is None or tensor.shape != parameter.shape:
            changed = "transformers converts it, and the engine stores it differently"
            reason = changed if name is None else shared.refused.get(name, "the engine has another")
            raise CannotShare(f"trainer and engine cannot have one copy of {name or own_name} ({reason})")
        parameter.data = tensor
    return network, loading


def _fused(network: nn.Module, name: str, shape: torch.Size, shared: SharedTensors) -> Tensor | None:
    """One tensor over the shared memory of all that transformers fuses into the parameter `name` (the experts of a
    layer); None unless the engine stores them contiguously in the same order."""
    parts = [shared.tensors.get(part) for part, _ in stored_weights(network, {name: torch.empty(shape, device="meta")})]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts) or sum(part.numel() for part in known) != shape.numel():
        return None
    if len({(part.untyped_storage().data_ptr(), part.dtype) for part in known}) > 1:
        return None
    first = min(known, key=lambda part: part.storage_offset())
    end = max(part.storage_offset() + part.numel() for part in known)
    if end - first.storage_offset() != shape.numel() or not all(part.is_contiguous() for part in known):
        return None
    whole = first.as_strided(shape, torch.empty(shape, device="meta").stride(), first.storage_offset())
    in_order = all(torch.equal(part, shared.tensors[own]) for own, part in stored_weights(network, {name: whole}))
    return whole if in_order else None


def hide_progress_bars() -> None:
    """Disable transformers' progress bars, which would disturb the run's own view."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def resolve_folder(path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a model: `path` itself, or the hub snapshot of the id it names, a folder named by its commit.
    `weights`: False downloads the small files only."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") != 1:
        raise ConfigError(f"model.path {str(path)!r} is not a folder: give a model folder or a hub id, owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", *(["*.safetensors"] if weights else []), "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
    try:
        # "consolidated*" is Mistral's own format: the same weights again.
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=patterns, ignore_patterns="consolidated*")
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError, ValueError) as error:
        wanted = f" (model.revision = {revision!r})" if revision is not None else ""
        raise ConfigError(
            f"model.path {str(path)!r}{wanted} is no folder and the hub did not give it ({one_line(error)}): check "
            "spelling and network, or give the path of a folder"
        ) from error


def check_architecture(folder: Path, trust_remote_code: bool = False, *, packing: bool = True) -> None:
    """Raise ConfigError unless the folder has the configuration of a causal language model, with or without images."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise unusable(str(folder), error) from error
    _check_config(config, str(folder), packing)


def unpacked_attention(path: Path | str, trust_remote_code: bool) -> tuple[str, bool]:
    """(implementation, soft-capped): transformers' attention without packing. "sdpa" silently ignores soft-capping and
    sinks, so that models with these use "eager"."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(text_config(config), "attn_logit_softcapping", None) is not None:
        return "eager", True
    (name, *_) = [*(getattr(config, "architectures", None) or []), ""]
    return "sdpa" if getattr(getattr(transformers, name, None), "_supports_sdpa", True) else "eager", False


def _check_config(config: Any, path: str, packing: bool) -> None:
    """Raise ConfigError for what the configuration alone shows to be untrainable."""
    from transformers.models.auto import modeling_auto

    mapping: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if reads_images(config):
        mapping = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = {name for names in mapping.values() for name in _as_tuple(names)}
    architectures = list(getattr(config, "architectures", None) or [])
    custom = bool(getattr(config, "auto_map", None))
    if getattr(config, "is_encoder_decoder", False) or not (custom or known & set(architectures)):
        raise ConfigError(
            f"model.path {path!r} holds {', '.join(architectures) or 'no named architecture'}, "
            "not a causal language model: give one that generates text"
        )
    if getattr(config, "audio_config", None) is not None:
        raise ConfigError(f"model.path {path!r} hears audio: only models of text, or of images too, can be trained")
    kinds = set(getattr(text_config(config), "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if packing and kinds:
        raise ConfigError(
            f"model.path {path!r} has layers of kind {', '.join(sorted(kinds))}, in which packed sequences "
            "would see one another: set training.packing = false"
        )
    if packing and getattr(text_config(config), "attn_temperature_tuning", False):
        raise ConfigError(
            f"model.path {path!r} scales its attention by the place in the row (attn_temperature_tuning), which packed "
            "sequences share: set training.packing = false"
        )


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
