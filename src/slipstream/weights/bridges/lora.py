"""The bridge `lora`: each version is an adapter folder; the engine loads it beside the frozen base model.

The publisher multiplies B by the scaling (the folder then says alpha = rank); vLLM would do the same while loading, and
so the engine's buffers hold the published numbers, element for element. Every ticket carries the fingerprints of the
trainer's frozen weights: the first one verifies the engine's base model too.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from slipstream.records import ParameterSpec
from slipstream.weights.adapter_folder import WEIGHTS_FILE, AdapterConfig, folded, write_adapter_folder
from slipstream.weights.base import NamedWeights
from slipstream.weights.bridges.disk import FolderPublisher
from slipstream.weights.fingerprint import describe


class AdapterPublisher(FolderPublisher):
    """Writes each version as an adapter folder below `folder`; `base_weights` are read once.

    The next version overwrites the file of a discarded one: this takes a third of the time of a new file, since the
    kernel need not allocate its pages.
    """

    def __init__(self, folder: Path, adapter: AdapterConfig, base_weights: NamedWeights) -> None:
        super().__init__("lora", folder, folder)
        self._adapter = adapter
        self._base_weights = base_weights
        self._base: tuple[ParameterSpec, ...] | None = None
        self._folded: dict[str, Tensor] = {}
        self._spare = folder / ".spare.safetensors"

    def prepare(self, named_weights: NamedWeights) -> NamedWeights:
        """Adapter tensors with the scaling in B, always in the same memory: the fingerprint kernel's cached table of
        addresses stays valid (making it takes longer than the fingerprint)."""
        return list(folded(named_weights, self._adapter.scaling, self._folded))

    def write(self, folder: Path, weights: NamedWeights) -> int:
        """An adapter folder with a scaling of 1."""
        config = replace(self._adapter, alpha=float(self._adapter.rank))
        return write_adapter_folder(folder, weights, config, spare=self._spare)

    def discard(self, folder: Path) -> None:
        """Keep the weights' file for the next version, unless it has another hard link."""
        with contextlib.suppress(OSError):
            if (folder / WEIGHTS_FILE).stat().st_nlink == 1:
                (folder / WEIGHTS_FILE).rename(self._spare)
        super().discard(folder)

    def close(self) -> None:
        """See `Publisher`."""
        super().close()
        self._spare.unlink(missing_ok=True)

    def base(self) -> tuple[ParameterSpec, ...]:
        """The frozen base model, described once."""
        if self._base is None:
            self._base = describe(self._base_weights)
        return self._base
