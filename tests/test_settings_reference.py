"""docs/settings.md is made from the settings' docstrings; this holds it up to date, and complete."""

import runpy
from pathlib import Path

from slipstream.config.parse.keys import all_keys
from slipstream.config.schema import RunConfig

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_script_makes():
    script = runpy.run_path(str(ROOT / "scripts/settings_reference.py"))
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert page == script["reference"](), "run python scripts/settings_reference.py"
    assert [name for name in all_keys() if name != "algorithm.kind" and f"`{name.split('.')[1]}`" not in page] == []


def test_every_setting_says_what_it_is():
    models = RunConfig.model_json_schema()["$defs"].values()
    silent = [
        (m["title"], n) for m in models for n, s in m["properties"].items() if n != "kind" and not s.get("description")
    ]
    assert silent == []
