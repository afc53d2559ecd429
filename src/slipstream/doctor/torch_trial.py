"""The process in which the doctor uses each GPU: a driver that hangs then stops this process alone. It prints JSON."""

from __future__ import annotations

import json
from typing import Any


def main() -> None:
    """Compute on each visible GPU."""
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda or "", "hip": torch.version.hip or "", "gpus": [], "error": ""}
    try:
        for index in range(torch.cuda.device_count()):
            torch.zeros(1, device=f"cuda:{index}").add_(1).item()
            facts = torch.cuda.get_device_properties(index)
            uuid = f"GPU-{str(getattr(facts, 'uuid', '')).removeprefix('GPU-')}"
            found["gpus"].append([facts.name, facts.major, facts.total_memory, uuid])
    except Exception as error:  # noqa: BLE001 (a finding says it)
        found["error"] = str(error).strip().split("\n")[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
