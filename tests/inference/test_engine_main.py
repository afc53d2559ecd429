"""An engine's process from its start to its end, with a scripted server in the place of vLLM's."""

import asyncio
import signal
import sys
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from slipstream.inference.plugin import ENGINE_VARIABLE, main, register, start_marks
from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.settings import EngineSettings
from slipstream.processes import lifeline
from slipstream.processes.launchers import END

SETTINGS = EngineSettings("m", "/folder/engine.sock", "float32", 8, 8)
ASKED = {
    "fp32_residual": patch_table.FP32_RESIDUAL,
    "replay_experts": patch_table.EXPERTS,
    "shared_kernels": patch_table.SHARED_KERNELS,
}


class Server(SimpleNamespace):
    """Looked at until it has had enough."""

    doing = "waiting"

    def __init__(self, calls):
        super().__init__(calls=calls, host=SimpleNamespace(is_dead=False), hangs=False, error=None, looks=0)
        self.host.shutdown = lambda: calls.append("shutdown")
        self.on_look = lambda: None

    async def start(self):
        self.calls.append("start")
        if self.error:
            raise self.error

    def is_hung(self):
        self.looks += 1
        self.on_look()
        return self.hangs


@pytest.fixture
def process(monkeypatch):
    calls = []
    state = SimpleNamespace(calls=calls, server=Server(calls), handlers={}, exits=[])

    def note(name):
        return lambda *given, **options: calls.append((name, *given, *options.values()) if given or options else name)

    async def listen(server, socket):
        calls.append(("listen", socket))

        async def cleanup():
            calls.append("cleanup")

        return SimpleNamespace(cleanup=cleanup)

    def create(settings, host):
        calls.append(("server", settings.model, host))
        state.server.settings = settings
        return state.server

    monkeypatch.setattr(main, "engine_arguments", lambda settings: f"arguments of {settings.model}")
    monkeypatch.setattr(main, "create_host", lambda given, own_process: (given, own_process))
    monkeypatch.setattr(main, "EngineServer", create)
    monkeypatch.setattr(main, "listen", listen)
    monkeypatch.setattr(main, "leave", lambda code: state.exits.append(code))
    state.said = []
    monkeypatch.setattr(main.heartbeat, "doing", state.said.append)
    monkeypatch.setattr(start_marks, "mark", note("mark"))
    for name in ("begin_end", "remove_files", "leave_signals_to_trainer", "name_shared_memory", "shield_children"):
        monkeypatch.setattr(lifeline, name, note(name))
    monkeypatch.setattr(main, "gc", SimpleNamespace(**{n: note(n) for n in ("collect", "freeze", "enable", "disable")}))
    monkeypatch.setattr(main.stacks, "register", note("stacks"))
    return state


async def serve(process, monkeypatch, **settings):
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_signal_handler", process.handlers.__setitem__, raising=False)
    async with asyncio.timeout(60):
        return await main.serve(msgspec.structs.replace(SETTINGS, **settings))


BEGUN = [
    *("start", "collect", "freeze", "enable", ("listen", "/folder/engine.sock"), ("mark", "ready")),
]
ENDED = ["begin_end", "cleanup", "shutdown", "remove_files"]


@pytest.mark.parametrize("own_process", [True, False])
async def test_it_serves_until_it_is_told_to_end(own_process, process, monkeypatch):
    process.server.on_look = lambda: process.handlers[END]()
    assert await serve(process, monkeypatch, own_process=own_process) is True
    created = ("server", "m", ("arguments of m", own_process))
    assert process.calls == [created, ("mark", "verify"), *BEGUN, *ENDED]


async def test_it_ends_when_vllm_has_died(process, monkeypatch):
    process.server.on_look = lambda: setattr(process.server.host, "is_dead", process.server.looks >= 2)
    assert await serve(process, monkeypatch) is False
    assert set(process.said) == {"waiting"}
    assert process.calls[-4:] == ENDED


async def test_a_vllm_that_hangs_is_not_asked_to_end(process, monkeypatch, capsys):
    process.server.hangs = True

    def leave(code):
        process.calls.append(("exit", code))
        raise SystemExit(code)

    monkeypatch.setattr(main.os, "_exit", leave)
    with pytest.raises(SystemExit):
        await serve(process, monkeypatch)
    assert process.calls[-3:] == [("mark", "ready"), "remove_files", ("exit", 1)]
    assert "vLLM has made no token for 180 s while it computes requests: it hangs" in capsys.readouterr().err


async def test_what_a_start_that_fails_has_begun_is_ended(process, monkeypatch):
    process.server.error = RuntimeError("other weights")
    with pytest.raises(RuntimeError, match="other weights"):
        await serve(process, monkeypatch)
    assert process.calls[-3:] == ["start", "begin_end", "shutdown"]


