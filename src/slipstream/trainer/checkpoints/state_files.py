"""The files of a learner's resume state: full tensors, or each rank's shards; no pickle.

A single process writes `learner.safetensors` and `learner.json`. With several ranks, rank 0 writes the replicated
tensors there, and each rank its shards into a file of its own, by torch's distributed checkpointing (DCP) in its
safetensors format. Guarantees: either kind can be read by any number of ranks, and each reads its own shards only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from slipstream.errors import TrainingError, first_line
from slipstream.trainer.optim.base import local_tensor
from slipstream.weights.model_files import stream_tensors

STATE_PREFIX = "optimizer."
TENSORS_FILE = "learner.safetensors"
FACTS_FILE = "learner.json"
_SHARDS = "shard-*.safetensors"

Place = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""(name, full shape, dtype) -> this rank's shard as a DTensor to be filled; None to read the full tensor."""


def write_state(folder: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write full tensors into the existing `folder`."""
    stream_tensors(folder / TENSORS_FILE, tensors, durable=True)
    (folder / FACTS_FILE).write_text(json.dumps({"step": step, "torch": torch.__version__}))


def write_shards(folder: Path, shards: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's part of the DTensors `shards` into a file of its own, without collectives."""
    from torch.distributed import checkpoint as dcp

    class Writer(dcp.HuggingFaceStorageWriter):
        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return [dataclasses.replace(plan, storage_data={"shard_index": rank + 1}) for plan in plans]

    if shards:
        saver: Any = dcp.save
        with _by_itself():
            saver(dict(shards), storage_writer=Writer(str(folder), save_distributed=True), no_dist=True)


def read_state(folder: Path, place: Place | None = None) -> dict[str, Tensor]:
    """Read the state written by any number of ranks: this rank's shard (a local tensor) if `place` returns a DTensor,
    else the full tensor. Raises `TrainingError` if files cannot be read."""
    try:
        return _read_state(folder, place)
    except (SafetensorError, OSError) as error:
        raise TrainingError(
            f"the state in {folder} cannot be read ({first_line(error)}): resume from another checkpoint"
        ) from error


def _read_state(folder: Path, place: Place | None) -> dict[str, Tensor]:
    if place is None and not any(folder.glob(_SHARDS)):
        return load_file(folder / TENSORS_FILE)
    from torch.distributed import checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    with safe_open(folder / TENSORS_FILE, framework="pt") as file:
        alone = set(file.keys())
        shares: dict[str, Tensor] = {}
        for name, facts in stored.items():
            known: Any = facts
            room = place(name, known.size, known.properties.dtype) if place is not None else None
            if room is not None:
                shares[name] = room
            elif name not in alone:
                shares[name] = torch.empty(known.size, dtype=known.properties.dtype)
        whole = {name: file.get_tensor(name) for name in alone - shares.keys()}
    loader: Any = dcp.load
    with _by_itself():
        loader(shares, storage_reader=reader, no_dist=True)
    return whole | {name: local_tensor(share) for name, share in shares.items()}


@contextlib.contextmanager
def _by_itself() -> Generator[None]:
    """Suppress DCP's warning of an unused torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
