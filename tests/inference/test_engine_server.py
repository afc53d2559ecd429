"""What the engine's server asks of vLLM and its workers to start and to change weights; with a scripted vLLM."""

import asyncio
import json

import msgspec
import pytest

from slipstream.errors import WeightsError
from slipstream.inference.plugin import server as server_module
from slipstream.inference.plugin.service import State
from slipstream.processes import lifeline
from slipstream.records import Delta, Version, VersionSpan

from .fakes import put
from .scripted_host import ADAPTER, FIRST, GOOD, SECOND, SPEC, ask, disk, lora, made, plain, serving, until

FEATURES = {"fp32_residual": "fp32_residual", "replay_experts": "expert_choices", "shared_kernels": "shared_kernels"}


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(server_module, "sampling_arguments", lambda request: f"params of {request.id}")
    put(monkeypatch, exceptions={}, logprobs={"FlatLogprobs": tuple}).__version__ = "1.2.3"


@pytest.fixture
def removed(monkeypatch):
    paths = []
    monkeypatch.setattr(lifeline, "remove_at_end", paths.append)
    return paths


async def test_a_start_tells_what_was_patched_and_serves_the_version_that_it_has_verified(removed):
    server = made(version=FIRST, parameters=(SPEC,))
    server.host.described[0]["patches_left_out"] = {"plain_steps": "another source"}
    await server.start()
    assert (server.patches, server.patches_left_out) == (("flush",), {"plain_steps": "another source"})
    assert removed == ["/shm/a"]
    assert server.host.calls[1:] == [("fingerprint", [plain(SPEC)]), ("set_version", "0.1")]
    health = server.health()
    assert (health.status, health.version, health.reason, health.num_running) == ("ready", FIRST, "", 0)
    assert (health.vllm_version, health.patches, health.info) == ("1.2.3", ("flush",), {})
    assert health.patches_left_out == {"plain_steps": "another source"}
    assert health.plugin_version


@pytest.mark.parametrize(
    ("share", "why"),
    [(("ab", 4, "p"), r"weights differ from version 0.1: \('w',\)"), (("aa", 3, "p"), r"0.1 cannot be verified")],
)
async def test_a_start_with_other_weights_fails(share, why):
    server = made(version=FIRST, parameters=(SPEC,))
    server.host.shares = [{"w": share}] * 2
    with pytest.raises(RuntimeError, match=why):
        await server.start()
    assert (server.service.state, server.version) == (State.STARTING, None)


async def test_every_worker_must_have_the_plugin():
    server = made()
    server.host.described[1]["patches_left_out"] = {}
    with pytest.raises(RuntimeError, match="did not load Slipstream's plugin"):
        await server.start()


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
async def test_what_was_asked_for_must_be_there(name, is_asked, is_there):
    server = made(**{name: is_asked})
    patch = FEATURES[name]
    if is_there:
        server.host.described[0]["patches"].append(patch)
    else:
        server.host.described[0]["patches_left_out"] = {patch: "not in this vLLM"}
    if is_asked and not is_there:
        with pytest.raises(RuntimeError, match=rf"model.{name} = true cannot be \(not in this vLLM\)"):
            await server.start()
        return
    await server.start()
    assert server.service.is_serving


async def test_a_float32_head_is_told_and_needed_where_it_was_asked_for():
    server = made(fp32_head=True)
    await server.start()
    assert server.patches == ("flush", "fp32_head")
    server = made(fp32_head=True)
    server.host.described[1]["head_dtypes"] = ["bfloat16"]
    with pytest.raises(RuntimeError, match="computes those of this model in bfloat16, float32"):
        await server.start()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"version": FIRST, "parameters": (SPEC,), "deltas": (disk(delta=Delta(FIRST, ())),)}, "delta"),
        ({"adapter": lora(), "lora_rank": 4}, "adapter"),
    ],
)
@pytest.mark.parametrize("share", [None, ("ab", 4, "p"), ("aa", 3, "p")])
async def test_a_start_applies_deltas_and_an_adapter_and_verifies_them(settings, kind, share):
    server = made(**settings)
    verify = server._verify_applied

    async def changed(ticket):
        server.host.shares = [GOOD if share is None else dict.fromkeys(GOOD, share)] * 2
        return await verify(ticket)

    server._verify_applied = changed
    if share is None:
        await server.start()
        assert (server.version, server.service.is_serving) == (SECOND, True)
    else:
        with pytest.raises(RuntimeError, match=rf"^{kind} of version 0.2 differs or cannot be verified: .*'w"):
            await server.start()


