"""Attention and weight gradients alone on a GPU: which kernels a training step should take. Less than 40 s.

    python benchmarks/attention_kernels.py [--shapes 1.5b 7b] [--repeats 20] [--json FILE]

Attention of one row of `benchmarks/learner.py` (its segments, of 8,192 or 6,144 tokens), forward and backward, by
`flash2`: torch's variable-length FlashAttention 2; `flash4`: the package flash-attn-4, where it is installed; `cudnn`:
torch's variable-length cuDNN (up to torch 2.13 it makes a plan at every call: a time of tens of ms is that). `host_ms`:
of the CPU, for both passes. `off`: how far the worst of output and gradients is from float32, part of its norm.

Then every weight's gradient of a layer, added to what is accumulated in float32: by a product in bfloat16 and
a kernel that adds it (`product_and_sum`), or by a product that adds up in float32 itself (`in_one`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from learner import segment_lengths
from torch import Tensor

from slipstream.trainer.attention import flash4
from slipstream.trainer.attention.row_layout import Ragged
from slipstream.trainer.optim import triton_kernels

SHAPES = {"1.5b": (8192, 12, 2, 128, 1536, 8960), "7b": (6144, 28, 4, 128, 3584, 18944)}
"""Tokens of a row, heads, heads of keys, their size, hidden size, intermediate size."""
KERNELS = ("flash2", "flash4", "cudnn")
_AHEAD = 4_000_000
"""Cycles: about 2 ms."""
Pass = tuple[Callable[[], tuple[Tensor, Any]], Callable[[tuple[Tensor, Any]], tuple[Tensor, ...]]]


def milliseconds(compute: Callable[[], Any], repeats: int) -> float:
    """Median by the GPU's clock."""
    for _ in range(3):
        compute()
    times = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(_AHEAD)  # so that the launch is not counted
        events[0].record()
        compute()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


def passes(name: str, states: list[Tensor], grad: Tensor, layout: Ragged, scale: float) -> Pass:
    """Forward and backward of one implementation."""
    ends = (layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key)
    aten: Any = torch.ops.aten
    if name == "flash4":
        interface = flash4._tried(*states[:2])
        if interface is None:
            raise RuntimeError("flash-attn-4 is not installed, or its trial failed: see the log above")
        return (
            lambda: flash4.forward(interface, *states, layout, scale),
            lambda found: flash4.backward(interface, grad, *states, *found, layout, scale),
        )
    if name == "cudnn":

        def backward(found: Any) -> Any:
            output, (lse, seed, offset) = found
            rest = (output, lse, seed, offset, None, *ends, 0.0, True)
            return aten._cudnn_attention_backward(grad, *states, *rest, scale=scale)

        def forward() -> Any:
            found = aten._cudnn_attention_forward(*states, None, *ends, True, 0.0, True, False, scale=scale)
            return found[0], (found[1], found[6], found[7])

        return forward, backward
    window = {"scale": scale, "window_size_left": -1, "window_size_right": 0}
    state, unused = grad.new_empty(2, dtype=torch.uint64), grad.new_empty(0)
    return (
        lambda: aten._flash_attention_forward(*states, *ends, 0.0, True, return_debug_mask=False, **window)[:2],
        lambda found: aten._flash_attention_backward(grad, *states, *found, *ends, 0.0, True, state, unused, **window),
    )


