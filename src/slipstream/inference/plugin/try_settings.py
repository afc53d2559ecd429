"""Makes vLLM's configuration from engine settings in a file, and ends; raises vLLM's refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.inference.settings import EngineSettings
from slipstream.processes.exits import leave


def main() -> None:
    """Configure and leave."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineSettings)
    AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()
    leave(0)


if __name__ == "__main__":
    main()
