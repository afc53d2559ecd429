"""Where a bfloat16 engine and a bfloat16 trainer part: the same tokens through vLLM, transformers and float32.

    python benchmarks/mismatch.py generate MODEL a.json [--mode head32|wide32] [--num 256] [--length 128]
    python benchmarks/mismatch.py compare MODEL a.json
    python benchmarks/mismatch.py roundings MODEL a.json

`generate` samples with vLLM as it is shipped and keeps tokens and log-probabilities, of generation and of a prefill of
the same tokens. `head32`: its logits in float32. `wide32`: also the residual stream, between the blocks, in float32.
`compare` computes the same tokens with transformers, as it is and with the same changes, and in float32. `roundings`
computes in float32 with one place after another rounded to bfloat16, and with all of them but one.

Prints Markdown tables: mean absolute difference of a token's log-probability in nats, root of the mean square, KL
(k3: mean of exp(d) - 1 - d), and the fraction of tokens whose probabilities' ratio is outside of 0.95 to 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

PROMPTS = (
    "The history of the city began when", "In mathematics, a function is", "She opened the door and",
    "The recipe needs two eggs and", "Scientists have found that", "The law says that every", "During the war, the",
    "My favourite book is about",
)  # fmt: skip
COLUMNS = "| {} | mean | rms | KL | outside |\n|---|---|---|---|---|"
PLACES = (
    "embedding", "norm", "final norm", "qkv", "rotary", "probabilities", "attention", "o_proj", "residual", "gate_up",
    "activation", "product", "down_proj", "logits",
)  # fmt: skip
BEFORE_PRODUCTS = ("norm", "final norm", "rotary", "probabilities", "attention", "product")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_AT_ONCE = 16


def figures(ours: Tensor, theirs: Tensor) -> str:
    """Columns of a row."""
    d = (ours - theirs).double()
    outside = ((d.exp() - 1).abs() > 0.05).double().mean()
    return f"{d.abs().mean():.5f} | {d.pow(2).mean().sqrt():.5f} | {(d.exp() - 1 - d).mean():.1e} | {outside:.4f}"


def generate(options: argparse.Namespace) -> None:
    """Tokens and log-probabilities of vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what is changed below must be changed in the engine
    if options.mode != "default":
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # it does not see the change
    from vllm import LLM, SamplingParams

    if "32" in options.mode:
        _float32_logits()
    if "wide" in options.mode:
        _wide_residuals()
    how = {"max_model_len": 512, "seed": 0, "logprobs_mode": "raw_logprobs", "enable_prefix_caching": False}
    engine = LLM(options.model, gpu_memory_utilization=0.4 if DEVICE == "cuda" else 0.1, **how)
    tokenizer = engine.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    start = min(map(len, prompts))
    prompts = [prompts[number % len(prompts)][:start] for number in range(options.num)]
    how = SamplingParams(max_tokens=options.length, ignore_eos=True, temperature=1.0, logprobs=0)
    made = [each.outputs[0] for each in engine.generate([{"prompt_token_ids": each} for each in prompts], how)]
    ids = [prompt + list(each.token_ids) for prompt, each in zip(prompts, made, strict=True)]
    decode = [[at[t].logprob for at, t in zip(each.logprobs, each.token_ids, strict=True)] for each in made]
    how = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    read = engine.generate([{"prompt_token_ids": each} for each in ids], how)
    prefill = [
        [at[t].logprob for at, t in zip(each.prompt_logprobs[start:], own[start:], strict=True)]
        for each, own in zip(read, ids, strict=True)
    ]
    options.tokens.write_text(json.dumps({"start": start, "ids": ids, "decode": decode, "prefill": prefill}))


def _float32_logits() -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def logits(self, hidden_states, lm_head, *others):
        return (hidden_states.float() @ lm_head.weight.float().t())[..., : self.org_vocab_size]

    LogitsProcessor._get_logits = logits


def _wide_residuals() -> None:
    from vllm.model_executor.layers import layernorm

    def norm(self, x, residual=None):
        wide = x.float() if residual is None else x.float() + residual.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        weight = self.weight.float() + ("Gemma" in type(self).__name__)
        out = (scaled * weight).to(self.weight.dtype)
        return out if residual is None else (out, wide)

    for kind in (layernorm.RMSNorm, layernorm.GemmaRMSNorm):
        kind.forward = norm


