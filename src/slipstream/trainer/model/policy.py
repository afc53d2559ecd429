"""A Hugging Face causal language model that answers with logits at chosen positions of a packed row.

Guarantees: model-specific treatment of logits (scaling, soft-capping) stays the model's own; only positions
that predict a trainable token reach the head; dropout is off, so equal weights give equal log-probabilities;
a model in which packed sequences could see one another is refused when it is loaded, by a test, not by a
list.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.algo.logprobs import HeadLogits
from slipstream.errors import ConfigError
from slipstream.trainer.attention import packed
from slipstream.trainer.batching import MicroBatch, StepBatch, micro_batches
from slipstream.trainer.model.layers import Checkpointing, LayerOptions, configure_layers
from slipstream.trainer.model.lora import Adapter
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.rotary_frequencies import fix_rotary
from slipstream.trainer.model.vision_towers import auto_class, freeze_towers, reads_images, text_config, unusable
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.bridges.single_copy import CannotShare
from slipstream.weights.model_files import stored_parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel:
    """One set of weights. `folder` is where they came from: the source of tokenizer and configuration
    files."""

    def __init__(self, network: nn.Module, folder: Path, *, packing: bool = True) -> None:
        self.network = network.eval()
        self.folder = folder
        self.packing = packing
        self.adapter: Adapter | None = None
        """The LoRA adapter, when only that is trained."""
        self.layers = LayerOptions()
        """How the decoder layers compute."""
        self.max_model_len: int | None = None
        """The engine's, where that is known."""
        self._uses_adapter = True
        self._fp32_head: nn.Linear | None = None
        self._stored: list[tuple[str, Tensor]] = []
        """What is stored of these weights, as views of them."""
        self._stored_of: list[tuple[int, int, torch.dtype, torch.Size]] = []
        """Which parameters these are, and where."""

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
    ) -> PolicyModel:
        """The model in `path`, a folder or a hub id. Raises ConfigError, naming the reason, for one that
        cannot be trained here. Without `packing` the attention is transformers' own and a row holds one
        sequence. With `checkpointing` a layer keeps its input only and is computed again in the backward pass, or keeps
        what is dear (`selective`); with `offload` that input waits in the CPU's memory. With `shared` its parameters
        are these tensors, and the folder gives their names and the configuration. If `unread`, they take no memory and
        have no values yet. Without `checked`, whether packed sequences see one another is left to the caller to find
        out. With `fp32_head` see `use_fp32_head`. The engine's `max_model_len` decides rotary frequencies (`rotary`).
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
        freeze_towers(network)
        fix_rotary(network, text_config(cast("Any", network).config), max_model_len)
        model = cls(network.to(device), folder, packing=packing)
        model.layers, model.max_model_len = LayerOptions(checkpointing, offload), max_model_len
        configure_layers(network, model.layers)
        if packing and checked:
            check_isolation(model)
        if fp32_head:
            model.use_fp32_head()
        return model

    @property
    def roots(self) -> list[nn.Module]:
        """What is called to compute: together they hold every parameter."""
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
        """The base: the same memory, with the adapter left out of every computation."""
        base = copy.copy(self)
        base._uses_adapter = False
        return base

    def logits(self, row: MicroBatch) -> Tensor | HeadLogits:
        """Logits `[N, V]` at `row.predict_index_N`, in the model's dtype; under `use_fp32_head` not yet computed."""
        if self.adapter is None:
            return self._logits(row)
        with self.adapter.switched(self._uses_adapter):
            return self._logits(row)

    def use_fp32_head(self) -> None:
        """From now on the output head's products are float32, computed in chunks by whoever needs them. Raises
        ConfigError where the network's logits are not just these products."""
        network: Any = self.network
        head, name = network.get_output_embeddings(), type(network).__name__
        if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
            raise ConfigError(f"{name} has no plain output head: set model.fp32_head = false")
        (row,) = micro_batches(
            StepBatch([records.Sequence([0, 1, 2, 3], [False, True, True, True])]), 8, device=self.device
        )
        with torch.no_grad():
            # Whatever scales or caps logits would change such a number.
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
        segments = {"segments": row.layout} if self.packing else {}
        output = self.network(
            input_ids=row.token_ids_T[None],
            position_ids=row.position_ids_T[None],
            logits_to_keep=row.predict_index_N,
            use_cache=False,
            **segments,
        )
        # Squeezed, not indexed: an index has zeros and a copy into them for its gradient, here the largest there is.
        logits_NV = output.logits.squeeze(0)
        return logits_NV if self._fp32_head is None else HeadLogits(logits_NV, self._fp32_head.weight)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors under the names that `save_pretrained` writes, each once: a tied head is left out. An adapter
        is merged into them."""
        return self._model_weights(merged=True)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same without the adapter."""
        return self._model_weights(merged=False)

    def stored(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The network's parameter `name` as it is saved and published, without the adapter; nothing for one of the
        adapter's. Right for each by itself where `check_parts` has nothing against it."""
        state = {name: tensor}
        if self.adapter is not None:
            state = self.adapter.model_state(state, merged=False)
        return list(stored_weights(self.network, state))

    def check_parts(self) -> None:
        """Raise ConfigError for a model of which something stored is made of several parameters, which one after the
        other do not give it."""
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
        # A generator: what an engine waits for comes before it.
        if self.adapter is not None:
            state = self.adapter.model_state(dict(self.network.state_dict()), merged=merged)
            yield from stored_weights(self.network, state)
            return
        # An update waits for this: transformers is asked once, for as long as all that is stored are views.
        live = [*self.network.parameters(), *self.network.buffers()]
        places = [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in live]
        if places != self._stored_of or not self._stored:
            self._stored, self._stored_of = list(stored_weights(self.network, self.network.state_dict())), places
        stored = self._stored
        if not {_memory(weight) for _, weight in stored} <= {_memory(tensor) for tensor in live} - {0}:
            self._stored = []
        yield from stored


def shares_memory(stored: Tensor, own: Tensor) -> bool:
    """Whether what is stored has the shape and the memory of what the network has."""
    return stored.shape == own.shape and _memory(stored) == _memory(own)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_MARK = 64.0


def _mark_logits(input: Tensor) -> Tensor:
    return torch.full_like(input, _MARK)


def _identity(input: Tensor) -> Tensor:
    return input


def stored_weights(network: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What `save_pretrained` writes of a network whose state this is, under the names that it writes. Where nothing is
    converted these are the state's own tensors, also where many lie in one storage."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    own: Any = network
    # Transformers tells tied weights by their storage and clones what else is in it. It is asked about stand-ins, one
    # for each memory.
    alike = {_extent(tensor): torch.empty(1) for tensor in state.values() if tensor.data_ptr()}
    untied = remove_tied_weights_from_state_dict(
        {name: alike.get(_extent(tensor), tensor) for name, tensor in state.items()}, own
    )
    yield from revert_weight_conversion(own, {name: state[name] for name in untied}).items()


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class SharedTensors:
    """A model's parameters in memory that another process has too, by Hugging Face name, and why others are not
    there."""

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
    """The network in `folder`, with an image tower where it has one; see `PolicyModel.load`."""
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
        raise ConfigError(f"model.path {str(folder)!r} cannot be loaded ({_one_line(error)}): save it again") from error
    if missing := sorted(loading.get("missing_keys") or ()):
        # Transformers would draw them at random and go on.
        raise ConfigError(
            f"model.path {str(folder)!r} lacks {len(missing)} of the model's parameters, first {missing[0]}: save or "
            "download it again"
        )
    return network


def _place(
    auto: Any, config: Any, folder: Path, shared: SharedTensors | None, trust_remote_code: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The network whose parameters are `shared`, or, without, have no values. Transformers gets placeholders of the
    stored names and shapes, which take no memory, and does with them what it does with files; each is then replaced by
    the tensor of its name."""
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
    """One tensor over the shared memory of everything that transformers fuses into the parameter `name` (the experts of
    a layer); None where the engine does not keep it as one, in the same order."""
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
    """Keep transformers' bars, which last a moment, out of the run's own view."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def resolve_folder(path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a model: `path` itself, or the snapshot of the hub id it names, called as its commit. Without
    `weights` that has only the small files, unless it was there."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") != 1:
        raise ConfigError(f"model.path {str(path)!r} is not a folder: give a model folder or a hub id, owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", *(["*.safetensors"] if weights else []), "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
    try:
        # Mistral's own format: the same weights once more, which nobody reads.
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=patterns, ignore_patterns="consolidated*")
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError, ValueError) as error:
        wanted = f" (model.revision = {revision!r})" if revision is not None else ""
        raise ConfigError(
            f"model.path {str(path)!r}{wanted} is no folder and the hub did not give it ({_one_line(error)}): check "
            "spelling and network, or give the path of a folder"
        ) from error


def check_architecture(folder: Path, trust_remote_code: bool = False, *, packing: bool = True) -> None:
    """Raises `ConfigError` when the folder's configuration is not that of a causal language model, of text or of images
    too."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise unusable(str(folder), error) from error
    _check_config(config, str(folder), packing)


def unpacked_attention(path: Path | str, trust_remote_code: bool) -> tuple[str, bool]:
    """Transformers' SDPA, which leaves out soft-capping and sinks without a word; its plain one where those are, and
    whether it caps."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(text_config(config), "attn_logit_softcapping", None) is not None:
        return "eager", True
    (name, *_) = [*(getattr(config, "architectures", None) or []), ""]
    return "sdpa" if getattr(getattr(transformers, name, None), "_supports_sdpa", True) else "eager", False


def _one_line(error: BaseException) -> str:
    """The first sentences of an error that may say much, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check_config(config: Any, path: str, packing: bool) -> None:
    """What the configuration alone tells."""
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
