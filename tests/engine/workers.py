"""Workers that do more than a run asks of them, when told to by files that these variables name."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.inference.plugin.weights.receiver import WorkerExtension

from .architectures import GRID, pixels

FLIP_VARIABLE = "SLIPSTREAM_TEST_FLIP"
TOWER_VARIABLE = "SLIPSTREAM_TEST_TOWER"
LOOK_VARIABLE = "SLIPSTREAM_TEST_LOOK"
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


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


class TowerWorker(WorkerExtension):
    """When it is fingerprinted, it writes what the live image tower makes of an image."""

    @torch.no_grad()
    def slipstream_fingerprint(self, parameters_json: str) -> str:
        if file := os.environ.get(TOWER_VARIABLE):
            model = self._slipstream_model()
            (features,) = model.embed_multimodal(pixel_values=pixels(), image_grid_thw=torch.tensor([GRID]))
            save_file({"features": features.contiguous()}, file)
        return super().slipstream_fingerprint(parameters_json)


class LookingWorker(WorkerExtension):
    """When it is described, it writes what its process looks like."""

    def slipstream_describe(self) -> str:
        Path(os.environ[LOOK_VARIABLE]).write_text(json.dumps(looks()))
        return super().slipstream_describe()


def looks() -> dict[str, Any]:
    """What a process sees of itself."""
    main = sys.modules["__main__"]
    return {
        "modules": sorted(sys.modules),
        "environment": {name: value for name, value in os.environ.items() if name != LOOK_VARIABLE},
        "arguments": [Path(sys.argv[0]).name, *(Path(argument).name for argument in sys.argv[1:])],
        "original": [Path(argument).name for argument in sys.orig_argv],
        "main": [main.__name__, main.__spec__.name, Path(str(main.__file__)).name],
        "path": sys.path,
        "folder": os.getcwd(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "threads": torch.get_num_threads(),
        "collects": gc.isenabled(),
        # Without the address of the function, or of whose method it is.
        "signals": {n.name: re.split(" of <| at 0x", str(signal.getsignal(n)))[0] for n in _SIGNALS},
    }
