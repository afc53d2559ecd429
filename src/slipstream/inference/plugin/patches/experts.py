"""Patches vLLM on a CPU to return which experts each token went to (`model.replay_experts`).

vLLM's own option (`enable_return_routed_experts`) needs its second model runner, which its CPU workers do not use by
default. Here each step's choices are kept by the slots of the KV cache: what a request took from the prefix cache, or
computed again after a preemption or an update, comes with the choices that its keys and values were made with. A
finished request has one row for each token that was computed, all but the last one, in `routed_experts` of its output,
as vLLM's own option has it.

Changed: `_model_forward` of the loaded model's runner; `Scheduler.update_from_output`, `Scheduler._free_request`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.inference.plugin.patches.patch_table import Absent, changeable

_MOST_IN_A_BYTE = 256


def return_choices(runner: Any) -> None:
    """Capture the choices of the model of vLLM's `runner`, and return them with finished requests."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput

    try:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
    except ImportError:
        raise Absent("bind_routed_experts_capturer") from None
    changeable(runner, "_model_forward", "kv_cache_config")
    scheduler = changeable(Scheduler, "_free_request", "update_from_output")
    if "routed_experts" not in EngineCoreOutput.__struct_fields__:
        raise Absent("EngineCoreOutput.routed_experts")
    if runner.parallel_config.distributed_executor_backend != "uni":
        raise Absent("scheduler in its worker's process")
    if len(runner.kv_cache_config.kv_cache_groups) != 1:
        raise Absent("single table of the KV cache's blocks for layers of several kinds")
    capturer = Capturer(runner)
    try:
        bind: Any = bind_routed_experts_capturer
        bind(runner.model, capturer)
    except ValueError as error:
        raise Absent(f"way to see what this model's routers choose ({error})") from error
    _record(runner, capturer)
    _return(scheduler, capturer)


class Capturer:
    """The experts of one step's tokens, and of every slot of the KV cache. vLLM's routers call `capture`."""

    def __init__(self, runner: Any) -> None:
        model, config = runner.vllm_config.model_config, runner.kv_cache_config
        shape = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self.block_size: int = config.kv_cache_groups[0].kv_cache_spec.block_size
        kind = np.uint8 if model.get_num_experts() <= _MOST_IN_A_BYTE else np.uint16
        self._slots = np.zeros((config.num_blocks * self.block_size, *shape), kind)
        most: int = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self._step = torch.zeros((most, *shape), dtype=torch.int32)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Take one layer's choices, `[tokens, experts per token]`."""
        self._step[: len(topk_ids), layer_id] = topk_ids

    def keep(self, slots: torch.Tensor) -> None:
        """Keep the step's choices by the KV slot of each token; negative ones are padding."""
        where = slots.numpy()
        is_real = where >= 0
        self._slots[where[is_real]] = self._step[: len(where)].numpy()[is_real]

    def of_blocks(self, blocks: list[int], num_tokens: int) -> np.ndarray:
        """The choices of the first `num_tokens` tokens in these blocks of the KV cache, `[tokens, layers, k]`."""
        first = np.array(blocks, np.int64)[:, None] * self.block_size
        return self._slots[(first + np.arange(self.block_size)).reshape(-1)[:num_tokens]]


def _record(runner: Any, capturer: Capturer) -> None:
    forward = runner._model_forward

    def model_forward(input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        output = forward(input_ids, positions, *args, **kwargs)
        num_tokens = len(input_ids if input_ids is not None else kwargs["inputs_embeds"])
        capturer.keep(runner.input_batch.block_table[0].slot_mapping.gpu[:num_tokens])
        return output

    runner._model_forward = model_forward


def _return(scheduler: Any, capturer: Capturer) -> None:
    update, free = scheduler.update_from_output, scheduler._free_request

    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found: dict[str, np.ndarray] | None = getattr(self, "_slipstream_experts", None)
        if found is not None:
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            found[request.request_id] = capturer.of_blocks(blocks, request.num_tokens - 1)
        return free(self, request, *args, **kwargs)

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._slipstream_experts = found = dict[str, np.ndarray]()
        try:
            answers = update(self, *args, **kwargs)
        finally:
            self._slipstream_experts = None
        for answer in answers.values() if found else ():
            for output in answer.outputs:
                if output.finish_reason is not None and output.request_id in found:
                    output.routed_experts = found[output.request_id]
        return answers

    scheduler._free_request = free_request
    scheduler.update_from_output = update_from_output
