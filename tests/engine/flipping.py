"""A worker that damages its own memory when told to, by a file that this variable names."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from slipstream.inference.plugin.worker import WorkerExtension

FLIP_VARIABLE = "SLIPSTREAM_TEST_FLIP"


class FlippingWorker(WorkerExtension):
    """Before it is fingerprinted, one bit of a LoRA buffer is flipped: `module half slice row column` in the file."""

    def slipstream_fingerprint_adapter(self, parameters_json: str, lora_id: str) -> str:
        file = Path(os.environ[FLIP_VARIABLE])
        if file.exists():
            module, half, *place = file.read_text().split()
            number, row, column = (int(part) for part in place)
            layer = self.model_runner.lora_manager._adapter_manager.modules[module]
            buffer: torch.Tensor = getattr(layer, f"lora_{half}_stacked")[number][0, 0]
            buffer.view(torch.int32)[row, column] ^= 1
            file.unlink()
        return super().slipstream_fingerprint_adapter(parameters_json, lora_id)