def run(process, monkeypatch, tmp_path, settings, *, is_named=True, lives=True):
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    environment = {"HOME": "/root"}
    served = []

    def run_loop(work):
        work.close()
        served.append(work)
        return lives

    uvloop = ModuleType("uvloop")
    uvloop.run = run_loop
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)
    monkeypatch.setattr(main.os, "environ", environment)
    monkeypatch.setattr(lifeline, "Parent", lambda: SimpleNamespace(receive="order"))
    monkeypatch.setattr(main, "settings_later", lambda order: {"order" * (not is_named): str(path)}[order])
    monkeypatch.setattr(sys, "argv", ["main", *([str(path)] if is_named else [])])
    main.main()
    assert len(served) == 1
    return {name: value for name, value in environment.items() if name.startswith("SLIPSTREAM")}


@pytest.mark.parametrize("asked", [*ASKED, None])
def test_what_was_asked_for_is_known_to_all_of_its_processes(asked, process, monkeypatch, tmp_path):
    settings = msgspec.structs.replace(SETTINGS, patches="checked", **({asked: True} if asked else {}))
    found = run(process, monkeypatch, tmp_path, settings)
    assert found == {
        ENGINE_VARIABLE: "1",
        patch_table.VARIABLE: "checked",
        **({ASKED[asked]: "1"} if asked else {}),
    }
    shielded = ("shield_children", tmp_path.__class__("/folder"))
    assert process.calls == ["disable", "leave_signals_to_trainer", "stacks", "name_shared_memory", shielded]
    assert process.exits[0] == 0


def test_one_that_was_there_before_its_settings_takes_them_later(process, monkeypatch, tmp_path, capsys):
    found = run(process, monkeypatch, tmp_path, SETTINGS, is_named=False, lives=False)
    assert found[patch_table.VARIABLE] == "auto"
    assert "stacks" not in process.calls, "which it does once it knows its log"
    assert process.exits == [1]
    assert "the engine core died" in capsys.readouterr().err


def test_shielded_children_end_after_their_engine_and_not_before(monkeypatch, tmp_path):
    monkeypatch.setenv(lifeline._ENDING, "")
    mark = tmp_path / "ending"
    mark.touch()
    lifeline.shield_children(tmp_path)
    assert not mark.exists(), "that of the one before"
    lifeline.shield_children(tmp_path)
    handlers = {signal.SIGTERM: lambda number, frame: ended.append((number, frame)), signal.SIGINT: signal.SIG_IGN}
    ended = []
    monkeypatch.setattr(lifeline.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(lifeline.signal, "getsignal", handlers.get)
    monkeypatch.setattr(lifeline.multiprocessing, "parent_process", lambda: None)
    lifeline.follow_end()
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT}, "it has no parent"
    monkeypatch.setattr(lifeline.multiprocessing, "parent_process", lambda: "one")
    lifeline.follow_end()
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    assert handlers[signal.SIGINT] is signal.SIG_IGN
    handlers[signal.SIGUSR1](signal.SIGUSR1, None)
    handlers[signal.SIGTERM](signal.SIGTERM, "frame")
    assert ended == []
    lifeline.begin_end()
    assert mark.exists()
    handlers[signal.SIGTERM](signal.SIGTERM, "frame")
    assert ended == [(signal.SIGTERM, "frame")]
    monkeypatch.delenv(lifeline._ENDING)
    lifeline.begin_end()
    before = dict(handlers)
    lifeline.follow_end()
    assert handlers == before


def test_files_are_removed_once_and_those_of_others_never(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(lifeline, "_to_remove", set())
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for path in (mine, theirs):
        path.touch()
    lifeline.remove_at_end(str(tmp_path / "gone"))
    lifeline.remove_at_end(str(mine))
    lifeline.remove_files()
    assert (mine.exists(), theirs.exists()) == (False, True)
    mine.touch()
    lifeline.remove_files()
    assert mine.exists()


def test_vllms_processes_are_prepared_in_an_engine_alone(process, monkeypatch):
    for owner, name in (
        *((lifeline, "follow_parent"), (lifeline, "follow_end"), (patch_table, "apply_all")),
        (start_marks, "follow_executor"),
    ):
        monkeypatch.setattr(owner, name, lambda name=name: process.calls.append(name))
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    register()
    assert process.calls == []
    monkeypatch.setenv(ENGINE_VARIABLE, "1")
    register()
    assert sorted(process.calls) == sorted(
        ["stacks", "name_shared_memory", "apply_all", "follow_executor", "follow_parent", "follow_end"]
    )
