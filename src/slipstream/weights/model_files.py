"""Deployable Hugging Face model folders of one safetensors file, and safetensors files written and read in one
piece."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import first_line
from slipstream.processes.files import cannot_write
from slipstream.records import ParameterSpec
from slipstream.weights.shards import ShardedWeights

WEIGHTS_FILE = "model.safetensors"
HEAD = "lm_head.weight"
_TIED = "tie_word_embeddings"
_STORED = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _STORED.items()}
_STORED_TOO = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK_BYTES = 64 << 20
_TORCH_CANNOT_WRITE = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""Parts of `torch.save`'s errors when a disk is full."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}


def write_model_folder(
    folder: Path,
    named_weights: Iterable[tuple[str, Tensor]],
    source: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    durable: bool = False,
) -> int:
    """Make `folder` a model of these tensors, with the configuration, tokenizer and code files of `source`.

    Tensors are written as they are; `config.json` gets `changes`, and the dtype of most of the numbers. A head
    among the tensors is not tied there. The folder, and its content, is for its owner alone, appears when it is
    complete, and replaces one of the same name. `durable`: it is on the disk (fsync) when this returns. Returns the
    bytes of all tensors.
    """
    # Tensors gathered from several GPUs must not all be on one.
    gathers = isinstance(named_weights, ShardedWeights)
    weights = {name: (t.detach().cpu() if gathers else t.detach()).contiguous() for name, t in named_weights}
    with whole_folder(folder, durable=durable) as temporary:
        _copy_companions(source, temporary)
        _write_config(source, temporary, weights, changes or {})
        stream_tensors(temporary / WEIGHTS_FILE, weights, durable=durable)
    return sum(tensor.nbytes for tensor in weights.values())


@contextmanager
def whole_folder(folder: Path, *, durable: bool) -> Generator[Path]:
    """A temporary folder to fill, renamed to `folder` at the end of the block; removed when the block raises."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with told_of_the_disk(folder, temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
        yield temporary
        if durable:
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        if durable:
            sync(folder.parent)


@contextmanager
def told_of_the_disk(folder: Path, temporary: Path) -> Generator[None]:
    """While `folder` is written as `temporary`: nothing of this is left on a failure, and a full or broken disk is a
    `SlipstreamError`."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, shutil.Error):  # of all files of a folder
            reason = str(error.args[0][0][-1])
        elif isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or first_line(error)
        elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_CANNOT_WRITE):
            reason = "torch could not write all of it"
        else:
            raise
        raise cannot_write(folder, reason) from error


def write_tensors(path: Path, named_weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, over an existing one. All copies from a GPU are waited for together: `save_file` waits
    for each: this takes many times as long for some hundred small tensors."""
    text, order, num_bytes = _header(named_weights, metadata)
    on_gpu = any(tensor.is_cuda for tensor in named_weights.values())
    numbers = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    place = 0
    for name in order:
        flat = named_weights[name].detach().reshape(-1).view(torch.uint8)
        numbers[place : place + flat.numel()].copy_(flat, non_blocking=True)
        place += flat.numel()
    if on_gpu:
        torch.cuda.synchronize()
    content: Any = numbers.numpy()
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(text)
        file.write(content)
        file.truncate()


