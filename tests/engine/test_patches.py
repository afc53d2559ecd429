"""Which changes are made to vLLM, and that without those for its speed it says the same."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from slipstream.inference.plugin.patches import cpu, patch_table
from slipstream.inference.preimport import engine_environment
from slipstream.records import SamplingParams, Ticket, Version
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder

from .conftest import start

ROOT = Path(__file__).parents[2]
FAST = [patch for patch in patch_table.TABLE if patch.kind == "fast"]
ON_GPU = torch.cuda.is_available()
HERE = {patch.name for patch in FAST if patch.on in ("any", "gpu" if ON_GPU else "cpu") and patch.to == "vllm"}
IS_CHECKED = all(patch_table.digest(patch.modules) in patch.checked for patch in FAST if patch.name in HERE)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the source files that digests are of, in the place of vLLM's."""
    own = patch_table.vllm_folder()
    for module in {module for patch in FAST for module in patch.modules}:
        path = own.joinpath(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            target = tmp_path / file.relative_to(own)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    monkeypatch.setattr(patch_table, "vllm_folder", lambda: tmp_path)
    return tmp_path


def fast(choice, *, on_cpu=True):
    reasons = patch_table.foreseen(choice, on_cpu=on_cpu)
    return {patch.name for patch in FAST if patch.name in reasons and not reasons[patch.name]}


def test_fast_paths_are_those_whose_source_is_known_and_others_are_told_with_a_reason(copied):
    before = fast("auto")
    assert fast("required") == set()
    assert fast("all") == {patch.name for patch in FAST if patch.on != "gpu"}
    file = copied / "v1" / "core" / "sched" / "utils.py"
    file.write_text(file.read_text() + "\n# another way to stop\n")
    patch_table._source.cache_clear()
    left = fast("checked")
    assert before - left == before & {"block_with_room", "final_delivery", "plain_steps"}
    assert "not one that it was checked against" in patch_table.foreseen("auto", on_cpu=True)["plain_steps"]
    assert fast("all") == {patch.name for patch in FAST if patch.on != "gpu"}
    reasons = patch_table.foreseen("required", on_cpu=True)
    assert all(not reasons[patch.name] for patch in patch_table.TABLE if patch.kind == "required" and patch.on != "gpu")
    assert all(reasons[patch.name] for patch in FAST if patch.on != "gpu")


@pytest.mark.parametrize("patch", FAST, ids=lambda patch: patch.name)
def test_every_module_of_a_fast_path_counts(patch, copied):
    before = patch_table.digest(patch.modules, copied)
    for module in patch.modules:
        path = copied.joinpath(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        kept = file.read_bytes()
        file.write_bytes(kept + b"#")
        patch_table._source.cache_clear()
        assert patch_table.digest(patch.modules, copied) not in ("", before)
        file.unlink()
        patch_table._source.cache_clear()
        assert patch_table.digest(patch.modules, copied) == ""
        file.write_bytes(kept)
    patch_table._source.cache_clear()
    assert patch_table.digest(patch.modules, copied) == before


def test_the_table_names_functions_that_are_there():
    for patch in patch_table.TABLE:
        module, function = patch.where.split(":")
        spec = importlib.util.find_spec(f"slipstream.inference.plugin.patches.{module}")
        assert f"\ndef {function}(" in Path(spec.origin).read_text()
        assert (patch.kind == "fast") == bool(patch.modules) == bool(patch.checked)
        assert (patch.kind == "required") == bool(patch.lost)
        assert set(patch.needs) <= {other.name for other in patch_table.TABLE}


@pytest.mark.skipif(ON_GPU, reason="a patch of CPUs")
def test_a_patch_that_does_not_fit_is_noted_and_refused_where_it_is_needed(monkeypatch):
    (live,) = (patch for patch in patch_table.TABLE if patch.name == "live_cpu_weights")
    monkeypatch.setattr(patch_table, "TABLE", (live,))
    monkeypatch.setattr(patch_table, "_applied", [])
    monkeypatch.setattr(patch_table, "_left_out", {})

    def gone():
        raise patch_table.Absent("dispatch_cpu_unquantized_gemm")

    monkeypatch.setattr(cpu, "live_weights", gone)
    assert patch_table.apply_all() == ()
    assert "has no dispatch_cpu_unquantized_gemm" in patch_table.left_out()["live_cpu_weights"]
    with pytest.raises(RuntimeError, match=r'dispatch_cpu_unquantized_gemm.*weights.bridge = "restart"'):
        cpu.check_live(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("own", "expected"), [("mine", "mine,slipstream"), ("slipstream,mine", "slipstream,mine")])
def test_plugins_of_the_user_are_loaded_too(own, expected):
    assert engine_environment({"VLLM_PLUGINS": own})["VLLM_PLUGINS"] == expected
    assert "VLLM_PLUGINS" not in engine_environment({}), "vLLM loads all that are installed"


def test_attention_on_a_cpu_divides_no_context_unless_the_user_says_so():
    assert engine_environment({})["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert engine_environment({"VLLM_CPU_ATTN_SPLIT_KV": "1"})["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


@pytest.mark.full
@pytest.mark.engine
def test_with_the_required_patches_alone_an_engine_says_the_same(tiny_model, tmp_path):
    with start(tiny_model, tmp_path / "auto") as live, start(tiny_model, tmp_path / "x", patches="required") as other:
        health = other.call(other.engine.process.client.health())
        assert not HERE & set(health.patches)
        assert all('"required"' in health.patches_left_out[name] for name in HERE)
        assert {"flush", "checked_tokens", "scores_at_temperature"} <= set(health.patches)
        assert ON_GPU or "live_cpu_weights" in health.patches
        own = live.call(live.engine.process.client.health())
        if IS_CHECKED:
            assert HERE - {"sampled_logprobs_v2"} <= set(own.patches)
        sampling = SamplingParams(max_tokens=48)
        for one, theirs in zip(live.sample("auto", sampling), other.sample("required", sampling), strict=True):
            assert one.token_ids == theirs.token_ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)


PLUGIN = """
def register():
    from slipstream.inference.plugin.patches import cpu
    from slipstream.inference.plugin.patches.patch_table import Absent
    from vllm.model_executor.layers import utils

    def gone():
        raise Absent("dispatch_cpu_unquantized_gemm")

    cpu.live_weights, pack = gone, utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
"""


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.real_start
def test_an_engine_that_lacks_a_patch_starts_on_a_version_and_refuses_to_be_updated(
    tiny_model, tmp_path, installed, monkeypatch
):
    """A plugin of the user's makes the vLLM one that keeps its weights, and has nothing to patch for it."""
    installed("other", PLUGIN, "[vllm.general_plugins]\nother = other:register\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    parameters = describe(read_model_folder(tiny_model))
    version = Version(0, 3, digest(parameters))
    with start(tiny_model, tmp_path, version=version, parameters=parameters) as live:
        health = live.call(live.engine.process.client.health())
        assert "live_cpu_weights" in health.patches_left_out
        assert health.version == version
        assert live.sample("still", SamplingParams(max_tokens=4))[0].token_ids
        ticket = Ticket(Version(0, 4, version.digest), "disk", str(tiny_model), parameters)
        with pytest.raises(Exception, match=r'dispatch_cpu_unquantized_gemm.*weights.bridge = "restart"'):
            live.call(live.engine.apply(ticket, 60))


def test_the_extras_are_bounded_by_what_was_looked_at():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest, newest = patch_table.OLDEST, patch_table.NEWEST
    assert extras["gpu"] == [f"vllm>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"]
    (cpu_only,) = extras["cpu"]
    lower, upper = (tuple(map(int, part.split("."))) for part in re.findall(r"[\d.]+", cpu_only))
    assert oldest <= lower < upper <= (newest[0], newest[1] + 1)
