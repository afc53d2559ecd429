"""Which patches are applied, and why others are not; with a table and modules of the test's own."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded, Patch

from .fakes import put


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


def test_patches_of_the_device_and_the_object_are_applied_once_in_order(applied, monkeypatch):
    table = (
        Patch("on gpus", "made:two", "required", "gpu"),
        Patch("first", "made:one", "required", "cpu"),
        Patch("absent", "made:gone", "required"),
        Patch("idle", "made:idle", "required"),
        Patch("builds", "made:three", "fast", needs=("first", "absent", "idle")),
        Patch("of a model", "made:three", "required", to="model"),
        Patch("fast", "made:three", "fast"),
        Patch("unasked", "made:two", "required", setting="experts"),
        Patch("second", "made:two", "required", setting="head", needs=("first",)),
    )
    monkeypatch.setattr(patch_table, "TABLE", table)
    state = SimpleNamespace(is_cpu=True)
    put(monkeypatch, platforms={"current_platform": SimpleNamespace(is_cpu=lambda: state.is_cpu)})
    monkeypatch.setenv(patch_table.VARIABLE, "all")
    monkeypatch.setenv(patch_table.ASKED, "residual,head")
    for _ in range(2):
        assert patch_table.apply_all() == ("first", "fast", "second")
    assert applied == [("one",), ("three",), ("two",)]
    left = {
        "absent": "this vLLM has no Scheduler.step for the patch absent",
        "idle": "not needed: it is off",
        "unasked": "not needed: model.experts is off",
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
