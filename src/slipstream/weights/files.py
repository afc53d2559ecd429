"""Deployable model folders: written whole or not at all, described by the fingerprints of what was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer and code files of a model folder: everything but weights and sub-folders."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def write_model_folder(folder: Path, named_weights: Iterable[tuple[str, Tensor]], source: Path) -> int:
    """Write `folder` as a Hugging Face model folder with these weights; returns the weights' size in bytes.

    `source` gives configuration and tokenizer. The folder appears under its name only when it is complete.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, mode=0o700)
    copy_model_files(source, temporary)
    tensors = {name: tensor.detach().contiguous() for name, tensor in named_weights}
    save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def read_model_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every safetensors file in `folder`, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