def load(model: str, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """A network of transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
    return network.to(DEVICE).eval()


@torch.no_grad()
def logprobs(network: nn.Module, ids: Tensor, start: int, *, head32: bool = False) -> Tensor:
    """Log-probabilities of the tokens from `start` on."""
    found = []
    for part in ids.split(_AT_ONCE):
        hidden = network.model(part, use_cache=False).last_hidden_state[:, start - 1 : -1]
        logits = hidden.float() @ network.lm_head.weight.float().T if head32 else network.lm_head(hidden).float()
        found.append(torch.log_softmax(logits, -1).gather(-1, part[:, start:, None])[..., 0])
    return torch.cat(found)


def widen(network: nn.Module) -> None:
    """Its residual stream in float32; what goes into products stays in bfloat16."""

    def narrow(module, arguments, output):
        return tuple(each.to(torch.bfloat16) for each in output) if isinstance(output, tuple) else output.bfloat16()

    network.model.embed_tokens.register_forward_hook(lambda module, arguments, output: output.float())
    for name, module in network.named_modules():
        is_norm = name.endswith("norm") and not name.endswith(("q_norm", "k_norm"))
        if is_norm or name.rpartition(".")[2].startswith("rotary_emb"):
            module.register_forward_hook(narrow)


def compare(options: argparse.Namespace) -> None:
    """The same tokens in transformers."""
    ids, start, decode, prefill = _read(options.tokens)
    exact = logprobs(load(options.model, torch.float32), ids, start)
    network = load(options.model, torch.bfloat16)
    found = {"the engine, prefill": prefill, "transformers": logprobs(network, ids, start)}
    found["transformers, head32"] = logprobs(network, ids, start, head32=True)
    _compile(network)
    found["transformers, compiled"] = logprobs(network, ids, start)
    found["transformers, compiled, head32"] = logprobs(network, ids, start, head32=True)
    network = load(options.model, torch.bfloat16)
    widen(network)
    found["transformers, wide32"] = logprobs(network, ids, start, head32=True)
    _compile(network)
    found["transformers, compiled, wide32"] = logprobs(network, ids, start, head32=True)
    print(COLUMNS.format("against the engine's generation"))
    print(f"| float32 | {figures(exact, decode)} |")
    for name, values in found.items():
        print(f"| {name} | {figures(values, decode)} |")
    print("\n" + COLUMNS.format("against float32"))
    for name, values in found.items():
        print(f"| {name} | {figures(values, exact)} |")


def _compile(network: nn.Module) -> None:
    for number, layer in enumerate(network.model.layers):
        network.model.layers[number] = torch.compile(layer, dynamic=True)


def roundings(options: argparse.Namespace) -> None:
    """One place after another."""
    ids, start, _, _ = _read(options.tokens)
    rounded: set[str] = set()
    network = load(options.model, torch.float32, attention=_attention(lambda value, place: of(value, place)))

    def of(value: Tensor, place: str) -> Tensor:
        return value.to(torch.bfloat16).float() if place in rounded else value

    _hook(network, of)
    exact = logprobs(network, ids, start)
    print(COLUMNS.format("rounded to bfloat16"))
    squares = {}
    everything = [("all", PLACES), *((f"all but {place}", {*PLACES} - {place}) for place in PLACES)]
    everything += [("all but residual, logits", {*PLACES} - {"residual", "embedding", "logits"})]
    everything += [("what goes into products alone", BEFORE_PRODUCTS)]
    for name, places in [*((place, (place,)) for place in PLACES), *everything]:
        rounded.clear()
        rounded.update(places)
        values = logprobs(network, ids, start)
        squares[name] = (values - exact).double().pow(2).mean().item()
        print(f"| {name} | {figures(values, exact)} |", flush=True)
    total = sum(squares[place] for place in PLACES)
    print("share of the squares: " + ", ".join(f"{place} {100 * squares[place] / total:.1f} %" for place in PLACES))


def _attention(of: Callable[[Tensor, str], Tensor]) -> str:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **others):
        query, key = of(query, "rotary"), of(key, "rotary")
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        place = torch.arange(key.shape[2], device=key.device)
        seen = place[:, None] >= place[None, :]
        if sliding_window:
            seen &= place[:, None] - place[None, :] < sliding_window
        scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
        return of(of(scores.softmax(-1), "probabilities") @ value, "attention").transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["rounded"] = attend
    ALL_MASK_ATTENTION_FUNCTIONS["rounded"] = lambda *arguments, **others: None
    return "rounded"


def _hook(network: nn.Module, of: Callable[[Tensor, str], Tensor]) -> None:
    """Of the shapes of Llama, Qwen and Gemma 3."""
    after = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o_proj", "gate_proj": "gate_up"}
    after |= {"up_proj": "gate_up", "act_fn": "activation", "down_proj": "down_proj", "lm_head": "logits"}
    after |= {"embed_tokens": "embedding"}

    def rounds(place):
        return lambda module, arguments, output: of(output, place)

    def in_place(module, arguments):
        arguments[0].copy_(of(arguments[0], "residual"))  # the layer keeps the same tensor

    for name, module in network.named_modules():
        last = name.rpartition(".")[2]
        if place := after.get(last, "norm" if last.endswith("norm") else ""):
            module.register_forward_hook(rounds("final norm" if name == "model.norm" else place))
        if last == "down_proj":
            module.register_forward_pre_hook(lambda module, arguments: (of(arguments[0], "product"),))
    for layer in network.model.layers:
        second = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
        second.register_forward_pre_hook(in_place)
        layer.register_forward_hook(rounds("residual"))


def _read(path: Path) -> tuple[Tensor, int, Tensor, Tensor]:
    data = json.loads(path.read_text())
    ids, decode, prefill = (torch.tensor(data[name], device=DEVICE) for name in ("ids", "decode", "prefill"))
    return ids, data["start"], decode, prefill


def main() -> None:
    """Run one of the three."""
    torch.backends.cuda.matmul.allow_tf32 = False
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["generate", "compare", "roundings"])
    parser.add_argument("model")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--mode", choices=["default", "head32", "wide32"], default="default")
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    {"generate": generate, "compare": compare, "roundings": roundings}[options.what](options)


if __name__ == "__main__":
    main()
