"""Families of models with their tested facts: a test makes each fact (`tests/trainer/test_supported_models.py`). Pure.

Other families are no error: a smoke test shows whether trainer and engine agree on them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slipstream.plan.derive import CLOSER, SHARED

Tried = Literal["tested", "RL", "replayed experts", "not tried"]


class Family(msgspec.Struct, frozen=True):
    """A family, as `docs/models.md` explains its columns."""

    name: str
    architecture: str
    rows: str = "packed"
    lora: str = "all linear layers"
    engine_on_cpu: Tried = "not tried"
    engine_on_gpu: Tried = "not tried"
    sft_step: Tried = "tested"

    @property
    def float32(self) -> str:
        """Whether head and residual stream can be in float32 on both sides."""
        return "yes" if self.architecture in CLOSER else "not tried"

    @property
    def same_bits(self) -> str:
        """Whether trainer and engine can share kernels."""
        return "yes" if self.architecture in SHARED else "not tried"

    def columns(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "family": self.name,
            "class": self.architecture,
            "a step of SFT": self.sft_step,
            "rows": self.rows,
            "LoRA": self.lora,
            "engine on a CPU": self.engine_on_cpu,
            "engine on a GPU": self.engine_on_gpu,
            "float32 head and residual": self.float32,
            "same bits": self.same_bits,
        }


_EXPERTS, _ONE = "but experts", "one sequence: recurrent layers"
FAMILIES = (
    Family(
        "Llama 2, 3; SmolLM2; and others of this class", "LlamaForCausalLM", engine_on_cpu="tested", engine_on_gpu="RL"
    ),
    Family("SmolLM3", "SmolLM3ForCausalLM"),
    Family("Mistral", "MistralForCausalLM", engine_on_cpu="tested"),
    Family("Ministral 3", "Ministral3ForCausalLM", engine_on_cpu="tested"),
    Family("Qwen 2, 2.5", "Qwen2ForCausalLM", engine_on_cpu="tested", engine_on_gpu="RL"),
    Family("Qwen 3", "Qwen3ForCausalLM", engine_on_cpu="tested"),
    Family("Qwen 2 MoE", "Qwen2MoeForCausalLM", lora=_EXPERTS),
    Family(
        "Qwen 3 MoE", "Qwen3MoeForCausalLM", lora=_EXPERTS, engine_on_cpu="tested", engine_on_gpu="replayed experts"
    ),
    Family("Qwen 3 Next", "Qwen3NextForCausalLM", rows=_ONE, lora=_EXPERTS),
    Family("Qwen 3.5", "Qwen3_5ForCausalLM", rows=_ONE),
    Family("Gemma 2", "Gemma2ForCausalLM", rows="one sequence: soft-capped scores", engine_on_cpu="tested"),
    Family("Gemma 3", "Gemma3ForCausalLM", engine_on_cpu="tested", engine_on_gpu="RL"),
    Family("Gemma 4", "Gemma4ForCausalLM"),
    Family("Phi 3, 4", "Phi3ForCausalLM", engine_on_cpu="tested"),
    Family("GLM 4", "Glm4ForCausalLM"),
    Family("GLM 4.5, 4.6", "Glm4MoeForCausalLM", lora=_EXPERTS),
    Family("DeepSeek V3", "DeepseekV3ForCausalLM", lora=_EXPERTS),
    Family("gpt-oss", "GptOssForCausalLM", rows="one sequence: attention sinks", lora=_EXPERTS),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM"),
    Family("Granite 3", "GraniteForCausalLM"),
    Family("Bamba (Mamba 2 and attention)", "BambaForCausalLM", rows=_ONE),
)


def family_of(architecture: str) -> Family | None:
    """The family of a class; None for one without tests."""
    return next((each for each in FAMILIES if each.architecture == architecture), None)
