import asyncio
import contextlib
import os
import socket
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from slipstream.config.inference import InferenceServer
from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.inference.addresses import ControlAddress, addresses_of, own_host_of
from slipstream.inference.lending import (
    KEY_VARIABLE,
    SILENT_S,
    TOKEN_VARIABLE,
    Held,
    Lease,
    ServerFacts,
    Terms,
    place_of,
)
from slipstream.inference.plugin import serving
from slipstream.inference.plugin.control import listen_control
from slipstream.inference.plugin.service import Service
from slipstream.inference.server_client import ServerClient, read_facts
from slipstream.inference.server_engine import ServerEngine
from slipstream.inference.settings import EngineSettings
from slipstream.processes.rendezvous import INTERFACE
from slipstream.records import ApplyReport, EngineHealth, Ticket, Version
from tests.certificates import certificate
from tests.waiting import Clock

TOKEN = "a token"
FACTS = ServerFacts("m", {}, "float32", 64, 8, 0, world_size=1, on_gpu=False)


def test_one_run_has_the_engine_until_it_ends_or_is_silent():
    clock = Clock(100.0)
    lease = Lease(clock)
    one, other = Terms("one", "1"), Terms("other", "2")
    assert lease.take(one)
    assert not lease.take(one), "that renews it"
    with pytest.raises(Held, match="the run one holds"):
        lease.take(other)
    with pytest.raises(Held):
        lease.check("2")
    clock.now += SILENT_S - 1
    lease.check("1")  # each call does as well
    clock.now += SILENT_S - 1
    with pytest.raises(Held):
        lease.take(other)
    lease.gave_weights()
    clock.now += 2
    assert lease.take(other)
    with pytest.raises(Held, match="the run other holds"):
        lease.check("1")
    assert lease.describe() == {"instance": lease.instance, "run": "other", "weights_of": "one"}
    lease.end("1")  # nothing: it has lost it
    lease.end("2")
    assert lease.take(one)


def test_its_clients_get_a_runs_weights_from_its_first_version_on():
    clock = Clock(100.0)
    lease, run, again = Lease(clock), Terms("one", "1", attempt="a"), Terms("one", "1", attempt="b")
    lease.take(run)
    assert not lease.serves(place_of("1")), "the weights are those of the files"
    lease.gave_weights()
    lease.take(run)
    assert [lease.serves(place_of(each)) for each in "12"] == [True, False]
    lease.take(again)
    assert not lease.serves(place_of("1")), "it may go on from an earlier version"
    lease.gave_weights()
    clock.now += SILENT_S + 1
    assert not lease.serves(place_of("1"))
    lease.take(again)
    lease.end("1")
    lease.take(Terms("two", "2"))
    assert not lease.serves(place_of("2"))


def test_addresses_need_their_tokens(monkeypatch):
    monkeypatch.setenv("TOKEN", TOKEN)
    unix, there = addresses_of(
        [InferenceServer(url="unix:/x"), InferenceServer(url="http://h:1", token_variable="TOKEN")]
    )
    assert (unix.path, unix.base, there.path, there.base) == ("/x", "http://engine", "", "http://h:1")
    assert TOKEN not in repr(there)
    assert own_host_of([unix, ControlAddress("http://127.0.0.1:1")]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="NO_TOKEN is not set"):
        addresses_of([InferenceServer(url="http://h:1", token_variable="NO_TOKEN")])


def test_a_taken_port_is_replaced_by_the_next_free_one():
    first = serving.bound("127.0.0.1", 0)
    port = first.getsockname()[1]
    with first, serving.bound("127.0.0.1", port) as second:
        assert port < second.getsockname()[1] < port + 100
    with pytest.raises(ConfigError, match=r"nothing can listen at 203\.0\.113\.1"):
        serving.bound("203.0.113.1", 0)


class Engine(SimpleNamespace):
    """Takes any version."""

    def __init__(self):
        super().__init__(service=Service(), version=None, calls=[])
        self.service.started()

    def health(self):
        return EngineHealth("ready", self.version)

    async def apply(self, ticket):
        self.version = ticket.version
        self.calls.append(("apply", ticket.version.name))
        return ApplyReport(ticket.version)

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((name, *arguments))

        return call


