"""What vLLM's scheduler costs a decode step: microseconds of Python for each request, with our shortcuts and without.

    python benchmarks/scheduling.py [--sequences 256 1024] [--tokens 128]

The scheduler alone, as engines on GPUs have it (asynchronous, prefix cache on), without engine, model or GPU: every
step is answered at once with a token and a log-probability for each request. Each case is a process of its own. Prints
a Markdown table of CPU time. Every sixteenth step needs memory for all requests, so the figures are means over sixteen
steps in a row, each the fastest of those at its place in a block: others on the machine disturb them least.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from typing import Any

BLOCK = 16


def make_scheduler(num_sequences: int, length: int) -> Any:
    """vLLM's own."""
    import torch
    from transformers import Qwen2Config
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = Qwen2Config(max_position_embeddings=length)
    config.architectures = ["Qwen2ForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length)
    num_blocks = num_sequences * (length // BLOCK + 2)
    scheduling = SchedulerConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=16_384,
        max_model_len=length,
        async_scheduling=True,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    whole = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    options: dict[str, Any] = {
        "vllm_config": whole,
        "kv_cache_config": KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layers)]),
        "structured_output_manager": StructuredOutputManager(whole),
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "log_stats": False,
    }
    known = inspect.signature(Scheduler.__init__).parameters
    return AsyncScheduler(**{name: value for name, value in options.items() if name in known})


def add_requests(scheduler: Any, num_sequences: int, num_tokens: int) -> None:
    """Each with a prompt of its own, as a rollout asks for its tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(
        max_tokens=num_tokens, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for number in range(num_sequences):
        prompt = [(7 * number + place) % 1000 for place in range(32)]
        scheduler.add_request(Request(f"{number}", prompt, params, None, block_hasher=hasher))


def answer(scheduled: Any) -> Any:
    """What a model runner says of a step."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    ids = list(scheduled.num_scheduled_tokens)
    values = np.full((len(ids), 1), -1.0, np.float32)
    lists = LogprobsLists(np.full((len(ids), 1), 5, np.int32), values, np.zeros(len(ids), np.int32))
    return ModelRunnerOutput(ids, {id_: i for i, id_ in enumerate(ids)}, [[5] for _ in ids], lists, {})


def run_child(num_sequences: int, num_tokens: int, ours: bool) -> dict[str, Any]:
    """One case: microseconds of scheduling and of taking the results, a request."""
    import vllm

    if ours:
        from slipstream.inference.plugin.patches import decoding, delivery

        decoding.allocate_with_room()
        delivery.deliver_at_the_end()
        decoding.schedule_plainly()
    scheduler = make_scheduler(num_sequences, 64 + num_tokens)
    add_requests(scheduler, num_sequences, num_tokens)
    gc.collect()
    gc.freeze()
    ahead, times = deque([scheduler.schedule()]), []
    while ahead:
        output = ahead.popleft()
        result = answer(output)
        begun = time.thread_time()
        following = scheduler.schedule()
        between = time.thread_time()
        scheduler.update_from_output(output, result)
        ended = time.thread_time()
        if following.num_scheduled_tokens:
            ahead.append(following)
        if len(output.num_scheduled_tokens) == len(following.num_scheduled_tokens) == num_sequences:
            times.append((between - begun, ended - between))
    fastest = ([min(part[place::BLOCK]) for place in range(BLOCK)] for part in zip(*times, strict=True))
    scheduling, updating = (1e6 * statistics.fmean(part) / num_sequences for part in fastest)
    return {"schedule": scheduling, "update": updating, "vllm": vllm.__version__}


def main() -> int:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--child", choices=["vllm", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("\n" + json.dumps(run_child(options.sequences[0], options.tokens, options.child == "ours")))
        return 0
    print("| scheduler | sequences | schedule, us a request | take the results, us a request |\n|---|---|---|---|")
    for number in options.sequences:
        for system in ("vllm", "ours"):
            command = [sys.executable, __file__, "--child", system, "--sequences", str(number)]
            environment = dict(os.environ, VLLM_LOGGING_LEVEL="ERROR")
            done = subprocess.run(
                [*command, "--tokens", str(options.tokens)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                timeout=300,
                check=True,
            )
            found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"schedule"')))
            name = f"{system} ({found['vllm']})"
            print(f"| {name} | {number:,} | {found['schedule']:.1f} | {found['update']:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
