"""Finds, checks and loads the network of a model folder, and names its stored tensors.

Guarantees: an untrainable folder, or one without all parameters, is refused with the reason. Tensors shared with an
engine take the parameters' places without a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, one_line
from slipstream.trainer.model.vision_towers import auto_class, read_config, reads_images, text_config
from slipstream.weights.bridges.single_copy import CannotShare, SharedWeights, check_loaded, open_weights
from slipstream.weights.model_files import HEAD, has_own_head, stored_parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_weights(network: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `save_pretrained`, by name, for this state of the network. Tensors without a conversion are the
    state's own, even if many share one storage."""
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


def open_shared(
    path: str, dtype: Literal["float32", "bfloat16", "float16"], workers: Sequence[SharedWeights]
) -> SharedTensors | None:
    """Open the weights of the engine's only worker and check them against the files of the model `path`; None without
    workers. The check takes as long as reading the files."""
    if not workers:
        return None
    (shared,) = workers
    folder = resolve_folder(path)
    tensors, refused = open_weights(shared), dict(shared.refused)
    for stored in stored_parameters(folder, dtype):
        if stored.name in tensors and tuple(tensors[stored.name].shape) != stored.shape:
            refused[stored.name] = "vLLM keeps only a part of it"
            del tensors[stored.name]
    check_loaded(tensors, folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # before small permanent tensors fragment the memory used for the comparison
    return SharedTensors(tensors, refused)


def load_network(
    folder: Path,
    dtype: Literal["float32", "bfloat16", "float16"],
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
    """Build the network with the parameters `shared`, or without values if this is None. Transformers loads
    placeholders of the stored names and shapes; they take no memory. The tensor of its name then replaces each one."""
    with torch.device("meta"):
        kind: Any = type(auto.from_config(config, trust_remote_code=trust_remote_code))
    dtype = options["dtype"]
    specs = stored_parameters(folder, str(dtype).removeprefix("torch."))
    # If the configuration ties them, transformers ties an embedding and a head of equal values.
    is_tied = any(getattr(each, "tie_word_embeddings", False) for each in (config, text_config(config)))
    differs = HEAD if is_tied and has_own_head(folder) else ""
    placeholders = {
        spec.name: torch.full((1,), float(spec.name == differs), dtype=dtype).expand(spec.shape) for spec in specs
    }
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
    """One tensor over the shared memory of all tensors fused by transformers into the parameter `name` (the experts of
    a layer); None unless the engine stores them contiguously in the same order."""
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
    """Disable transformers' progress bars: they would disturb the run's own view."""
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
    _check_config(read_config(str(folder), trust_remote_code), str(folder), packing)


def packing_obstacle(config: Any) -> str:
    """Why sequences cannot be packed into one row, as far as the configuration tells; empty if they can."""
    text, network = text_config(config), _network_class(config)
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}, in which packed sequences would see one another"
    if getattr(network, "_is_stateful", False):
        return "recurrent layers, in which packed sequences would see one another"
    if getattr(text, "attn_temperature_tuning", False):
        return "attention that depends on the place in the row (attn_temperature_tuning), which packed sequences share"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "attention with soft-capped scores, which packed attention does not do"
    if not getattr(network, "_supports_sdpa", True):
        return "attention with sinks or the like, which packed attention does not do"
    return ""


def unpacked_attention(config: Any) -> tuple[str, bool]:
    """(implementation, soft-capped): transformers' attention without packing. "sdpa" silently ignores soft-capping and
    sinks: models with these use "eager"."""
    if getattr(text_config(config), "attn_logit_softcapping", None) is not None:
        return "eager", True
    return "sdpa" if getattr(_network_class(config), "_supports_sdpa", True) else "eager", False


def _network_class(config: Any) -> Any:
    """Transformers' class of the configuration's first architecture; None without."""
    import transformers

    (name, *_) = [*(getattr(config, "architectures", None) or []), ""]
    return getattr(transformers, name, None)


def _check_config(config: Any, path: str, packing: bool) -> None:
    """Raise ConfigError if the configuration alone shows an untrainable model."""
    from transformers.models.auto import modeling_auto

    mapping: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if reads_images(config):
        mapping = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = {name for names in mapping.values() for name in _as_tuple(names)}
    architectures = list(getattr(config, "architectures", None) or [])
    custom = bool(getattr(config, "auto_map", None))
    if getattr(config, "is_encoder_decoder", False) or not (custom or known & set(architectures)):
        if any(name.endswith("ForCausalLM") for name in architectures):
            has = " or ".join(_as_tuple(mapping.get(config.model_type, ()))) or "none"
            raise ConfigError(
                f"the config.json of model.path {path!r} names {', '.join(architectures)} for the model_type "
                f"{config.model_type!r}, for which transformers has {has}: correct one of them, or install another "
                "version of transformers"
            )
        raise ConfigError(
            f"model.path {path!r} holds {', '.join(architectures) or 'no named architecture'}, "
            "not a causal language model: give one that generates text"
        )
    if getattr(config, "audio_config", None) is not None:
        raise ConfigError(f"model.path {path!r} hears audio: only models of text, or of images too, can be trained")
    if packing and (obstacle := packing_obstacle(config)):
        raise ConfigError(f"model.path {path!r} has {obstacle}: set training.packing = false")


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
