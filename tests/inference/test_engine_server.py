"""What the engine's server asks of vLLM and its workers to start and to change weights; with a scripted vLLM."""

import asyncio

import pytest

from slipstream.errors import WeightsError
from slipstream.inference.lending import Terms
from slipstream.inference.plugin import server as server_module
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService, State
from slipstream.inference.settings import EngineSettings
from slipstream.records import Delta, GenerateRequest, ParameterSpec, SamplingParams, SessionOpening, Ticket, Version

from .fakes import GOOD, Host, put, until

SPEC = ParameterSpec("w", (4,), "float32", "00000000000000aa")
ADAPTER = ParameterSpec("w.lora_A.weight", (1, 4), "float32", "00000000000000bb")
FIRST, SECOND = Version(0, 1, "d1"), Version(0, 2, "d2")


def made(host=None, **settings):
    return EngineServer(EngineSettings("", "float32", 8, 1, **settings), host or Host())


def serving(host=None, **settings):
    server = made(host, **settings)
    server.service.started()
    return server


def disk(version=SECOND, bridge="disk", **fields):
    return Ticket(version, bridge, "/weights", (SPEC,), **fields)


def lora(version=SECOND):
    return Ticket(version, "lora", f"/adapter-{version.step}", (ADAPTER,), num_bytes=99, base=(SPEC,))


def ask(id_="a", **fields):
    return GenerateRequest(id_, [1, 2], SamplingParams(4), timeout_s=30.0, **fields)


FEATURES = {"fp32_residual": "fp32_residual", "replay_experts": "expert_choices", "shared_kernels": "shared_kernels"}


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(server_module, "sampling_arguments", lambda request: f"params of {request.id}")
    put(monkeypatch, exceptions={}, logprobs={"FlatLogprobs": tuple}).__version__ = "1.2.3"


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
        with pytest.raises(RuntimeError, match=rf"model.{name} = true is not possible \(not in this vLLM\)"):
            await server.start()
        return
    await server.start()
    assert server.service.is_serving


async def test_kernels_of_a_gpu_are_not_there_on_a_cpu():
    server = made(shared_kernels=True)
    with pytest.raises(RuntimeError, match=r"shared_kernels = true is not possible \(it needs a GPU"):
        await server.start()


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


async def entered(host):
    """A paused engine, and a request in it that ends with `host.ends`."""
    host.ends = asyncio.Event()
    server = serving(host)
    await server.fence()
    early = asyncio.create_task(server.generate(ask()))
    await until(lambda: host.generated)
    return server, early


async def test_a_request_that_entered_a_failed_update_is_refused_though_the_next_one_succeeds():
    """vLLM takes a while to drop a request."""

    class SlowHost(Host):
        async def generate(self, *given, **named):
            try:
                return await super().generate(*given, **named)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
                raise

    host = SlowHost()
    server, early = await entered(host)
    host.shares = [{"w": ("ab", 4, "p")}] * 2
    assert (await server.apply(disk())).mismatched
    host.shares = [GOOD, GOOD]
    assert not (await server.apply(disk(Version(0, 3, "d3")))).mismatched
    answer = await early
    assert (answer.cause, "0.2 did not verify" in answer.error) == ("refused", True)


async def test_requests_that_enter_during_an_update_are_not_held_up_by_it():
    host = Host()
    server, early = await entered(host)
    await server.go_on(Version(0, 2, ""))
    report = await server.apply(disk(bridge="single_copy"))
    assert (report.stall_s, early.done()) == (0.0, False)
    host.ends.set()
    assert (await early).finish_reason == "stop"


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
    await until(lambda: server.host.names, 0)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert server.service.reason == "applying version 0.2 was cancelled by the caller"


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


async def test_another_run_has_its_own_settings_and_no_session_of_the_one_before():
    server = serving()
    server.sessions.open(SessionOpening("key", SamplingParams(4), 0))
    assert server.sessions.of([(b"x-api-key", b"key")]) is not None
    await server.lend(Terms("other", "2", first_rank=3, in_flight="keep", reasoning_parser="qwen3"))
    assert server.sessions.of([(b"x-api-key", b"key")]) is None
    found = server.settings
    assert (found.first_rank, found.in_flight, found.reasoning_parser) == (3, "keep", "qwen3")
    assert server.host.names == ["leave"]


