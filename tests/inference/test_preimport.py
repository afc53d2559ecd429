"""A process that knows its settings later, and one that only tries them; without vLLM."""

import json
import os
import sys
import tempfile
from types import SimpleNamespace

import msgspec

from slipstream.inference.plugin import preimport, try_settings
from slipstream.inference.settings import EngineSettings
from slipstream.processes import stacks

from .fakes import put


def test_an_order_brings_the_environment_the_log_and_the_settings(monkeypatch, tmp_path):
    done, log = [], tmp_path / "engine.log"
    log.write_text("before\n")
    environment = {"HOME": "/root", "TMPDIR": "/old"}

    def imported(name):
        done.append(name)
        if len(done) == 2:
            raise ImportError(name)

    def order():
        done.append("order")
        given = {"environment": {"TMPDIR": str(tmp_path)}, "log": str(log), "settings": "/settings.json"}
        return json.dumps(given).encode() + b"\n"

    def moved(handle, number):
        os.write(handle, b"%d\n" % number)
        done.append(handle)

    monkeypatch.setattr(preimport.importlib, "import_module", imported)
    monkeypatch.setattr(preimport.os, "environ", environment)
    monkeypatch.setattr(preimport.os, "dup2", moved)
    monkeypatch.setattr(stacks, "register", lambda: done.append(("stacks", environment[stacks.VARIABLE])))
    monkeypatch.setattr(tempfile, "tempdir", "/old")
    for name in ("stdout", "stderr"):
        stream = SimpleNamespace(flush=lambda name=name: done.append(name), write=lambda text: None)
        monkeypatch.setattr(sys, name, stream)
    path = preimport.settings_later(order)
    monkeypatch.undo()
    assert path == "/settings.json"
    modules, (first, second, registered) = done[: done.index("order")], done[-3:]
    assert {"vllm", "slipstream.inference.plugin.weights.receiver"} <= set(modules)
    assert done[len(modules) : -3] == ["order", "stdout", "stderr"]
    assert first == second
    assert registered == ("stacks", str(stacks.prefix_of(log)))
    assert environment["TMPDIR"] == str(tmp_path)
    assert log.read_text() == "before\n1\n2\n"
    assert not os.path.exists(f"/proc/self/fd/{first}") or os.readlink(f"/proc/self/fd/{first}") != str(log)


def test_a_log_that_is_not_there_is_made_and_the_temporary_folder_looked_up_anew(monkeypatch, tmp_path):
    log = tmp_path / "new.log"
    given = {"environment": {}, "log": str(log), "settings": "s"}
    monkeypatch.setattr(preimport, "_IMPORTED", ())
    monkeypatch.setattr(preimport.os, "environ", {})
    monkeypatch.setattr(preimport.os, "dup2", lambda *_: None)
    monkeypatch.setattr(stacks, "register", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", "/old")
    assert preimport.settings_later(lambda: json.dumps(given).encode()) == "s"
    assert (log.exists(), tempfile.tempdir) == (True, None)


def test_settings_are_tried_by_making_vllms_configuration(monkeypatch, tmp_path):
    made = []

    def arguments(**given):
        return SimpleNamespace(create_engine_config=lambda: made.append(given))

    put(monkeypatch, engine__arg_utils={"AsyncEngineArgs": arguments})
    monkeypatch.setattr(try_settings, "engine_arguments", lambda settings: {"model": settings.model})
    monkeypatch.setattr(try_settings, "leave", made.append)
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode(EngineSettings("m", "", "float32", 8, 8)))
    monkeypatch.setattr(sys, "argv", ["try_settings", str(path)])
    try_settings.main()
    assert made == [{"model": "m"}, 0]