def stream_tensors(path: Path, tensors: Mapping[str, Tensor], *, durable: bool = False) -> None:
    """Write a new safetensors file tensor by tensor: memory never holds a second copy of all, and other threads run
    meanwhile. `durable`: on the disk (fsync) when this returns, in chunks, so other writers need not wait for all of
    it."""
    text, order, _ = _header(tensors)
    with path.open("xb") as file:
        file.write(text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for chunk in flat.split(_CHUNK_BYTES):
                content: Any = chunk.numpy()
                file.write(content)
                if durable and len(chunk) == _CHUNK_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str], int]:
    """The header of a safetensors file, the names in the order of their data, and the bytes of all data."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    types, end = _STORED | _STORED_TOO, 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text, order, end


def read_tensors(path: Path, *, pinned: bool = False) -> dict[str, Tensor] | None:
    """Every tensor of a safetensors file, as views of one buffer (page-locked if `pinned`), read at once; None
    when it has dtypes other than floats. Raises ValueError for an incomplete file."""
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        num_bytes = path.stat().st_size - 8 - length
        if num_bytes < 0:
            raise ValueError(f"{path} is no safetensors file, or only a part of one: publish it again")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if any(entry["dtype"] not in _DTYPES for entry in header.values()):
            return None
        numbers = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        content: Any = numbers.numpy()
        rest = memoryview(content)
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if end > num_bytes - len(rest):
            raise ValueError(f"{path} ends before {name} does: publish it again")
        dtype = _DTYPES[entry["dtype"]]
        bits = numbers[start:end]
        bits = bits if start % dtype.itemsize == 0 else bits.clone()
        found[name] = bits.view(dtype).view(entry["shape"])
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`: the ones in its index, else `model.safetensors`, else all. Others
    beside them (`consolidated.safetensors`) hold the same tensors under other names."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(named)]
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """Digest of every stored tensor's name, shape and dtype, and of two of its rows: different weights differ nearly
    everywhere, and reading all of them would take as long as loading them."""
    lines: list[str] = []
    for name, file in _stored(folder):
        stored = file.get_slice(name)
        shape = stored.get_shape()
        indices = (0, shape[0] // 2) if shape else ()
        rows = [stored[index : index + 1] for index in indices] or [file.get_tensor(name)]
        content = b"".join(row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows)
        lines.append(f"{name} {shape} {stored.get_dtype()} {hashlib.sha256(content).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def links_to_one_model(model: Path, folder: Path) -> Path:
    """`model` itself, or, if it holds safetensors files beside `weight_files`, a new `folder` of links to all other
    files: vLLM prefers `consolidated.safetensors`, with its names, to the files of transformers."""
    more = set(model.glob("*.safetensors")) - set(weight_files(model)) if model.is_dir() else set()
    if not more:
        return model
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for path in set(model.iterdir()) - more:
        (folder / path.name).symlink_to(path.resolve())
    return folder


def read_model_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in `folder`, one at a time."""
    return ((name, file.get_tensor(name)) for name, file in _stored(folder))


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each tensor's name, with its open file."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file


def stored_parameters(folder: Path, dtype: str) -> tuple[ParameterSpec, ...]:
    """Names and shapes of the floating-point tensors of the model in `folder`, as they are when loaded in `dtype`; only
    headers are read, and the fingerprints are empty."""
    slices = ((name, file.get_slice(name)) for name, file in _stored(folder))
    return tuple(
        ParameterSpec(name, tuple(stored.get_shape()), dtype, "")
        for name, stored in slices
        if "F" in stored.get_dtype()
    )


def has_own_head(folder: Path) -> bool:
    """Whether the files' output head differs from the embedding. Transformers and vLLM then ignore a `config.json` of
    tied ones."""
    if all(name != HEAD for name, _ in _stored(folder)):
        return False
    names = ("embed_tokens.weight", HEAD)
    found = [file.get_tensor(name) for name, file in _stored(folder) if name.endswith(names)]
    coarsest = min((each.dtype for each in found), key=lambda dtype: dtype.itemsize)
    return len(found) == 2 and not torch.equal(*(each.to(coarsest) for each in found))


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_companions(source: Path, folder: Path) -> None:
    """All visible files but weights and their indices, and the one sub-folder of tokenizers."""
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and not path.name.startswith(".") and not _holds_weights(path):
            shutil.copyfile(path, folder / path.name)


def _holds_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")


def _write_config(source: Path, folder: Path, weights: Mapping[str, Tensor], changes: Mapping[str, Any]) -> None:
    numbers: Counter[str] = Counter()
    for tensor in weights.values():
        numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config |= changes
    if HEAD in weights:
        config[_TIED] = False
        if isinstance(text := config.get("text_config"), dict):
            text[_TIED] = False
    config["dtype"] = max(numbers, key=lambda dtype: numbers[dtype])
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