async def test_adapters_need_room():
    with pytest.raises(RuntimeError, match="without room for an adapter"):
        await serving().apply(lora())
    with pytest.raises(RuntimeError, match="holds no adapter to verify"):
        await serving(lora_rank=4).verify(lora())
    server = serving(lora_rank=4)
    server.host.loads = False
    with pytest.raises(RuntimeError, match="vLLM refused the adapter in /adapter-2"):
        await server.apply(lora())


async def test_a_context_that_is_kept_is_that_of_tokens_and_prompts_begin_again():
    server = serving(in_flight="keep")
    server.host.ends = asyncio.Event()
    asked = [asyncio.create_task(server.generate(ask(id_, is_urgent=id_ == "a"))) for id_ in "ab"]
    await until(lambda: len(server.host.generated) == 2, 0)
    server.host.counts = {"a": 0, "b": 3}
    server.host.clock.end = lambda is_busy: asyncio.sleep(0, 0.0)
    await server.apply(disk())
    await until(lambda: len(server.host.generated) == 3, 0)
    after = ("set_version", "abort", "reset_encoder_cache", "resume")
    assert server.host.names == ["begin", "pause", "load", "fingerprint", *after]
    found = [(id_, prompt["cache_salt"], urgent) for id_, prompt, _, _, urgent in server.host.generated]
    assert found == [("a", "none", True), ("b", "none", False), ("a", "0.2-d2", True)]
    server.host.ends.set()
    assert [completion.finish_reason for completion in await asyncio.gather(*asked)] == ["stop", "stop"]
    server.host.ends = asyncio.Event()
    given_up = asyncio.create_task(server.generate(ask("c")))
    await until(lambda: len(server.host.generated) == 4, 0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (len(server.host.generated), server.num_running) == (4, 0)


async def test_it_sleeps_only_in_service_and_without_requests():
    server = made()
    with pytest.raises(OutOfService, match="starting"):
        await server.sleep()
    server = serving()
    server.num_running = 2
    with pytest.raises(OutOfService, match="2 requests are running"):
        await server.sleep()
    server.num_running = 0
    await server.wake()
    assert server.host.calls == []
    for _ in range(2):
        await server.sleep()
    assert server.service.state is State.ASLEEP
    assert (await server.generate(ask())).cause == "refused"
    for _ in range(2):
        await server.wake()
    assert (server.host.names, server.service.is_serving) == (["sleep", "wake"], True)


@pytest.mark.parametrize("is_dead", [True, False])
@pytest.mark.parametrize("error", [ValueError("too long"), KeyError("odd"), OutOfService("later"), TimeoutError()])
async def test_an_error_of_a_request_is_told_unless_vllm_has_died(error, is_dead):
    server = serving()
    server.host.is_dead, server.host.error = is_dead, error
    if is_dead and isinstance(error, (ValueError, KeyError)):
        with pytest.raises(type(error)):
            await server.generate(ask())
        assert server.num_running == 0
        return
    answer = await server.generate(ask())
    wanted = {
        ValueError: ("invalid", "was refused by vLLM: too long"),
        KeyError: ("", "contradicted itself: KeyError: 'odd'"),
        OutOfService: ("refused", "cannot be answered: later"),
        TimeoutError: ("late", "passed its deadline of 30 s: raise inference.request_timeout_s"),
    }[type(error)]
    assert (answer.finish_reason, answer.cause, answer.error[: len(wanted[1])]) == ("abort", *wanted)
    assert (answer.token_ids, answer.logprobs, server.num_running) == ([], None, 0)
    assert server.service.is_serving == (not isinstance(error, KeyError))
    if isinstance(error, KeyError):
        assert answer.contradiction == "KeyError: 'odd'"
        assert server.service.reason == "the answer to request a contradicted itself: KeyError: 'odd'"