def attention(shape: str, name: str, repeats: int) -> dict[str, Any]:
    """Times of one implementation, and how far from float32 it is."""
    tokens, heads, kv_heads, head_dim, *_ = SHAPES[shape]
    lengths = tuple(segment_lengths(tokens))
    tokens, scale = sum(lengths), head_dim**-0.5
    torch.manual_seed(0)
    # Heads first in memory, as rotary embeddings leave them.
    states = [
        torch.randn(number, tokens, head_dim, device="cuda").bfloat16().transpose(0, 1)
        for number in (heads, kv_heads, kv_heads)
    ]
    grad = torch.randn(tokens, heads, head_dim, device="cuda").bfloat16()
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    layout = Ragged(None, ends, ends, max(lengths), max(lengths))
    begun = time.monotonic()
    forward, backward = passes(name, states, grad, layout, scale)
    found = forward()
    gradients = backward(found)
    torch.cuda.synchronize()
    first = time.monotonic() - begun
    wanted = flash4.reference(*(each.float() for each in (grad, *states)), lengths, lengths, scale)
    pairs = zip((found[0], *gradients), (wanted[0], *wanted[2:]), strict=True)
    off = max(float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    del wanted
    begun = time.monotonic()
    for _ in range(3):
        backward(forward())
    launched = (time.monotonic() - begun) / 3
    torch.cuda.synchronize()
    few = 3 if name == "cudnn" else repeats
    ahead, back = milliseconds(forward, few), milliseconds(lambda: backward(found), few)
    flops = 2.0 * heads * head_dim * sum(length**2 for length in lengths)  # a forward pass, causal
    return {
        "shape": shape,
        "kernels": name,
        "forward_ms": ahead,
        "backward_ms": back,
        "forward_tflops": flops / ahead / 1e9,
        "backward_tflops": 2.5 * flops / back / 1e9,
        "off": off,
        "host_ms": 1000 * launched,
        "first_s": first,
    }


def weight_gradient(shape: str, outputs: int, inputs: int, repeats: int) -> dict[str, Any]:
    """Both ways to accumulate one weight's gradient."""
    tokens = SHAPES[shape][0]
    torch.manual_seed(0)
    grad = torch.randn(tokens, outputs, device="cuda").bfloat16()
    states = torch.randn(tokens, inputs, device="cuda").bfloat16()
    total = torch.randn(outputs, inputs, device="cuda")
    aten: Any = torch.ops.aten

    def in_one(into: Tensor) -> None:
        aten.addmm.dtype_out(into, grad.t(), states, torch.float32, out=into)

    twice, once = total.clone(), total.clone()
    triton_kernels.accumulate_(twice, grad.t() @ states)
    in_one(once)
    wanted = total + grad.t().float() @ states.float()
    off = [float((each - wanted).norm() / wanted.norm()) for each in (twice, once)]
    return {
        "shape": shape,
        "weight": f"{outputs} x {inputs}",
        "product_ms": milliseconds(lambda: grad.t() @ states, repeats),
        "product_and_sum_ms": milliseconds(lambda: triton_kernels.accumulate_(twice, grad.t() @ states), repeats),
        "in_one_ms": milliseconds(lambda: in_one(once), repeats),
        "off": off,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        texts = (
            f"{value:.4g}" if isinstance(value, float) else " and ".join(f"{each:.2g}" for each in value)
            if isinstance(value, list) else str(value)
            for value in row.values()
        )  # fmt: skip
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["7b", "1.5b"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    by_attention, by_weight, failures = [], [], []
    for shape in options.shapes:
        for name in options.kernels:
            try:
                by_attention.append(attention(shape, name, options.repeats))
            except Exception as error:  # noqa: BLE001 - what one cannot do, another may
                failures.append(f"{shape} {name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    for shape in options.shapes:
        kv_heads, head_dim, hidden, wide = SHAPES[shape][2:]
        sizes = [(hidden, hidden), (kv_heads * head_dim, hidden), (wide, hidden), (hidden, wide)]
        for outputs, inputs in sizes:
            try:
                by_weight.append(weight_gradient(shape, outputs, inputs, options.repeats))
            except Exception as error:  # noqa: BLE001
                failures.append(f"{shape} {outputs} x {inputs}: {type(error).__name__}: {str(error)[:400]}")
    for rows in filter(None, (by_attention, by_weight)):
        print(table(rows), end="\n\n")
    print("\n".join(failures))
    if options.json:
        options.json.write_text(json.dumps({"attention": by_attention, "weights": by_weight, "failures": failures}))
    return 0 if by_attention and by_weight else 1


if __name__ == "__main__":
    sys.exit(main())