@contextlib.asynccontextmanager
async def control(token=TOKEN, tls=None, port=0):
    """A real control listener before an engine that computes nothing."""
    server = Engine()
    listening = serving.bound("127.0.0.1", port)
    runner = await listen_control(server, FACTS, Lease(), listening, token=token, tls=tls)
    scheme = "https" if tls else "http"
    try:
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        await runner.cleanup()


def client(url, token=TOKEN, run_id="1"):
    return ServerClient(ControlAddress(url, token), run_id)


async def test_calls_need_token_and_lease(tmp_path):
    async with control() as (url, server):
        wrong, right, other = client(url, "another"), client(url), client(url, run_id="2")
        assert (await wrong.known_health()).info == {}
        with pytest.raises(ConfigError, match="refuses the token"):
            await wrong.facts()
        with pytest.raises(EngineError, match="status 401"):
            await wrong.leave(5.0)
        assert await right.facts() == FACTS
        assert (await right.lend(Terms("one", "1", first_rank=3))).world_size == 1
        with pytest.raises(Held, match="the run one holds"):
            await other.lend(Terms("other", "2"))
        with pytest.raises(EngineError, match="status 423"):
            await other.leave(5.0)
        assert await right.sees(tmp_path)
        assert server.calls == [("lend", Terms("one", "1", first_rank=3))]
        assert (await right.known_health()).info["run"] == "one"
        await right.end_lease()
        await other.lend(Terms("other", "2"))
        for each in (wrong, right, other):
            await each.close()


async def test_tls_is_verified(tmp_path, monkeypatch):
    path, context = certificate(tmp_path, "127.0.0.1")
    async with control(tls=context) as (url, _):
        untrusting = client(url)
        with pytest.raises(ConfigError, match=r"cannot be trusted .*certificate.* in SSL_CERT_FILE"):
            await untrusting.facts()
        await untrusting.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        trusting = client(url)
        assert await trusting.facts() == FACTS
        await trusting.close()


async def test_without_a_token_web_pages_are_refused():
    """A page's own name may point here, and a page may send what it cannot read."""
    async with control(token="") as (url, _), aiohttp.ClientSession() as http:

        async def status(**headers):
            async with http.get(f"{url}/facts", headers=headers) as answer:
                return answer.status

        assert await status() == 200
        assert await status(Host="localhost:1") == 200
        assert await status(Host="page.example") == 421
        assert await status(Origin="http://page.example") == 421


@contextlib.contextmanager
def doors(control, host="127.0.0.1", port=0):
    settings = serving.ServerSettings(EngineSettings("", "float32", 8, 1), control, host, port, "m")
    made = serving.Doors(settings)
    try:
        yield made
    finally:
        made.close()
        made.control.close()
        made.inference.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("0.0.0.0:0",), f"--control 0.0.0.0:0 can be reached from other machines: .* {TOKEN_VARIABLE}"),
        (("unix:/x/", "0.0.0.0"), f"--host 0.0.0.0 can be reached from other machines: .* {KEY_VARIABLE}"),
    ],
)
def test_an_address_for_other_machines_needs_its_secret(options, problem, monkeypatch):
    for name in (TOKEN_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=problem), doors(*options):
        pass


