"""Packages that import what they export when it is first asked for: all of it is there, and little comes along."""

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["slipstream", "slipstream.config", "slipstream.runlog", "slipstream.plugins"])
def test_all_that_is_named_is_there_and_nothing_else(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_a_reward_worker_imports_neither_the_whole_schema_nor_the_run_folders_writer():
    """Each starts a process, and starts it again after a reward that hangs."""
    code = "import sys, slipstream.envs.scoring.worker; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "slipstream.config.schema",
        "slipstream.runlog.writer",
        "torch",
        "transformers",
        "vllm",
        "aiohttp",
        "httpx",
        "numpy",
    }
    assert "slipstream.envs.registry" in imported
    assert heavy.isdisjoint(imported)
