"""Deployments without a process: states, requests, contradictions, names."""

import asyncio
import contextlib
import json

import httpx
import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.http_listener import serve, tcp_socket
from slipstream.plan.deployable import Deployable
from slipstream.service.access import Access, new_token
from slipstream.service.deployment_pages import chat_page, list_page
from slipstream.service.deployments import deployments
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.deployments.gateway import Gateway, request_of
from slipstream.service.deployments.making import _contradiction, _Found, _gpu
from slipstream.service.deployments.records import Options, ServerSpec, stated
from slipstream.service.deployments.registry import Registry
from slipstream.service.runs import LocalRuns, NoSuchRun, ShownPlace
from slipstream.service.store import Store
from slipstream.service.submission import unix_user
from tests.other_user import NOBODY, needs_root
from tests.waiting import until

from .made import deployment

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_STATE", str(tmp_path))
    return LocalDeployments(Store(tmp_path))


def test_undeploying_is_the_last_state():
    record = deployment(state="ready")
    again = stated(record, "deploying", "killed", 5.0)
    assert (again.state, again.reason, again.changed) == ("deploying", "killed", 5.0)
    assert stated(again, "deploying", "killed", 6.0) is again
    ends = stated(record, "undeploying", "", 5.0)
    assert stated(ends, "ready", "", 6.0) is ends


def test_a_request_has_the_runs_settings_unless_it_brings_its_own():
    record = deployment(request={"stop_token_ids": [1, 2], "chat_template_kwargs": {"enable_thinking": False, "a": 1}})
    assert request_of(record, CHAT, {"model": "x", "n": 2}) == {
        "model": f"run-step-1@{'ab' * 8}",
        "n": 2,
        "stop_token_ids": [1, 2],
        "chat_template_kwargs": {"enable_thinking": False, "a": 1},
    }
    own = {"chat_template_kwargs": {"enable_thinking": True}, "stop_token_ids": [3]}
    found = request_of(record, CHAT, own)
    assert found["chat_template_kwargs"] == {"enable_thinking": True, "a": 1}
    assert found["stop_token_ids"] == [3]
    assert "chat_template_kwargs" not in request_of(record, TEXT, {})


def test_a_name_is_no_path_and_belongs_to_its_owner(there, tmp_path):
    registry = Registry(Store(tmp_path))
    with registry.locked():
        registry.put(deployment())
    (registry.root / "outside.json").write_bytes((registry.root / "records/run-step-1.json").read_bytes())
    assert [each.name for each in there.all()] == ["run-step-1"]
    other = LocalDeployments(Store(tmp_path), "bob", is_service=True)
    assert other.all() == []
    for who, names in ((other, ("run-step-1",)), (there, ("../outside", "..", "", "/etc/passwd", "run-step-2", "a\0"))):
        for name in names:
            with pytest.raises(NoSuchRun):
                who.one(name)
            with pytest.raises(NoSuchRun):
                who.undeploy(name)
    (registry.root / "records/bad.json").write_text("{")
    assert [each.name for each in there.all()] == ["run-step-1"]
    there.undeploy("run-step-1")  # without a host at once
    assert there.all() == []


def test_a_host_that_does_not_start_is_named(there, monkeypatch):
    registry = Registry(Store())
    with registry.locked():
        registry.put(deployment())
    monkeypatch.setattr(deployments, "HOST", "slipstream.no_such_module")

    def has_failed():
        there.keep_going()
        return there.one("run-step-1").state == "failed"

    until(has_failed)
    reason = there.one("run-step-1").reason
    assert "does not start" in reason
    assert "no_such_module" in reason


def test_other_options_and_ranks_are_refused_with_both_values():
    spec = ServerSpec("k", "/m", "/base", (), Options(2, 64, 0.8), max_rank=8)
    found = _Found(deployment(rank=9), Deployable("a", "/m"), False)
    assert _contradiction(spec, found, Options()) == (
        "the adapter of run-step-1 has rank 9, and the server of /base takes 8 at most"
    )
    found = _Found(deployment(), Deployable("a", "/m"), False)
    assert _contradiction(spec, found, Options(room=2, max_model_len=64)) == ""
    assert "--max-model-len 32 was asked for, and the server of /base has 64" in _contradiction(
        spec, found, Options(max_model_len=32)
    )
    assert "vision tower" in _contradiction(spec, _Found(deployment(), Deployable("a", "/m"), True), Options())


def test_the_pages_of_deployments_show_hostile_text_as_text(there):
    registry = Registry(Store())
    hostile = "<script>alert(1)</script>"
    with registry.locked():
        registry.put(deployment(reason=hostile, base=hostile, state="failed", system_prompt=hostile))
    found = there.all()
    for page in (list_page(found, hostile), chat_page(found[0], [{"role": "user", "content": hostile}], hostile)):
        assert "<script" not in page.lower()
        assert "</script" not in page.lower()
    kept = json.dumps([{"role": "user", "content": '"><b>'}])
    assert kept not in chat_page(found[0], [{"role": "user", "content": '"><b>'}])


