"""Plans the learning rate."""

from __future__ import annotations

import math

from slipstream.launch.plan.builder import Draft

LARGE, TINY = 500e6, 1e6
RATES = {"rl": (1e-6, 1e-3), "sft": (1e-5, 4e-3), "lora": (1e-4, 1e-2)}
"""At `LARGE` and at `TINY` parameters. The first are usual: of GRPO in TRL and verl, of SFT, and of LoRA, which wants
ten times that of full fine-tuning and more ("LoRA Without Regret", Thinking Machines, 2025). The second are those that
the tutorial and the tests train at."""


def plan_learning_rate(draft: Draft) -> None:
    """`training.learning_rate`."""
    kind = "rl" if draft.original.algorithm.kind != "sft" else "sft"
    words = {"rl": "usual in reinforcement learning of all parameters", "sft": "usual in SFT of all parameters"}
    if draft.original.lora is not None:
        kind, words["lora"] = "lora", "usual for LoRA"
    num_parameters = draft.facts.model.num_decoding
    rate = learning_rate(kind, num_parameters)
    reason = words[kind]
    if rate != RATES[kind][0]:
        reason = f"{RATES[kind][0]:g} is {reason}; more for {num_parameters / 1e6:.3g} M parameters, fewer than 500 M"
    draft.derive_auto("training.learning_rate", rate, reason)


def learning_rate(kind: str, num_parameters: int) -> float:
    """Two figures of the rate for `kind`, a key of `RATES`; between its two sizes a line in logarithms."""
    usual, highest = RATES[kind]
    part = math.log(LARGE / max(1, num_parameters)) / math.log(LARGE / TINY)
    return float(f"{usual * (highest / usual) ** min(1.0, max(0.0, part)):.1e}")
