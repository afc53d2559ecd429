"""Writes docs/settings.md from the docstrings of the settings, or says that it is not up to date.

python scripts/settings_reference.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slipstream.config import RunConfig
from slipstream.config.parse.dump import toml_value
from slipstream.config.parse.keys import all_keys, optional_sections

FILE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Every setting of a run file: `key = value` below its `[section]`. Any of them can be replaced on the command line, as
`--section.key VALUE`. `auto` is derived from model, tasks and machine; `slipstream plan` says what it becomes, and why.
This page is made by `python scripts/settings_reference.py` from the settings' own descriptions.
"""


def reference() -> str:
    """The page's text."""
    schema = RunConfig.model_json_schema()
    parts = [HEAD]
    for section, spec in schema["properties"].items():
        for name in _references(spec):
            model = schema["$defs"][name]
            parts.append(_section(section, model))
            for key, inner in model["properties"].items():
                if "$ref" in inner:
                    parts.append(_section(f"{section}.{key}", schema["$defs"][_references(inner)[0]]))
    return "\n".join(parts) + "\n"


def _section(section: str, model: dict[str, Any]) -> str:
    properties: dict[str, Any] = dict(model["properties"])
    kind = properties.get("kind", {}).get("const")
    if kind:
        del properties["kind"]
    learns = " for reinforcement learning" if "group_size" in properties else " for learning from rows"
    title = f"## [{section}]" + (f' with kind = "{kind}"' if kind else learns * ("kind" in properties))
    text = _joined(model.get("description", ""))
    if section in optional_sections():
        text += f" `{section} = false` turns it off."
    lines = [title, "", text, "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, spec in properties.items():
        takes = all_keys()[f"{section}.{name}"].requirement.replace("|", "\\|")
        is_required = all_keys()[f"{section}.{name}"].required or name in model.get("required", ())
        default = "required" if is_required else _default({} if "$ref" in spec else spec.get("default"))
        lines.append(f"| `{name}` | {takes} | {default} | {_joined(spec.get('description', ''))} |")
    return "\n".join([*lines, ""])


def _default(value: Any) -> str:
    return "not set" if value is None else f"`{toml_value(value)}`"


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _references(spec: dict[str, Any]) -> list[str]:
    if "$ref" in spec:
        return [spec["$ref"].rsplit("/", 1)[-1]]
    return [name for part in spec.get("anyOf", spec.get("oneOf", ())) for name in _references(part)]


def main() -> None:
    """Write the page, or compare it."""
    if sys.argv[1:] == ["--check"]:
        if not FILE.is_file() or FILE.read_text(encoding="utf-8") != reference():
            sys.exit(f"{FILE} is not up to date: run python scripts/settings_reference.py")
        return
    FILE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
