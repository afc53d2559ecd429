"""What is compiled is kept in a folder of the user's, and found by the next process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.config.user_code import import_file
from slipstream.inference.preimport import engine_environment
from slipstream.launch.startup import compile_caches
from slipstream.launch.startup.compile_caches import cache_root, key, persistent_caches, private_folder

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
COMPILE = """
import torch
from slipstream.launch.startup.compile_caches import persistent_caches
from torch._dynamo.utils import counters
import slipstream.trainer.model.compilation
with persistent_caches(print):
    weight = torch.ones(5, 3, requires_grad=True)
    made = torch.compile(lambda x: torch.tanh(x @ weight) * x.sum(), dynamic=True)(torch.ones(7, 5))
    made.sum().backward()
found, saved = counters["inductor"], counters["aot_autograd"]
print("misses", found["fxgraph_cache_miss"], "hits", found["fxgraph_cache_hit"], "of both", saved["autograd_cache_hit"])
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """As it is for a user who has set nothing, whose home is `tmp_path`."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # and so it is as before at the end, whatever torch sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def values():
    return [os.environ.get(name) for name in NAMES]


def test_a_folder_of_the_users_own_for_the_length_of_a_run(tmp_path):
    said = []
    with persistent_caches(said.append):
        root = tmp_path / "cache" / "slipstream" / key()
        assert values() == [str(root / name) for name in ("torch", "triton", "vllm")]
        assert root.stat().st_mode & 0o777 == 0o700
    assert (values(), said) == ([None] * 3, [])


def test_what_is_set_decides_for_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with persistent_caches(print):
        assert values()[1] == "/elsewhere"
        assert values()[2].startswith(str(tmp_path))
    assert values() == [None, "/elsewhere", None]


def test_what_torch_has_set_by_itself_was_set_by_nobody(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    default = cache_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default
    with persistent_caches(print):
        assert values()[0].startswith(str(tmp_path))
        assert cache_dir() == values()[0]
    assert values()[0] == default


def test_where_it_is_follows_xdg(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert str(cache_root({})) == "/home/me/.cache/slipstream"
    assert str(cache_root({"XDG_CACHE_HOME": "relative"})) == "/home/me/.cache/slipstream"
    assert str(cache_root({"XDG_CACHE_HOME": "/big"})) == "/big/slipstream"


def test_a_folder_that_cannot_be_used_is_a_warning(monkeypatch, tmp_path):
    """And another one for this process alone takes its place: nobody else may have made the usual one in /tmp."""
    (tmp_path / "cache").touch()
    said = []
    with persistent_caches(said.append):
        root = Path(values()[0]).parent
        assert root.stat().st_mode & 0o777 == 0o700
        assert values() == [str(root / name) for name in ("torch", "triton", "vllm")]
    assert not root.exists()
    assert values() == [None] * 3
    assert len(said) == 1
    assert "XDG_CACHE_HOME" in said[0]


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    folder = private_folder(tmp_path / "cache" / "mine")
    assert private_folder(folder) == folder
    folder.chmod(0o777)
    with pytest.raises(OSError, match="only you"):
        private_folder(folder)
    folder.chmod(0o700)
    folder.parent.chmod(0o770)  # others could put another in its place
    with pytest.raises(OSError, match="only you"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="only you"):
        private_folder(tmp_path / "link")


def test_the_name_changes_with_what_decides_whether_code_is_valid(monkeypatch, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{16}", key())
    names = {key()}
    monkeypatch.setattr(compile_caches, "versions", lambda: {"torch": "0.1", "vllm": "0.2"})
    names.add(key())
    (tmp_path / "0000:01").mkdir()
    (tmp_path / "0000:01" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    monkeypatch.setattr(compile_caches, "_GPUS", tmp_path)
    names.add(key())
    monkeypatch.setenv("CXX", sys.executable)
    names.add(key())
    (tmp_path / "cpu").write_text("model name : A CPU\nflags\t: avx2 fma\n\nmodel name : another\n")
    monkeypatch.setattr(compile_caches, "_CPUINFO", tmp_path / "cpu")
    names.add(key())
    assert len(names) == 5


def test_bytecode_is_kept_where_python_keeps_none(monkeypatch, tmp_path):
    """As in a container that sets PYTHONDONTWRITEBYTECODE, with packages that were not compiled at installation."""
    for name in ("large", "mine", "beside"):
        (tmp_path / f"{name}.py").write_text("import beside\n" if name == "mine" else "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compile_caches, "_LARGE", ("large",))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import large"]
    for name in NAMES:  # the compilers' own folders are the user's business
        monkeypatch.setenv(name, "/elsewhere")

    with persistent_caches(print):
        folder = Path(sys.pycache_prefix)
        assert (folder.parent, sys.dont_write_bytecode) == (tmp_path / "cache" / "slipstream" / key(), False)
        with persistent_caches(print):  # of a part of the run
            assert sys.pycache_prefix == str(folder)
        import_file(tmp_path / "mine.py", "reward.file")
        assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(folder), False)
        assert not list(tmp_path.rglob("*.pyc")), "bytecode of a file that the user changes could be old"
        subprocess.run(command, check=True, env=engine_environment(os.environ))
        assert f"large.{sys.implementation.cache_tag}.pyc" in [path.name for path in folder.rglob("*.pyc")]
        assert "PYTHONPYCACHEPREFIX" not in {**os.environ, **engine_environment(os.environ, on_this_host=False)}
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, True)
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"

    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})  # as an installer does
    with persistent_caches(print):
        assert sys.pycache_prefix is None


def begin(tmp_path):
    return subprocess.Popen([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, text=True, env={**os.environ})


def counted(process):
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    return [int(number) for number in re.findall(r"\d+", out)]


@pytest.mark.full
def test_two_at_once_and_the_next_process_compiles_nothing(tmp_path):
    both = [begin(tmp_path), begin(tmp_path)]
    first = [counted(process) for process in both]
    assert any(misses for misses, _, _ in first)
    misses, hits, of_both = counted(begin(tmp_path))
    assert misses == 0
    assert hits >= 2  # forward and backward
    assert of_both == 1
