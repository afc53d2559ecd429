"""Training steps alone: tokens a second, part of the card's peak, memory at the peak, and where the time goes.

    python benchmarks/learner.py [--shapes 1.5b 7b] [--systems plain compiled again titan ...] [--data packed|grpo]
                                 [--tokens 8192] [--rows 8] [--steps 5] [--profile] [--json FILE] [--device cuda|cpu]
                                 [--attention any|torch] [--weight-gradients any|in-place|apart]

A Qwen2 of the named shape with random weights in bfloat16, full fine-tuning. Data `packed`: in every row of `--tokens`
tokens segments of a quarter to a thirty-second of it, every token trained on. `grpo`: 32 prompts of 128 tokens with 8
completions of 512, the policy-gradient objective, rows of at most `--tokens` in which a prompt stands once. Each system
runs in a process of its own:

- `plain`, `selective`, `again`: this project's learner; layers keep everything, what is dear, or their input.
- `compiled`, `compiled-again`: the same with `training.compile`. `moved`: `again` with inputs in the CPU's memory.
  `--attention torch`: torch's FlashAttention 2 also where a newer one is installed. `--weight-gradients apart`: also in
  compiled layers the products of linear layers do not add up the gradients of their weights; `in-place`: they do, also
  where a run would not have them do it. `weight_gradients_in_place` is the number of matrices for which they do.
- `titan`: a baseline in torchtitan's manner on transformers' own network: each layer compiled for one row length,
  selective checkpointing by operation (every second matrix multiplication is computed again), compiled cross-entropy on
  float32 logits, torch's variable-length attention, gradients, weights and fused AdamW all in bfloat16. `titan-all` is
  the same without checkpointing. Both take rows of one length only, so that they have the data `packed` alone.

This project's learner has fp32 gradients and moments, and fp32 masters, or at 7b (`adamw_bf16`) none, which would not
fit. On a CPU, for smoke tests, all is in float32 and the vocabulary is small.
Part of the peak: (6 N D + 6 L**2 heads head_dim layers, summed over segments of L tokens) / seconds / peak; N are the
parameters that tokens are multiplied with; computing something again does not count. Two steps are left out first.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEAK_FLOPS = 989e12
"""Of an H100 or H200 in bfloat16, without sparsity."""
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"checkpointing": "selective"},
    "again": {"checkpointing": True},
    "moved": {"checkpointing": True, "offload": True},
    "compiled": {"compiled": True},
    "compiled-again": {"compiled": True, "checkpointing": True},
}
TITAN = {"titan": True, "titan-all": False}
GROUPED: dict[str, Any] = {}
"""For `varlen_attn`: torch 2.11 takes grouped heads as they come; later versions want to be told."""
PARTS = (8, 6, 5, 4, 3, 2, 2, 1, 1)
"""A row's segments, in thirty-seconds of it."""
SMALL_VOCABULARY = 1000
WARM_UP = 2
KINDS = (
    ("attention", r"flash|fmha|attn|cudnn"),
    ("matrix multiplications", r"gemm|nvjet|cutlass|cublas|sm90_xmma|ampere_|\bmm\b|addmm"),
    ("log-probabilities", r"_forward_kernel|_backward_kernel|softmax|logsumexp"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("between ranks", r"nccl"),
    ("copies between devices", r"memcpy|memset"),
    ("compiled, fused", r"triton_|^cpp_fused"),
)


def segment_lengths(tokens: int) -> list[int]:
    """The segments of one row."""
    return [tokens * part // sum(PARTS) for part in PARTS]


def flops(config: Any, parameters: int, segments: list[int]) -> float:
    """Of a training step on `segments`: what is needed, not what is done."""
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    attention = 6.0 * config.num_hidden_layers * config.hidden_size * sum(length**2 for length in segments)
    return 6.0 * parameters * sum(segments) + attention


def make_network(shape: str, device: str, implementation: str) -> Any:
    """Random weights, made where they are used."""
    import torch
    from shapes import shape_config
    from transformers import Qwen2ForCausalLM

    make: Any = Qwen2ForCausalLM
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    config = shape_config(shape) if on_gpu else shape_config(shape, vocab_size=SMALL_VOCABULARY)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device(device):
        return make._from_config(config, attn_implementation=implementation, dtype=dtype).eval()


def our_steps(options: argparse.Namespace) -> tuple[Callable[[], dict[str, float]], dict[str, Any]]:
    """A step of this project's learner, and what there is to say of it."""
    from slipstream.trainer.attention import flash4, packed
    from slipstream.trainer.learner import Learner
    from slipstream.trainer.model import fused_weight_gradients
    from slipstream.trainer.model.compilation import compile_layers
    from slipstream.trainer.model.layers import LayerOptions, configure_layers
    from slipstream.trainer.model.policy import PolicyModel, check_isolation
    from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW
    from slipstream.trainer.optim.base import MasterAdamW

    if options.attention != "any":
        flash4.find = lambda query, key, window: None
    network = make_network(options.shape, options.device, packed.register())
    model = PolicyModel(network, Path())
    how = dict(OURS[options.child])
    compiled = how.pop("compiled", False)
    model.layers = LayerOptions(**how)
    configure_layers(network, model.layers)
    check_isolation(model)
    begun = time.monotonic()
    in_products = {"any": None, "in-place": True, "apart": False}[options.weight_gradients]
    problem = compile_layers(model, in_products=in_products) if compiled else ""
    facts: dict[str, Any] = {
        "compile_s": time.monotonic() - begun if compiled else 0.0,
        "problem": problem,
        "weight_gradients_in_place": len(fused_weight_gradients.fused_layers(network)),
    }
    optimizer = (
        RoundedAdamW(network.named_parameters(), seed=0)
        if options.shape == "7b"
        else MasterAdamW(network.named_parameters())
    )
    learner = Learner(model, optimizer, micro_batch_tokens=options.tokens)
    batch, objective, segments = make_batch(options)

    def step() -> dict[str, float]:
        metrics = learner.forward_backward(batch, objective)
        learner.optim_prepare(1e-6)
        learner.optim_commit()
        return metrics

    planned = planned_bytes(network, options, compiled=compiled, **how)
    return step, facts | {"segments": segments, "planned_gib": planned / (1 << 30), "config": network.config}


def make_batch(options: argparse.Namespace) -> tuple[Any, Any, list[int]]:
    """The sequences of a step, what is minimised, and the lengths of what is computed."""
    import random

    from slipstream import records
    from slipstream.config import RLConfig
    from slipstream.config.recipes import resolved
    from slipstream.trainer.loss import PolicyObjective, SFTObjective
    from slipstream.trainer.packing import StepBatch

    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(3, SMALL_VOCABULARY if options.device == "cpu" else 150_000) for _ in range(number)]

    if options.data == "packed":
        segments = segment_lengths(options.tokens) * options.rows
        sequences = [records.Sequence(tokens(n + 1), [place > 0 for place in range(n + 1)]) for n in segments]
        return StepBatch(sequences), SFTObjective(), segments
    prompt, completion = options.prompt, options.completion
    sequences = []
    for _ in range(options.prompts):
        shared = tokens(prompt)
        for _ in range(8):
            ids = shared + tokens(completion)
            logprobs = [0.0] * prompt + [-11.9] * completion
            sequences.append(records.Sequence(ids, [place >= prompt for place in range(len(ids))], logprobs))
    advantages = [draw.gauss(0, 1) for _ in sequences]
    sampling = records.SamplingParams(max_tokens=completion)
    # As if every completion had its own prompt: what attention computes of a shared one is the same.
    return (
        StepBatch(sequences, advantages),
        PolicyObjective(resolved(RLConfig()), sampling),
        [prompt + completion - 1] * len(sequences),
    )


def planned_bytes(network: Any, options: argparse.Namespace, **how: Any) -> int:
    """What the plan says of the trainer, contexts and workspaces left out."""
    from slipstream.plan.facts import ModelFacts
    from slipstream.plan.memory.sizes import activation_bytes_per_token, training_state_bytes

    config = network.config
    model = ModelFacts(
        num_parameters=network.num_parameters(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype="bfloat16",
        tied_embeddings=config.tie_word_embeddings,
    )
    optimizer = "adamw_bf16" if options.shape == "7b" else "adamw"
    on_gpu = options.device == "cuda"
    state = training_state_bytes(model, "bfloat16", with_reference=False, optimizer=optimizer, on_gpu=on_gpu)
    return state + options.tokens * activation_bytes_per_token(model, "bfloat16", **how)


def titan_steps(options: argparse.Namespace) -> tuple[Callable[[], dict[str, float]], dict[str, Any]]:
    """A step of the baseline; see the module."""
    import torch
    from torch.nn.attention.varlen import varlen_attn
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        GROUPED["enable_gqa"] = True
    ALL_ATTENTION_FUNCTIONS.register("titan", titan_attention)
    network = make_network(options.shape, options.device, "titan")
    dear = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.torch_attn._varlen_attn.default}
    multiplications = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def contexts() -> Any:
        count = 0

        def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            nonlocal count
            count += operation in multiplications
            kept = operation in dear and not (operation in multiplications and count % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def again(forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not TITAN[options.child]:
                return forward(*args, **kwargs)
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
            )

        return call

    for layer in network.model.layers:
        layer.forward = torch.compile(again(layer.forward), backend=options.backend)

    def cross_entropy(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    loss_of = torch.compile(cross_entropy, backend=options.backend)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    lengths = segment_lengths(options.tokens)
    ends = torch.tensor([0, *lengths], device=options.device).cumsum(0).int()
    places = torch.cat([torch.arange(length) for length in lengths])[None].to(options.device)
    ids = torch.randint(3, network.config.vocab_size, (options.rows, 2, options.tokens), device=options.device)

    def step() -> dict[str, float]:
        for row in ids:
            hidden = network.model(
                input_ids=row[:1], position_ids=places, use_cache=False, row_ends=ends, longest=max(lengths)
            ).last_hidden_state
            (loss_of(network.lm_head(hidden).squeeze(0), row[1]) / len(ids)).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm": norm.item(), "num_row_tokens": float(ids.shape[0] * options.tokens)}

    return step, {"segments": lengths * options.rows, "config": network.config, "compile_s": 0.0, "problem": ""}


def titan_attention(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, *, row_ends: Any, longest: int, **_kwargs: Any
) -> Any:
    """Torch's variable-length attention; on a CPU, for the smoke test, causal over the whole row."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    scale = module.head_dim**-0.5
    if not query.is_cuda:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.transpose(1, 2), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    output: Any = varlen_attn(
        q, k, v, row_ends, row_ends, longest, longest, scale=scale, window_size=(-1, 0), **GROUPED
    )
    return output[None], None


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One system on one shape."""
    import torch

    on_gpu = options.device == "cuda"
    begun = time.monotonic()
    step, facts = (titan_steps if options.child in TITAN else our_steps)(options)
    config, segments = facts.pop("config"), facts.pop("segments")
    made = time.monotonic() - begun

    def timed() -> tuple[float, dict[str, float]]:
        if on_gpu:
            torch.cuda.synchronize()
        start = time.monotonic()
        metrics = step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.monotonic() - start, metrics

    first = [timed()[0] for _ in range(WARM_UP)]
    times, metrics = [], {}
    for _ in range(options.steps):
        seconds, metrics = timed()
        times.append(seconds)
    useful = flops(config, num_parameters(config), segments)
    middle = statistics.median(times)
    result: dict[str, Any] = {
        "shape": options.shape,
        "system": options.child,
        "data": options.data,
        "start_s": made,
        "first_steps_s": first,
        "seconds": times,
        "tokens": sum(segments),
        "row_tokens": metrics["num_row_tokens"],
        "tokens_per_s": sum(segments) / middle,
        "peak_part": useful / middle / PEAK_FLOPS,
        "metrics": metrics,
        **facts,
        "newer_attention": newer_attention(),
    }
    if on_gpu:
        gib = 1 << 30
        result |= {
            "peak_gib": torch.cuda.max_memory_allocated() / gib,
            "held_gib": torch.cuda.max_memory_reserved() / gib,
            "gpu": torch.cuda.get_device_name(),
        }
    if options.profile:
        result["profile"], result["operations"] = profile_of(step, on_gpu)
    return result


def newer_attention() -> bool:
    """Whether this project's attention took newer kernels than torch's."""
    from slipstream.trainer.attention import flash4

    return any(interface is not None for interface in flash4._found.values())


def num_parameters(config: Any) -> int:
    """Of a model of that configuration, each once."""
    import torch
    from transformers import Qwen2ForCausalLM

    make: Any = Qwen2ForCausalLM
    with torch.device("meta"):
        return make._from_config(config).num_parameters()


def profile_of(step: Callable[[], Any], on_gpu: bool) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Milliseconds of one step by kind of kernel, idle time included, and the longest operations."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        begun = time.monotonic()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        whole = 1000 * (time.monotonic() - begun)
    found: dict[str, float] = {}
    longest: list[tuple[str, float, int]] = []
    for event in profiler.key_averages():
        is_kernel = str(event.device_type).endswith("CUDA")
        # What an optimizer, FSDP2 or a collective calls its step: the kernels of it are told too.
        if on_gpu != is_kernel or re.match(r"\w+\.\w+#|FSDP::|nccl:", event.key):
            continue
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
        kind = next((name for name, text in KINDS if re.search(text, event.key.lower())), "other")
        found[kind] = found.get(kind, 0.0) + spent
        longest.append((event.key, spent, event.count))
    longest.sort(key=lambda row: -row[1])
    found["nothing runs" if on_gpu else "beside operations"] = whole - sum(found.values())
    return found, longest[:25]


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| shape | system | s a step | tokens/s | part of the peak, % | peak GiB | held GiB | planned GiB | start, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if "seconds" not in r:
            lines.append(f"| {r['shape']} | {r['system']} | failed: {r['error']} |")
            continue
        middle, low, high = statistics.median(r["seconds"]), min(r["seconds"]), max(r["seconds"])
        memory = " | ".join(f"{r[name]:.1f}" if name in r else "" for name in ("peak_gib", "held_gib", "planned_gib"))
        lines.append(
            f"| {r['shape']} | {r['system']}{' (not compiled)' if r['problem'] else ''} | {middle:.3f} ({low:.3f} to "
            f"{high:.3f}) | {r['tokens_per_s']:,.0f} | {100 * r['peak_part']:.1f} | {memory} | "
            f"{r['start_s'] + sum(r['first_steps_s']):.0f} |"
        )
    for r in results:
        if "profile" in r:
            lines += profile_table(f"{r['shape']} {r['system']}", r["profile"], r["operations"])
    return "\n".join(lines)


def profile_table(name: str, kinds: dict[str, float], operations: list[tuple[str, float, int]]) -> list[str]:
    """What `profile_of` found, in Markdown."""
    whole = sum(kinds.values())
    lines = ["", f"{name}, one step of {whole:,.0f} ms:", "", "| kind | ms | % |", "|---|---|---|"]
    for kind, spent in sorted(kinds.items(), key=lambda row: -row[1]):
        lines.append(f"| {kind} | {spent:,.1f} | {100 * spent / whole:.1f} |")
    return [*lines, "", *(f"    {spent:10.2f} ms {count:6d} x {what[:110]}" for what, spent, count in operations)]


def main() -> int:
    """Measure all systems on all shapes and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "7b"])
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--systems", nargs="+", choices=[*OURS, *TITAN], default=["plain", "compiled", "titan"])
    parser.add_argument("--data", choices=["packed", "grpo"], default="packed")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row; a multiple of 32")
    parser.add_argument("--rows", type=int, default=8, help="in a step, of the data `packed`")
    parser.add_argument("--prompts", type=int, default=32, help="of the data `grpo`")
    parser.add_argument("--prompt", type=int, default=128, help="its tokens")
    parser.add_argument("--completion", type=int, default=512, help="its tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", default="inductor", help="the compiler's; aot_eager for smoke tests")
    parser.add_argument(
        "--attention", choices=["any", "torch"], default="any", help="kernels of this project's learner"
    )
    parser.add_argument(
        "--weight-gradients",
        choices=["any", "in-place", "apart"],
        default="any",
        help="of compiled layers; any: what a run would take",
    )
    parser.add_argument("--profile", action="store_true", help="one more step, told by kind of kernel")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a system")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*OURS, *TITAN], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        from slipstream.trainer.model import layers

        layers.COMPILER = options.backend
        print("\n" + json.dumps(run_child(options)))
        return 0
    if options.data == "grpo" and any(system in TITAN for system in options.systems):
        parser.error("the baselines take the data `packed` only")
    results: list[dict[str, Any]] = []
    for shape in options.shapes:
        for system in options.systems:
            results.append(measure(shape, system, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results))
    print(table(results))
    return int(any("error" in r for r in results))


def measure(shape: str, system: str, options: argparse.Namespace) -> dict[str, Any]:
    """A process of its own for one system; what it said."""
    command = [sys.executable, __file__, "--child", system, "--shape", shape, "--data", options.data]
    for name in ("tokens", "rows", "prompts", "prompt", "completion", "steps", "device", "backend", "attention"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--weight-gradients", options.weight_gradients]
    command += ["--profile"] * options.profile
    failed = {"shape": shape, "system": system}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return failed | {"error": f"not done after {options.timeout:.0f} s"}
    if done.returncode:
        return failed | {"error": " ".join(done.stderr.strip().splitlines()[-1:])[:300], "stderr": done.stderr[-3000:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
