"""Converts engine settings and requests to vLLM's engine arguments, prompts and `SamplingParams`."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any, get_args

from slipstream.inference.settings import EngineSettings
from slipstream.records import GenerateRequest

_CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batch sizes, in tokens, of captured CUDA graphs; a step of another size is padded to the next. vLLM's own
list has 51 sizes up to 512, and each takes a tenth of a second at every start."""
_CAPTURE_STEP = 64
"""Distance of the sizes above 512; vLLM captures none there."""
_SAME_NAMES = (
    *("model", "dtype", "max_model_len", "max_num_seqs", "seed", "enforce_eager", "gpu_memory_utilization"),
    *("trust_remote_code", "tensor_parallel_size"),
)
"""Settings of the engine passed to vLLM as they are."""
_FP32_HEAD = {"head_dtype": "float32"}
"""The override of vLLM 0.26 to 0.32; `WorkerExtension.slipstream_describe` checks it in the loaded model."""
_SHARED: dict[str, Any] = {
    "attention_backend": "FLASH_ATTN",
    # CUDA graphs of the operations as they are, without a compiler to fuse them.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "custom_ops": ["all"]},
    "disable_cascade_attn": True,
}


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """vLLM's engine arguments for these settings; `settings.options` overrides them."""
    lora: dict[str, Any] = {}
    if settings.lora_rank is not None:
        from vllm.config.lora import MaxLoRARanks

        lora = {
            "enable_lora": True,
            # The current version, and the one before, for running requests.
            "max_loras": 2,
            "max_lora_rank": min(size for size in get_args(MaxLoRARanks) if size >= settings.lora_rank),
            **_adapted(settings),
        }
    return {
        "scheduling_policy": "priority",  # urgent requests first; others, as without it, in order of arrival
        **{name: getattr(settings, name) for name in _SAME_NAMES},
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        **({"enable_sleep_mode": True} if settings.can_sleep else {}),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": "slipstream.inference.plugin.weights.receiver.WorkerExtension",
        **lora,
        **(_SHARED if settings.shared_kernels else {}),
        **({"reasoning_parser": settings.reasoning_parser} if settings.reasoning_parser else {}),
        **(_routed_experts() if settings.replay_experts else {}),
        **_capture_sizes(settings),
        **_block_size(),
        **_one_cache(settings),
        **_pixels(Path(settings.model)),
        **settings.options,
        **_model_overrides(settings),
        **_compile_key(settings),
    }


def _model_overrides(settings: EngineSettings) -> dict[str, Any]:
    """`hf_overrides`: ours and `settings.options`'s."""
    asked = settings.options.get("hf_overrides", {})
    overrides = {**_position_scaling(Path(settings.model)), **asked, **(_FP32_HEAD if settings.fp32_head else {})}
    return {"hf_overrides": overrides} if overrides else {}


def _compile_key(settings: EngineSettings) -> dict[str, Any]:
    """`additional_config`: changes vLLM's compile cache cannot see in its own source, and `settings.options`'s."""
    asked = settings.options.get("additional_config", {})
    return {"additional_config": {**asked, "slipstream_fp32_residual": True}} if settings.fp32_residual else {}


def _position_scaling(folder: Path) -> dict[str, Any]:
    """Llama 4's scaling of queries by position (Ministral 3), moved from `rope_parameters`, its place in transformers,
    to its place in vLLM; otherwise vLLM computes these models without it."""
    whole = _config_of(folder)
    part = whole.get("text_config", whole)
    rotary = part.get("rope_parameters") or {}
    if "llama_4_scaling_beta" not in rotary or "llama_4_scaling" in part:
        return {}
    length = rotary.get("original_max_position_embeddings")
    found = {"llama_4_scaling": {"original_max_position_embeddings": length, "beta": rotary["llama_4_scaling_beta"]}}
    return found if part is whole else {"text_config": found}


def _adapted(settings: EngineSettings) -> dict[str, Any]:
    """The layers with room for an adapter. Raises RuntimeError if vLLM has none for vision towers."""
    adapted = {"lora_target_modules": list(settings.lora_target_modules)}
    if not settings.lora_tower:
        return adapted
    name = "enable_tower_connector_lora"
    if not _has_argument(name):
        raise RuntimeError(
            f"an adapter of a vision tower needs vLLM's {name}, which this one lacks: set model.train_tower = false, "
            'or weights.bridge = "disk", which merges adapters'
        )
    return {**adapted, name: True}