async def test_a_whole_model_is_loaded_while_nothing_steps_and_then_everything_cached_is_dropped():
    server = serving(first_rank=3)
    report = await server.apply(disk())
    assert server.host.names == [
        *("pause", "load", "fingerprint", "reset_prefix_cache", "set_version", "reset_encoder_cache", "resume")
    ]
    assert server.host.calls[1][1:] == (json.loads(msgspec.json.encode(disk())), 3)
    assert server.host.calls[4] == ("set_version", "0.2")
    assert (report.version, report.mismatched, report.unverified) == (SECOND, (), ())
    assert (report.transfer_s, report.num_bytes, report.memory_bytes, report.stall_s) == (2.0, 40, 14, 0.0)
    assert 0 < report.verify_s < 60
    assert (server.version, server.service.is_serving) == (SECOND, True)


@pytest.mark.parametrize(
    ("shares", "stale", "mismatched", "unverified"),
    [
        ([{"w": ("ab", 4, "p")}] * 2, [], ("w",), ()),
        ([{"w": ("aa", 3, "p")}] * 2, [], (), ("w",)),
        ([GOOD, {"w": ("ab", 4, "p")}], [], ("w",), ()),
        ([GOOD], ["mlp"], ("mlp (packed copy)",), ()),
    ],
)
async def test_after_a_version_that_does_not_verify_nothing_steps_and_nothing_is_answered(
    shares, stale, mismatched, unverified
):
    server = serving()
    server.host.shares, server.host.stale = shares, stale
    report = await server.apply(disk())
    assert (report.mismatched, report.unverified) == (mismatched, unverified)
    assert server.host.names == ["pause", "load", "fingerprint"]
    assert (server.version, server.service.state) == (None, State.FAILED)
    assert server.service.reason == f"version 0.2 did not verify: {(mismatched + unverified)[0]}"
    with pytest.raises(WeightsError, match=r"holds no verified version \(version 0.2 did not verify"):
        await server.apply(disk(Version(0, 3), delta=Delta(SECOND, ())))
    server.host.shares, server.host.stale = [GOOD], []
    await server.apply(disk())
    assert server.host.names.count("pause") == 1
    assert server.service.is_serving


async def test_a_cache_that_vllm_does_not_drop_fails_the_update():
    server = serving()
    server.host.resets = False
    with pytest.raises(RuntimeError, match="refused to reset the prefix cache"):
        await server.apply(disk())
    assert server.service.reason == "applying version 0.2 failed: vLLM refused to reset the prefix cache"
    assert "resume" not in server.host.names


async def test_an_update_that_is_given_up_says_so():
    server = serving()
    applying = asyncio.create_task(server.apply(disk()))
    await until(lambda: server.host.names)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert server.service.reason == "applying version 0.2 was given up by who asked for it"


async def test_a_delta_goes_onto_the_version_in_service_alone():
    server = serving()
    await server.apply(disk(FIRST))
    server.host.calls.clear()
    with pytest.raises(WeightsError, match=r"against 0\.0"):
        await server.apply(disk(delta=Delta(Version(0, 0), ())))
    assert (server.host.calls, server.service.is_serving) == ([], True)
    await server.apply(disk(delta=Delta(FIRST, ())))
    assert server.version == SECOND


