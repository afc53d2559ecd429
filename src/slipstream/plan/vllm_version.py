"""The installed vLLM, and our changes for it: read from its source files, before anything starts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from slipstream.inference.plugin.patches import patch_table
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.facts import EngineFacts
from slipstream.shared_kernels import FLASH3

_VERSION = re.compile(r"__version__ = version = ['\"]([^'\"]+)['\"]")


def read_engine(*, on_cpu: bool) -> EngineFacts | None:
    """None without an installed vLLM."""
    folder = patch_table.vllm_folder()
    if folder is None:
        return None
    file = folder / "_version.py"
    found = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    reasons = patch_table.foreseen("checked", on_cpu=on_cpu)
    fast = [patch.name for patch in patch_table.TABLE if patch.kind == "fast" and patch.name in reasons]
    return EngineFacts(
        version=found[1] if found else "",
        checked=tuple(name for name in fast if not reasons[name]),
        unchecked=tuple(name for name in fast if reasons[name]),
        tool_parsers=_tool_parsers(folder),
        returns_experts=_returns_experts(folder, on_cpu=on_cpu),
        has_flash3=any(folder.glob(FLASH3)),
    )


def _returns_experts(folder: Path, *, on_cpu: bool) -> bool:
    """Whether it has the code for `patches/experts.py` on a CPU, and for `plugin/arguments.py` on a GPU."""
    name = "bind_routed_experts_capturer" if on_cpu else "enable_return_routed_experts"
    layers = folder / "model_executor" / "layers" / "fused_moe" / "routed_experts_capturer.py"
    file = layers if on_cpu else folder / "engine" / "arg_utils.py"
    return file.is_file() and name in file.read_text(encoding="utf-8")


def _tool_parsers(folder: Path) -> tuple[str, ...]:
    file = folder / "tool_parsers" / "__init__.py"
    if not file.is_file():
        return ()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return tuple(sorted(name for name in names if isinstance(name, str)))
    return ()


def plan_patches(builder: PlanBuilder) -> None:
    """Choose between fast paths and none, and warn of an untried vLLM."""
    facts = builder.facts.engine
    if facts is None:
        builder.derive_auto(
            "inference.patches", "checked", "fast paths, where they were checked against the vLLM in use"
        )
        return
    name = f"vLLM {facts.version or 'of an unknown version'}"
    if facts.checked:
        left_out = f"; not against it, and left out: {', '.join(facts.unchecked)}" if facts.unchecked else ""
        builder.derive_auto(
            "inference.patches", "checked", f"checked against {name}: {', '.join(facts.checked)}{left_out}"
        )
    else:
        builder.derive_auto("inference.patches", "required", f"no fast path was checked against {name}")
    if builder["inference.patches"] == "all" and facts.unchecked:
        builder.warnings.append(
            f'inference.patches = "all" also applies what was not checked against {name}, which may change what is '
            f'generated: {", ".join(facts.unchecked)}; use "auto" unless you work on these'
        )
    if problem := _outside(facts.version):
        builder.warnings.append(f"{name} is {problem}")


def _outside(version: str) -> str:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    (oldest, newest) = (".".join(map(str, each)) for each in (patch_table.OLDEST, patch_table.NEWEST))
    if len(numbers) < 2 or patch_table.OLDEST <= numbers <= patch_table.NEWEST:
        return ""
    kind, bound = ("older", oldest) if numbers < patch_table.OLDEST else ("newer", newest)
    return (
        f"{kind} than {bound}, the {'oldest' if kind == 'older' else 'newest'} that Slipstream was checked with: its "
        f"engine may not start, or refuse updates; install one of {oldest} to {newest} then"
    )