def _routed_experts() -> dict[str, Any]:
    """vLLM's own option, for its GPU workers: each token comes with the choices of its sampling, even if
    an update had it computed again. On a CPU a patch does it (`patches/experts.py`). Raises RuntimeError if vLLM
    lacks the option."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {}
    name = "enable_return_routed_experts"
    if not _has_argument(name):
        raise RuntimeError(f"model.replay_experts = true needs vLLM's {name}, which this one lacks: set it to false")
    return {name: True}


def _has_argument(name: str) -> bool:
    from vllm.engine.arg_utils import EngineArgs

    return name in {each.name for each in dataclasses.fields(EngineArgs)}


def _block_size() -> dict[str, Any]:
    """On a CPU the smallest block of the KV cache for its attention. Requests share whole blocks only: with
    the 128 tokens of vLLM's default there, each request of a group would prefill a shorter prompt."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = getattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", list)()
    sizes: list[int] = [getattr(size, "base", size) for size in supported]
    return {"block_size": min(sizes)} if sizes else {}


def _one_cache(settings: EngineSettings) -> dict[str, Any]:
    """One kind of KV cache for layers with and without a sliding window, if no context is longer than the window. Two
    kinds save no memory then, and the scheduler has a fast path for one (`patches/decoding.py`). In longer contexts
    vLLM 0.26 applies the window of a joint cache to all layers."""
    whole = _config_of(Path(settings.model))
    part = whole.get("text_config", whole)
    kinds = set(part.get("layer_types") or ())
    is_mixed = kinds == {"full_attention", "sliding_attention"} or (not kinds and "sliding_window_pattern" in part)
    is_within = settings.max_model_len <= (part.get("sliding_window") or 0)
    return {"disable_hybrid_kv_cache_manager": True} if is_mixed and is_within else {}


def _config_of(folder: Path) -> dict[str, Any]:
    """The model's config.json; empty for the name of a model."""
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _pixels(folder: Path) -> dict[str, Any]:
    """Have the image processor normalize pixels, as in the trainer. vLLM 0.32 otherwise leaves this to the tower, with
    the numbers in the processor's file. The class's defaults are missing there, and pixels then stay as they are."""
    name = "mm_device_do_normalize"
    return {name: False} if "vision_config" in _config_of(folder) and _has_argument(name) else {}


def _capture_sizes(settings: EngineSettings) -> dict[str, Any]:
    """CUDA graphs for up to twice `max_num_seqs` tokens, as steps hold prefills too; above 512 for `max_num_seqs`."""
    largest = settings.max_num_seqs
    own = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    if settings.enforce_eager or own & settings.options.keys():
        return {}
    if largest > _CAPTURED[-1]:
        sizes = [*_CAPTURED, *range(_CAPTURED[-1] + _CAPTURE_STEP, largest, _CAPTURE_STEP), largest]
    else:
        sizes = sorted({size for size in _CAPTURED if size <= 2 * largest} | {largest})
    if settings.shared_kernels:
        # Graphs are of attention too. vLLM captures graphs of more tokens than `max_num_seqs` with one long request;
        # its tokens beyond `max_model_len` have no place in its table of blocks.
        sizes = [size for size in sizes if size <= largest or sum(divmod(size, largest)) <= settings.max_model_len]
    return {"cudagraph_capture_sizes": sizes}


def checked_head(head_dtypes: list[list[str]]) -> str:
    """The name of a float32 LM head in an engine's report. Raises RuntimeError unless the logits of every worker
    have this dtype; `head_dtypes`: the dtypes found in each."""
    if any(found != ["float32"] for found in head_dtypes):
        found = ", ".join(sorted({name for each in head_dtypes for name in each})) or "unknown"
        raise RuntimeError(
            f"model.fp32_head = true asks for logits in float32, and vLLM computes those of this model in {found}: set "
            "it to false"
        )
    return "fp32_head"


def prompt_arguments(request: GenerateRequest) -> dict[str, Any]:
    """vLLM's prompt for a request. Raises ValueError when an image cannot be read."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
    if request.images:
        from PIL import Image

        from slipstream.data.images.reading import FORMATS

        try:
            images = [Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB") for data in request.images]
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"an image cannot be read ({error}): send it as PNG or JPEG") from error
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def sampling_arguments(request: GenerateRequest) -> Any:
    """vLLM's `SamplingParams` for a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    s = request.sampling
    # Nobody else has these, and a copy of them costs a tenth of a millisecond.
    own: dict[str, Any] = {"skip_clone": True} if "skip_clone" in SamplingParams.__struct_fields__ else {}
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=request.seed,
        stop=list(s.stop) or None,
        stop_token_ids=list(s.stop_token_ids) or None,
        logprobs=0,
        flat_logprobs=not request.scores_prompt,  # prompt log-probabilities would be flat too
        prompt_logprobs=request.num_likeliest if request.scores_prompt else None,
        detokenize=bool(s.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **own,
    )