async def test_an_adapter_comes_while_vllm_steps_and_its_base_is_verified_once():
    server = serving(lora_rank=4)
    server.host.calls.clear()
    report = await server.apply(lora(FIRST))
    assert server.host.calls == [
        ("load_adapter", 1, "/adapter-1"),
        ("fingerprint_adapter", [plain(ADAPTER)], [1]),
        ("fingerprint", [plain(SPEC)]),
        ("set_version", "0.1"),
    ]
    assert (report.num_bytes, report.memory_bytes) == (99, 14)
    assert 0 < report.transfer_s < 60
    server.host.calls.clear()
    await server.apply(lora(SECOND))
    assert server.host.names == ["load_adapter", "fingerprint_adapter", "set_version"]
    assert server.host.calls[1][2] == [2, 1]
    server.host.calls.clear()
    await server.verify(lora(SECOND))
    assert server.host.names == ["fingerprint_adapter", "fingerprint"]


@pytest.mark.parametrize(
    ("share", "stale", "mismatched", "unverified"),
    [
        (("aa", 3, "p"), [], (), ("w",)),
        (("ab", 4, "p"), [], ("w",), ()),
        (("aa", 4, "p"), ["mlp"], ("mlp (beside the adapter)", "mlp (packed copy)"), ()),
    ],
)
async def test_a_base_that_did_not_verify_is_looked_at_again(share, stale, mismatched, unverified):
    server = serving(lora_rank=4)
    server.host.shares, server.host.stale = [{**GOOD, "w": share}], stale
    report = await server.apply(lora(FIRST))
    assert (report.mismatched, report.unverified) == (mismatched, unverified)
    server.host.shares, server.host.stale = [GOOD], []
    server.host.calls.clear()
    await server.apply(lora(SECOND))
    assert server.host.names == ["load_adapter", "fingerprint_adapter", "fingerprint", "set_version"]


async def test_adapters_need_room():
    with pytest.raises(RuntimeError, match="without room for an adapter"):
        await serving().apply(lora())
    with pytest.raises(RuntimeError, match="holds no adapter to verify"):
        await serving(lora_rank=4).verify(lora())
    server = serving(lora_rank=4)
    server.host.loads = False
    with pytest.raises(RuntimeError, match="vLLM refused the adapter in /adapter-2"):
        await server.apply(lora())


async def test_requests_keep_the_adapter_that_they_began_with_and_a_third_one_waits_for_them():
    server = serving(lora_rank=4)
    await server.apply(lora(FIRST))
    server.host.gate = asyncio.Event()
    first = asyncio.create_task(server.generate(ask("a", is_urgent=True)))
    await until(lambda: len(server.host.generated) == 1)
    server.host.gate, gate = None, server.host.gate
    server.host.clock.end = lambda is_busy: asyncio.sleep(0, 0.25 if is_busy() else 0.0)
    assert ((await server.apply(lora(SECOND))).stall_s, server.host.names.count("begin")) == (0.25, 1)
    second = await server.generate(ask("b"))
    assert [(id_, adapter.id, urgent) for id_, _, _, adapter, urgent in server.host.generated] == [
        ("a", 1, True),
        ("b", 2, False),
    ]
    assert second.versions == [VersionSpan(0, "0.2")]
    third = asyncio.create_task(server.apply(lora(Version(0, 3, "d3"))))
    for _ in range(50):
        await asyncio.sleep(0)
    assert ("load_adapter", 3, "/adapter-3") not in server.host.calls
    gate.set()
    assert (await first).versions == [VersionSpan(0, "0.1")]
    assert (await third).stall_s == 0.0, "nobody waits for tokens any more"
    assert ("remove_adapter", 1) in server.host.calls


