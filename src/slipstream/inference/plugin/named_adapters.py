"""vLLM's `LoRAResolver` for deployed adapters: loads `NAME@DIGEST` when a request first names it.

Guarantees: a name is no path, and only folders in this server's own registry are found. The files of an adapter have
the digest in its name, or it is not loaded. vLLM's own resolver of folders also loads `../x` and absolute paths.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from slipstream.regular_files import open_regular

VARIABLE = "SLIPSTREAM_NAMED_ADAPTERS"
"""Environment variable of a server: the folder of its adapters."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_DIGITS = 16
_SERVED = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}@([0-9a-f]{{{NUM_DIGITS}}})")


def adapter_digest(folder: Path) -> str:
    """The digest of both files of an adapter. Raises OSError for a missing one."""
    found = hashlib.sha256()
    for name in FILES:
        with open_regular(folder / name) as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:NUM_DIGITS]


def adapter_named(registry: Path, served: str) -> Path | None:
    """The folder of a deployed adapter; None for an unknown name, and for changed files."""
    matched = _SERVED.fullmatch(served)
    if matched is None:
        return None
    folder = registry / served
    try:
        is_own = stat.S_ISDIR(os.lstat(folder).st_mode)
        return folder if is_own and adapter_digest(folder) == matched[1] else None
    except OSError:
        return None


def register() -> None:
    """Have vLLM's handlers ask for unknown names here."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    base: Any = LoRAResolver

    class NamedAdapters(base):
        """See the module."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            """See `LoRAResolver`; vLLM gives the request its number."""
            found = await asyncio.to_thread(adapter_named, Path(os.environ[VARIABLE]), lora_name)
            return None if found is None else LoRARequest(lora_name, 1, str(found))

    LoRAResolverRegistry.register_resolver("slipstream", NamedAdapters())