def test_the_address_is_chosen_before_the_first_deployment(there):
    there.listen("0.0.0.0", 1234)
    assert Registry(Store()).listening().port == 1234
    registry = Registry(Store())
    with registry.locked():
        lock = registry.claim_host()
    assert lock is not None
    with pytest.raises(ConfigError, match=r"--port 99 was asked for, and deployments are at .*:1234"):
        there.listen(None, 99)
    there.listen("0.0.0.0", 1234)


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        (None, 99999, "--port 99999 is no port"),
        (None, -1, "--port -1 is no port"),
        ("no such host", None, "no address"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_a_deployment_is_made(there, host, port, said):
    with pytest.raises(ConfigError, match=said):
        there.listen(host, port)
    assert Registry(Store()).listening().port is None


def test_a_server_gets_the_gpu_with_the_most_free_memory(there, monkeypatch):
    gpus = [ShownPlace(f"GPU-{n}", "a", 80.0, free, (), ()) for n, free in enumerate((10.0, 70.0, 40.0))]
    monkeypatch.setattr(LocalRuns, "places", lambda self: gpus)
    assert _gpu(Store(), None) == (("GPU-1",), 0.8)
    assert _gpu(Store(), 0.5) == (("GPU-1",), 0.5)
    gpus[1:] = []
    assert _gpu(Store(), None) == (("GPU-0",), 0.119)
    with pytest.raises(ConfigError, match=r"0.5 of GPU-0 is 40.0 GiB, and 10.0 GiB are free"):
        _gpu(Store(), 0.5)


def test_chat_names_the_deployments(there, capsys):
    registry = Registry(Store())

    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["chat", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "there is none" in refused()
    with registry.locked():
        registry.put(deployment(state="failed", reason="a fault"))
    assert "run-step-1 is failed a fault" in refused()
    assert "run-step-1 is failed a fault" in refused("run-step-1")
    with registry.locked():
        registry.put(deployment("run-step-2"))
    assert "a deployment: run-step-1, run-step-2" in refused()
    assert "run-step-3 does not exist" in refused("run-step-3")


@contextlib.asynccontextmanager
async def gateway(store, *, needs_token):
    """The address without a server, on all interfaces."""
    registry, owner = Registry(store), unix_user()
    app = Access(Gateway(registry, {}, owner), store, owner, needs_token, key=registry.key(), max_body=1000)
    listener = await serve(app, tcp_socket("0.0.0.0", 0))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}/v1") as client:
            yield client, registry
    finally:
        await listener.close()


async def names(client, key=""):
    answer = await client.get("/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    return [each["id"] for each in answer.json()["data"]] if answer.status_code == 200 else answer.status_code


async def test_outside_loopback_a_key_is_needed_and_a_token_shows_the_users_own(there, tmp_path):
    store = Store(tmp_path)
    async with gateway(store, needs_token=True) as (client, registry):
        with registry.locked():
            registry.put(deployment("a-step-1", owner="alice", state="ready"))
            registry.put(deployment("b-step-1", owner="bob", state="ready", created=2.0))
        alice = new_token(store, "alice")
        assert await names(client) == 401
        assert await names(client, "wrong") == 401
        assert await names(client, alice) == ["a-step-1"]
        assert await names(client, registry.key()) == ["a-step-1", "b-step-1"]
        bearer = {"Authorization": f"Bearer {alice}"}
        for model, status in (("a-step-1", 503), ("b-step-1", 404), ("../records/a-step-1", 404), ([], 404)):
            answer = await client.post("/chat/completions", json={"model": model}, headers=bearer)
            assert answer.status_code == status, model
        for body, status in ((b"{", 400), (b"5", 400), (b"x" * 2000, 413), (b"[" * 900, 400)):
            assert (await client.post("/completions", content=body, headers=bearer)).status_code == status
        for path in ("/embeddings", "/load_lora_adapter", "/../metrics", "/chat/completions/x"):
            assert (await client.post(path, json={"model": "a-step-1"}, headers=bearer)).status_code == 404
        other = {**bearer, "Origin": "http://evil.example"}
        assert (await client.post("/completions", json={"model": "a-step-1"}, headers=other)).status_code == 403


@needs_root
async def test_on_loopback_another_user_of_this_machine_needs_the_key(there, tmp_path):
    async with gateway(Store(tmp_path), needs_token=False) as (client, registry):
        assert await names(client) == []
        assert (await client.get("/models", headers={"Host": "evil.example"})).status_code == 421
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "/usr/bin/python3", "-c"]
        for key, said in (("", "403"), (registry.key(), "list")):
            ask = f"import urllib.request as u; print(u.urlopen(u.Request('{client.base_url}models', headers="
            ask += f"{{'Authorization': 'Bearer {key}'}})).read())"
            child = await asyncio.create_subprocess_exec(
                *user, ask, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            assert said in (await child.communicate())[0].decode()