def test_secrets_leave_the_environment_and_an_interface_needs_its_address(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    monkeypatch.setenv(INTERFACE, "none")  # so that the end of the test removes what the code sets
    monkeypatch.delenv(INTERFACE)
    with doors("127.0.0.1:0") as made:
        assert (made.token, made.key, os.environ[INTERFACE]) == (TOKEN, "a key", "lo")
    assert not {TOKEN_VARIABLE, KEY_VARIABLE} & os.environ.keys()
    monkeypatch.delenv(INTERFACE)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(ConfigError, match=r"no network interface has the address 0\.0\.0\.0"), doors("0.0.0.0:0"):
        pass


def test_a_control_socket_is_private_and_named_by_the_port(tmp_path):
    with doors(f"unix:{tmp_path}/") as made:
        path = Path(made.url.removeprefix("unix:"))
        assert path.name == f"{made.inference.getsockname()[1]}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="another engine answers"), doors(made.url):
            pass
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with doors(f"unix:{path}"):
        pass


def test_the_plan_waits_for_a_server_and_names_it(tmp_path):
    listening = serving.bound("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"{url} does not answer .* within 0.5 s: start it with slipstream engine"):
        read_facts([InferenceServer(url=url)], 0.5, 60)
    assert time.monotonic() - began < 10


def test_a_longer_wait_for_a_server_is_told_once(tmp_path, capfd):
    url = f"unix:{tmp_path / 'engine.sock'}"
    with pytest.raises(ConfigError, match="within 3 s"):
        read_facts([InferenceServer(url=url)], 3, 60)
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith(f"the server at {url} does not answer (")
    assert told.endswith("): the run waits up to 3 s for it")


def test_the_plan_waits_longer_for_a_server_that_loads(tmp_path):
    began = time.monotonic()
    with doors(f"unix:{tmp_path}/") as made, made.busy():
        given = [InferenceServer(url=made.url)]
        with pytest.raises(ConfigError, match=r"still loads its weights after 2 s: raise inference\.start_timeout_s"):
            read_facts(given, 0.1, 2)
    assert time.monotonic() - began > 2


def engine(url, **options):
    events = []
    made = ServerEngine(
        ControlAddress(url, TOKEN),
        Terms("one", "1"),
        world_size=1,
        **{"start_timeout_s": 20.0, "apply_timeout_s": 20.0, "max_restarts": 1, "silence_s": 20.0, **options},
        on_event=lambda kind, **fields: events.append((kind, fields)),
    )
    return made, events


async def test_a_second_run_is_refused_by_the_name_of_the_first():
    async with control() as (url, _):
        holder = client(url, run_id="0")
        await holder.lend(Terms("first", "0"))
        second, _ = engine(url)
        refused = asyncio.create_task(second.wait_ready())
        await asyncio.sleep(2.0)
        assert not refused.done(), "the first may have been killed"
        await holder.lend(Terms("first", "0"))
        with pytest.raises(ConfigError, match=f"{url} is not free, as the run first holds it: end that run"):
            await refused
        await holder.end_lease()
        assert (await second.wait_ready()).status == "ready"
        await second.stop()
        await holder.lend(Terms("first", "0"))
        await holder.close()


async def test_the_next_attempt_of_a_run_has_it_at_once():
    async with control() as (url, server):
        killed, first = client(url), Terms("one", "1", attempt="first")
        await killed.lend(first)
        await killed.close()
        made, _ = engine(url, start_timeout_s=5.0)
        await made.wait_ready()
        await made.stop()
        assert server.calls == [("lend", first), ("lend", Terms("one", "1"))]


async def test_a_server_that_does_not_come_is_named_after_the_start_timeout():
    made, _ = engine("http://127.0.0.1:9", start_timeout_s=0.5)
    with pytest.raises(DeadlineError, match=r"127.0.0.1:9 was not ready within 0.5 s \(inference.start_timeout_s\)"):
        await made.wait_ready()
    await made.stop()


def version(step, bridge="disk"):
    return Ticket(Version(0, step, f"d{step}"), bridge, "/weights", ())


async def test_a_lost_server_gets_the_files_of_its_version_again():
    async with control() as (url, _):
        made, events = engine(url)
        await made.wait_ready()
        await made.apply(version(3), 20.0)
    assert made.is_up, "nobody has asked"
    with pytest.raises(EngineError, match=f"the server at {url} is lost"):
        await made.verify(version(3), 20.0)
    assert not made.is_up
    async with control(port=int(url.rpartition(":")[2])) as (again, second):
        assert again == url
        assert await made.replace(), "files have it"
        assert second.calls == [("lend", Terms("one", "1")), ("apply", "0.3")]
        assert [kind for kind, _ in events] == ["engine_restart", "warning"]
        await made.stop()


async def test_a_server_whose_process_has_ended_is_found_without_a_call(monkeypatch):
    """In a broken broadcast the first error may be that of another server."""
    monkeypatch.setattr("slipstream.inference.server_engine.RENEW_S", 0.1)
    async with control() as (url, _):
        made, _ = engine(url)
        await made.wait_ready()
    async with asyncio.timeout(5):
        while made.is_up:
            await asyncio.sleep(0.05)
    await made.stop()


async def test_one_that_had_its_weights_by_broadcast_waits_for_a_version():
    async with control() as (url, _):
        made, _ = engine(url)
        await made.wait_ready()
        await made.apply(version(3, "broadcast"), 20.0)
    with pytest.raises(EngineError):
        await made.verify(version(3), 20.0)
    async with control(port=int(url.rpartition(":")[2])):
        assert not await made.replace()
        await made.stop()
