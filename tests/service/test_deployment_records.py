"""Deployments without a process: states, requests, contradictions, names."""

import json

import pytest

from slipstream.errors import ConfigError
from slipstream.service.deployment_pages import chat_page, list_page
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.deployments.gateway import request_of
from slipstream.service.deployments.records import Options, ServerSpec, stated
from slipstream.service.deployments.registry import Registry
from slipstream.service.runs import NoSuchRun
from slipstream.service.store import Store

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
    from slipstream.service.deployments import deployments

    monkeypatch.setattr(deployments, "HOST", "slipstream.no_such_module")
    from tests.waiting import until

    def has_failed():
        there.keep_going()
        return there.one("run-step-1").state == "failed"

    until(has_failed)
    reason = there.one("run-step-1").reason
    assert "does not start" in reason
    assert "no_such_module" in reason


def test_other_options_and_ranks_are_refused_with_both_values():
    from slipstream.plan.deployable import Deployable
    from slipstream.service.deployments.making import _contradiction, _Found

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