async def test_a_context_that_is_kept_is_that_of_tokens_and_prompts_begin_again():
    server = serving(in_flight="keep")
    server.host.gate = asyncio.Event()
    asked = [asyncio.create_task(server.generate(ask(id_, is_urgent=id_ == "a"))) for id_ in "ab"]
    await until(lambda: len(server.host.generated) == 2)
    server.host.counts = {"a": 0, "b": 3}
    server.host.clock.end = lambda is_busy: asyncio.sleep(0, 0.0)
    await server.apply(disk())
    await until(lambda: len(server.host.generated) == 3)
    assert server.host.names == [
        *("begin", "pause", "load", "fingerprint", "set_version", "abort", "reset_encoder_cache", "resume")
    ]
    assert [(id_, prompt["cache_salt"], urgent) for id_, prompt, _, _, urgent in server.host.generated] == [
        ("a", "none", True),
        ("b", "none", False),
        ("a", "0.2-d2", True),
    ]
    server.host.gate.set()
    assert [completion.finish_reason for completion in await asyncio.gather(*asked)] == ["stop", "stop"]
    server.host.gate = asyncio.Event()
    given_up = asyncio.create_task(server.generate(ask("c")))
    await until(lambda: len(server.host.generated) == 4)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (len(server.host.generated), server.num_running) == (4, 0)


async def test_weights_that_were_written_in_place_are_used_before_their_proof():
    server = serving()
    await server.fence()
    assert (server.host.names, server.service.state) == (["pause", "settle"], State.FENCED)
    await server.go_on(SECOND)
    names = ["written", "reset_prefix_cache", "set_version", "reset_encoder_cache", "resume"]
    assert server.host.names[2:] == names
    assert (server.version, server.service.unproved, server.service.state) == (SECOND, "0.2", State.PROVING)
    server.host.calls.clear()
    report = await server.apply(disk(bridge="single_copy"))
    assert server.host.names == ["fingerprint"]
    assert (report.transfer_s, report.num_bytes, server.service.is_serving) == (0.0, 0, True)
    await server.go_on(Version(0, 3))
    server.host.shares = [{"w": ("ab", 4, "p")}]
    server.host.calls.clear()
    await server.apply(disk(Version(0, 3), bridge="single_copy"))
    assert server.host.names == ["fingerprint", "pause"]
    server.host.shares = [GOOD]
    await server.apply(disk(FIRST))
    server.host.calls.clear()
    await server.go_on(Version(0, 4))
    assert server.host.names[:2] == ["pause", "written"]


async def test_an_update_that_drains_begins_after_the_last_request():
    server = serving(in_flight="drain")
    await server.generate(ask("before"))
    server.host.gate = asyncio.Event()
    asked = [asyncio.create_task(server.generate(ask(id_))) for id_ in "ab"]
    await until(lambda: len(server.host.generated) == 3)
    updating = asyncio.create_task(server.apply(disk()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.host.names == ["begin"]
    asked[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.host.names == ["begin", "abort"]
    server.host.gate.set()
    async with asyncio.timeout(60):
        await updating
    assert (server.host.names[2:4], asked[1].result().finish_reason) == (["pause", "load"], "stop")


async def test_the_stall_of_weights_that_are_written_in_place_is_from_the_fence_to_a_token():
    server = serving()
    server.host.gate = asyncio.Event()
    running = asyncio.create_task(server.generate(ask()))
    await until(lambda: server.host.generated)
    waited = []
    server.host.clock.next = lambda is_busy, timeout_s: asyncio.sleep(0, waited.append((is_busy(), timeout_s)))
    await server.fence()
    assert server.host.names == ["begin", "pause", "settle"]
    await server.go_on(SECOND)
    assert (server.host.names[3:5], [is_busy for is_busy, _ in waited]) == (["begin", "written"], [True])
    assert 0 < waited[0][1] < 1, "the trainer waits meanwhile"
    server.host.gate.set()
    await server.apply(disk(bridge="single_copy"))
    assert (await running).finish_reason == "stop"
    await server.go_on(Version(0, 3))
    assert waited[-1][0] is False


async def test_weights_are_shared_while_nothing_steps(removed):
    server = serving()
    shared = await server.share((SPEC,))
    assert server.host.calls == [("pause",), ("settle",), ("share", [plain(SPEC)])]
    assert ([each.refused for each in shared], removed) == ([{"w": "why"}] * 2, ["/dev/shm/counter"])
    server.host.calls.clear()
    await server.leave()
    assert server.host.calls == [("leave",)]
