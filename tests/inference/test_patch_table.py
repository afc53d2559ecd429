"""Which patches are applied, and why others are not; with a table and modules of the test's own."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded, Patch, digest

from .fakes import put


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In the place of vLLM's."""
    (tmp_path / "a.py").write_bytes(b"one")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__init__.py").write_bytes(b"two")
    monkeypatch.setattr(patch_table, "vllm_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def applied(monkeypatch):
    """What the functions of a module of patches were called with."""
    calls, module = [], ModuleType("made")

    def raising(error):
        def function(*given):
            raise error

        return function

    for name in ("one", "two", "three"):
        setattr(module, name, lambda *given, name=name: calls.append((name, *given)))
    module.gone, module.idle = raising(Absent("Scheduler.step")), raising(NotNeeded("it is off"))
    monkeypatch.setitem(sys.modules, f"{patch_table.__package__}.made", module)
    monkeypatch.setattr(patch_table, "_applied", [])
    monkeypatch.setattr(patch_table, "_left_out", {})
    monkeypatch.delenv(patch_table.VARIABLE, raising=False)
    return calls


def test_a_digest_is_of_all_modules_with_their_names(folder):
    assert digest(("a", "b")) not in ("", digest(("a",)), digest(("b", "a")))
    assert len(digest(("a", "b"))) == 16
    assert digest(("a", "c")) == ""
    other = folder / "b"
    assert digest(("a",), other) == ""


def test_a_fast_path_is_for_a_source_that_it_was_checked_against(folder, monkeypatch):
    known = Patch("p", "made:one", "fast", modules=("a",), checked={digest(("a",)): "0.1"})
    other = Patch("p", "made:one", "fast", modules=("b",), checked={"0": "0.1"})
    missing = Patch("p", "made:one", "fast", modules=("c",), checked={"0": "0.1"})
    required = Patch("p", "made:one", "required")
    reasons = {
        choice: [patch_table.reason_against(each, choice) for each in (known, other, missing, required)]
        for choice in ("auto", "checked", "required", "all")
    }
    assert reasons["auto"] == reasons["checked"]
    assert reasons["auto"][::3] == ["", ""]
    assert f"source ({digest(('b',))}) is not one" in reasons["auto"][1]
    assert "source (not found) is not one" in reasons["auto"][2]
    assert reasons["required"] == ['inference.patches = "required" leaves out fast paths'] * 3 + [""]
    assert reasons["all"] == [""] * 4
    monkeypatch.setattr(
        patch_table, "TABLE", (known, Patch("g", "made:one", "fast", "gpu"), Patch("c", "", "fast", "cpu"))
    )
    assert patch_table.foreseen("required", on_cpu=True).keys() == {"p", "c"}
    assert patch_table.foreseen("required", on_cpu=False).keys() == {"p", "g"}
    monkeypatch.setattr(patch_table, "vllm_folder", lambda: None)
    assert digest(("a",)) == ""


def test_patches_of_the_device_and_the_object_are_applied_once_in_order(applied, monkeypatch):
    table = (
        Patch("on gpus", "made:two", "required", "gpu"),
        Patch("first", "made:one", "required", "cpu"),
        Patch("absent", "made:gone", "required"),
        Patch("idle", "made:idle", "required"),
        Patch("builds", "made:three", "fast", needs=("first", "absent", "idle")),
        Patch("of a model", "made:three", "required", to="model"),
        Patch("fast", "made:three", "fast"),
        Patch("second", "made:two", "required", needs=("first",)),
    )
    monkeypatch.setattr(patch_table, "TABLE", table)
    state = SimpleNamespace(is_cpu=True)
    put(monkeypatch, platforms={"current_platform": SimpleNamespace(is_cpu=lambda: state.is_cpu)})
    monkeypatch.setenv(patch_table.VARIABLE, "all")
    for _ in range(2):
        assert patch_table.apply_all() == ("first", "fast", "second")
    assert applied == [("one",), ("three",), ("two",)]
    left = {
        "absent": "this vLLM has no Scheduler.step for the patch absent",
        "idle": "not needed: it is off",
        "builds": "it builds on absent, idle",
    }
    assert patch_table.left_out() == left
    patch_table.left_out().clear()
    assert patch_table.left_out() == left
    runner = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    patch_table.apply_to(runner)
    assert (applied[3:], patch_table.applied()[-1]) == ([("three", runner)], "of a model")
    state.is_cpu = False
    assert patch_table.apply_all()[-1] == "on gpus"


def test_without_a_choice_unknown_sources_get_no_fast_path(applied, folder, monkeypatch):
    table = (
        Patch("fast", "made:one", "fast", modules=("a",), checked={}),
        Patch("of gpus", "made:two", "required", "gpu", "model"),
        Patch("of cpus", "made:three", "required", "cpu", "model"),
    )
    monkeypatch.setattr(patch_table, "TABLE", table)
    put(monkeypatch, platforms={"current_platform": SimpleNamespace(is_cpu=lambda: True)})
    assert patch_table.apply_all() == ()
    assert patch_table.left_out().keys() == {"fast"}
    patch_table.apply_to(SimpleNamespace(device=SimpleNamespace(type="cuda")))
    assert patch_table.applied() == ("of gpus",)


def test_what_needs_a_patch_says_what_to_use_instead(applied, monkeypatch):
    table = (Patch("p", "made:gone", "required", lost="use another"), Patch("q", "made:one", "required", lost="none"))
    monkeypatch.setattr(patch_table, "TABLE", table)
    with pytest.raises(RuntimeError, match=r"^the patch p was not applied, and use another$"):
        patch_table.require("p")
    put(monkeypatch, platforms={"current_platform": SimpleNamespace(is_cpu=lambda: True)})
    patch_table.apply_all()
    patch_table.require("q")
    with pytest.raises(RuntimeError, match=r"^this vLLM has no Scheduler.step for the patch p, and use another$"):
        patch_table.require("p")


def test_the_installed_vllm_is_found_without_importing_it(monkeypatch):
    found = SimpleNamespace(submodule_search_locations=["/there"])
    monkeypatch.setattr(patch_table.importlib.util, "find_spec", lambda name: {"vllm": found}[name])
    assert str(patch_table.vllm_folder()) == "/there"
    found.submodule_search_locations = None
    assert patch_table.vllm_folder() is None
    monkeypatch.setattr(patch_table.importlib.util, "find_spec", lambda name: None)
    assert patch_table.vllm_folder() is None
