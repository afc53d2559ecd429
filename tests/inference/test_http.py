"""Foreign clients of an engine whose weights change meanwhile, with real vLLM and the packages that people use."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import openai
import pytest
import torch
from benchmarks.bridges import create_adapter_bridge, create_bridge
from safetensors.torch import load_file

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import EngineError, WeightsError
from slipstream.records import GenerateRequest, SamplingParams
from slipstream.records import Sequence as Tokens
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report
from slipstream.weights.adapter_folder import AdapterConfig

from ..engine.conftest import perturbed, start
from ..engine.test_single_copy import Pair
from .http_clients import MESSAGES, MODEL, Answer, Clients, socket_of, tcp_port

pytestmark = pytest.mark.engine
LINEAGE = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / MODEL, hidden_size=64, num_layers=2, seed=3)


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("engine"), inference_socket=True, tool_parser="hermes") as started:
        yield started


class Trainer:
    """Publishes versions, and knows the weights of each."""

    def __init__(self, live, folder):
        self.live = live
        self.original = load_file(live.model / "model.safetensors")
        self.bridge = create_bridge("disk", folder=folder, source=live.model, engine=live.engine)
        self.weights, self.digests = {}, {}
        self.step = -1

    def update(self, weights=None):
        """The next version, verified."""
        self.step += 1
        weights = weights or perturbed(self.original, self.step)
        ticket, report = self.live.bring(self.bridge, weights.items(), self.step, LINEAGE)
        check_report(report, ticket)
        self.weights[ticket.version.name] = weights
        self.digests[ticket.version.name] = ticket.version.digest
        return report

    def fail(self, damage):
        """An update whose weights are not those that its ticket describes, or no weights at all."""
        self.step += 1
        wrong = perturbed(self.original, 1000 + self.step, 0.1)
        ticket = self.bridge.publisher.publish(wrong.items(), self.step, LINEAGE, lambda ticket: None)
        (file,) = Path(ticket.location).glob("*.safetensors")
        with contextlib.suppress(EngineError):
            report = self.live.call(self.bridge.receiver.apply(damage(file, ticket), 60))
            assert report.mismatched or report.unverified


def one_bit(file, ticket):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return ticket


def cut_off(file, ticket):
    file.write_bytes(file.read_bytes()[:-1000])
    return ticket


def gone(file, ticket):
    file.unlink()
    return ticket


def misdescribed(file, ticket):
    first = msgspec.structs.replace(ticket.parameters[0], fingerprint="0" * 16)
    return msgspec.structs.replace(ticket, parameters=(first, *ticket.parameters[1:]))


FAULTS = [one_bit, cut_off, gone, misdescribed]


class Load:
    """Every kind of client, one request after another, until it is ended."""

    def __init__(self, live, length=40, kinds=None, each=1):
        self.answers, self.failures, self._over = [], [], threading.Event()
        self._args = socket_of(live), length, kinds, each
        # A thread of its own: a client that reads a full buffer lets nothing else run in its event loop.
        self._thread = ThreadPoolExecutor(1)
        self._done = self._thread.submit(asyncio.run, self._run())

    async def _run(self):
        path, length, kinds, each = self._args
        clients = Clients(path, length=length)
        chosen = [work for name, work in clients.kinds.items() if kinds is None or name in kinds]
        await asyncio.gather(*(self._repeat(work) for work in chosen for _ in range(each)))
        await clients.close()

    async def _repeat(self, work):
        while not self._over.is_set():
            try:
                self.answers.append(await work())
            except Exception as error:  # noqa: BLE001 (the test looks at it)
                self.failures.append(f"{work.__name__}: {error!r}")

    def wait_for(self, number):
        """Until so many more answers of each kind have come."""
        before = collections.Counter(answer.kind for answer in self.answers)
        wanted = {name for name in Clients(self._args[0]).kinds if self._args[2] is None or name in self._args[2]}
        deadline = time.monotonic() + 240
        while True:
            now = collections.Counter(answer.kind for answer in [*self.answers])
            if all(now[kind] >= before[kind] + number for kind in wanted):
                return
            assert time.monotonic() < deadline, (now, self.failures[:3])
            time.sleep(0.02)

    def end(self):
        self._over.set()
        self._done.result(240)
        self._thread.shutdown()
        return self.answers


def check_answers(live, answers, weights, digests):
    """Every span is of a verified version, and each token the log-probability that its version gives."""
    crossings = 0
    for answer in answers:
        assert answer.versions, answer
        assert not answer.error
        for spans in answer.versions:
            starts, names = [start for start, _ in spans], [name for _, name in spans]
            assert starts[0] == 0, answer
            assert starts == sorted(set(starts)), answer
            assert names == sorted(set(names), key=[*weights].index), answer
            crossings += len(spans) - 1
        assert answer.digests == {name: digests[name] for spans in answer.versions for _, name in spans}
    differences = []
    for name, tensors in weights.items():
        mine = []
        for answer in answers:
            starts = [start for start, _ in answer.versions[0]]
            for (begin, version), end in zip(answer.versions[0], [*starts[1:], len(answer.token_ids)], strict=True):
                if version == name and answer.token_ids:
                    mine.append((answer, begin, end))
        for (answer, begin, end), ours in zip(mine, scores(live, tensors, [a for a, _, _ in mine]), strict=True):
            differences.append((ours[begin:end] - torch.tensor(answer.logprobs[begin:end])).abs())
    found = torch.cat(differences)
    print(f"{len(answers)} answers, {crossings} crossings, {len(found)} tokens compared, largest {found.max():.1e}")
    assert found.max() < 1e-3
    return crossings


def scores(live, weights, answers, policy=None):
    """The trainer's log-probabilities of the answers' tokens."""
    if not answers:
        return []
    if policy is None:
        policy = PolicyModel.load(live.model)
        policy.network.load_state_dict(weights, strict=False)
    rows = [
        Tokens([*each.prompt_ids, *each.token_ids], [False] * len(each.prompt_ids) + [True] * len(each.token_ids))
        for each in answers
    ]
    return score(policy, rows, micro_batch_tokens=8192).logprobs


def ask(live, work):
    """The result of `work(clients)` in an event loop of the engine's thread."""

    async def asking():
        clients = Clients(socket_of(live))
        try:
            return await work(clients)
        finally:
            await clients.close()

    return live.call(asking())


def test_every_client_is_answered_while_weights_change(live, tmp_path):
    trainer = Trainer(live, tmp_path / "weights")
    trainer.update()
    load = Load(live)
    load.wait_for(1)
    stalls = [trainer.update().stall_s for _ in range(4)]
    load.wait_for(1)
    answers = load.end()
    assert load.failures == []
    assert check_answers(live, answers, trainer.weights, trainer.digests) > 0
    assert all(answer.num_calls for answer in answers if "tools" in answer.kind)
    assert max(stalls) > 0, "foreign requests count as running ones"
    trainer.fail(one_bit)
    with pytest.raises(openai.InternalServerError) as refused:
        ask(live, lambda clients: clients.completion())
    assert (refused.value.status_code, "did not verify" in str(refused.value)) == (503, True)
    assert ask(live, lambda clients: clients.http.get("/health")).status_code == 503
    trainer.update()
    (ours,) = live.generate(GenerateRequest("ours", [1, 2, 3], SamplingParams(max_tokens=4)))
    assert ours.finish_reason != "abort"
    assert ask(live, lambda clients: clients.completion()).digests.keys() == {f"{LINEAGE}.{trainer.step}"}


class HeldPair(Pair):
    """Looks, whenever the engine computes with a version that is not verified yet, whether anybody gets its tokens."""

    def __init__(self, live):
        self.seen, self.was_held = [], []
        super().__init__(live)

    def go_on(self, version):
        # What was sampled before may still come; tokens of this version may not.
        self.live.call(self.live.engine.go_on(version, 60))
        before = len(self.seen)
        self.live.call(asyncio.sleep(0.3))
        self.was_held.append(len(self.seen) == before)


def test_tokens_of_a_version_without_proof_are_not_sent(live, tmp_path):
    """A stream crosses an update in place: it goes on once the version is verified, and fails when it never is."""
    trainer = Trainer(live, tmp_path / "weights")
    trainer.update(trainer.original)
    pair = HeldPair(live)
    pair.publish(1)

    async def stream(begun):
        clients = Clients(socket_of(live), length=230)
        answer = await clients.completion_stream(lambda count: (pair.seen.append(count), begun.set()))
        await clients.close()
        return answer

    def begin(step):
        while True:
            pair.seen.clear()
            begun = threading.Event()
            running = live.thread.submit(stream(begun))
            assert begun.wait(60)
            live.call(pair.versions.fence())
            try:
                running.result(0.5)
            except TimeoutError:
                return running
            pair.publish(step)  # on a busy machine the stream may end before the fence

    running = begin(1)
    pair.write(2)
    pair.publish(2)
    good = running.result(60)
    assert (good.error, len(good.token_ids)) == ("", 230)
    assert [name for _, name in good.versions[0]] == ["0.1", "0.2"]

    running = begin(2)
    pair.write(3)
    ticket = pair.bridge.publisher.publish(pair.policy.named_weights(), 3, 0, lambda ticket: None)
    sent = len(pair.seen)
    with torch.no_grad():
        pair.tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    with pytest.raises(WeightsError):
        live.call(pair.versions.apply(ticket))
    bad = running.result(60)
    assert "out of service" in bad.error
    assert len(pair.seen) == sent, "nothing more was sent"
    assert len(pair.was_held) >= 3
    assert all(pair.was_held)
    pair.publish(4)
    assert ask(live, lambda clients: clients.completion()).digests.keys() == {"0.4"}


REFUSED = [
    ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, 404),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": [1] * 400}, 400),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "n": 1000}, 400),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": [[1]] * 2000}, 400),
    (
        "POST",
        "/v1/completions",
        {"model": MODEL, "prompt": "x", "use_beam_search": True, "n": 2, "temperature": 0},
        400,
    ),
    ("POST", "/v1/chat/completions", {"model": MODEL, "messages": "x"}, 400),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}, 400),
    ("POST", "/v1/messages", {"model": "other", "max_tokens": 4, "messages": MESSAGES}, 404),
    ("POST", "/inference/v1/generate", {"token_ids": [1] * 400, "sampling_params": {}}, 400),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": [1] * 400}}, 400),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": [1 << 30]}}, 400),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": []}}, 400),
    ("POST", "/generate", {"prompt": "x", "surprise": 1}, 400),
    ("POST", "/generate", {"prompt": "x", "model": "other"}, 404),
    *(
        ("POST", path, {}, 404)
        for path in (
            *("/apply", "/verify", "/share", "/fence", "/go-on", "/leave", "/sleep", "/wake", "/cancel"),
            *("/pause", "/resume", "/abort_requests", "/collective_rpc", "/wake_up", "/reset_prefix_cache"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests", "/invocations"),
            *("/update_weights", "/init_weight_transfer_engine", "/scale_elastic_ep", "/start_profile"),
        )
    ),
    ("GET", "/metrics", None, 404),
    ("GET", "/openapi.json", None, 404),
]


def test_a_hostile_client_is_refused_and_harms_nothing(live):
    async def attack(clients):
        http, found = clients.http, []
        for method, path, body, _ in REFUSED:
            found.append((await http.request(method, path, json=body)).status_code)
        json_type = {"content-type": "application/json"}
        for body in (b"{bad", b"[" * 200_000, b"\xff\xfe", b"nul", b""):
            status = (await http.post("/v1/chat/completions", content=body, headers=json_type)).status_code
            assert 400 <= status < 500, body[:10]
        large = await http.post("/v1/completions", content=b"0" * (17 << 20), headers=json_type)
        assert large.status_code == 413

        async def endless():
            while True:
                yield b" " * (1 << 20)

        with contextlib.suppress(OSError, Exception):
            assert (await http.post("/v1/completions", content=endless(), headers=json_type)).status_code == 413
        half_open = [socket.socket(socket.AF_UNIX) for _ in range(200)]
        for number, each in enumerate(half_open):
            each.setblocking(False)
            each.connect(socket_of(live))
            each.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" if number % 2 else b"GET")
        answer = await clients.completion()
        for each in half_open:
            each.close()
        return found, answer

    found, answer = ask(live, attack)
    assert found == [status for *_, status in REFUSED]
    assert len(answer.token_ids) == 40
    (ours,) = live.generate(GenerateRequest("unharmed", [1, 2, 3], SamplingParams(max_tokens=4)))
    assert ours.finish_reason != "abort"


@pytest.mark.servers
def test_a_hundred_updates_under_every_client_and_vllms_benchmark(live, model, tmp_path):
    trainer = Trainer(live, tmp_path / "weights")
    trainer.update()
    load = Load(live, each=2)
    benchmark = live.thread.submit(run_benchmark(socket_of(live), model))
    while trainer.step < 100 or not benchmark.done():
        trainer.update()
    load.wait_for(1)
    answers = load.end()
    outcome = benchmark.result(240)
    assert load.failures == []
    assert check_answers(live, answers, trainer.weights, trainer.digests) > 100
    assert re.search(r"Failed requests:\s+0\b", outcome), outcome
    print(f"{trainer.step} updates, {len(answers)} answers; {outcome[outcome.index('Serving Benchmark') :][:900]}")


@pytest.mark.servers
def test_twenty_faults_in_updates_and_no_answer_of_unverified_weights(live, tmp_path):
    trainer = Trainer(live, tmp_path / "weights")
    trainer.update(trainer.original)
    kinds = ("completion", "completion_stream", "tokens", "chat_stream", "message_stream")
    load = Load(live, length=100, kinds=kinds, each=3)
    for number in range(12):
        load.wait_for(1)
        trainer.fail(FAULTS[number % len(FAULTS)])
        assert ask(live, lambda clients: clients.http.get("/health")).status_code == 503
        trainer.update()
    load.wait_for(1)
    trainer.update(trainer.original)
    pair = Pair(live)
    weights, digests = trainer.weights, trainer.digests
    for step in range(1, 17, 2):
        ticket = pair.publish(step)
        weights[ticket.version.name], digests[ticket.version.name] = pair.copied(), ticket.version.digest
        load.wait_for(1)
        good = pair.copied()
        live.call(pair.versions.fence())
        pair.write(step)  # another model, with which vLLM computes before anybody knows that it is wrong
        ticket = pair.bridge.publisher.publish(pair.policy.named_weights(), step + 1, 0, lambda ticket: None)
        live.call(asyncio.sleep(0.1))
        with torch.no_grad():
            pair.tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
        with pytest.raises(WeightsError):
            live.call(pair.versions.apply(ticket))
        with torch.no_grad():
            for name, weight in pair.policy.named_weights():
                weight.copy_(good[name])
    pair.publish(17)
    ended = [answer for answer in load.end() if not answer.error]
    broken = [answer for answer in load.answers if answer.error]
    weights["0.17"], digests["0.17"] = pair.copied(), next(iter(ask(live, lambda c: c.completion()).digests.values()))
    check_answers(live, ended, weights, digests)
    assert all("503" in failure or "out of service" in failure for failure in load.failures), load.failures[:3]
    assert all("out of service" in answer.error for answer in broken)
    partial = [answer for answer in broken if answer.token_ids]
    nearest = torch.full((len(partial), 100), torch.inf)
    for tensors in weights.values():
        for place, (answer, ours) in enumerate(zip(partial, scores(live, tensors, partial), strict=True)):
            gap = (ours - torch.tensor(answer.logprobs)).abs()
            nearest[place, : len(gap)] = torch.minimum(nearest[place, : len(gap)], gap)
    sent = nearest[nearest.isfinite()]
    print(f"{len(load.failures)} refused, {len(broken)} streams ended, {len(sent)} of their tokens were sent")
    assert len(sent) > 0
    assert sent.max() < 1e-3, "all of versions that were verified"


@pytest.mark.servers
@pytest.mark.parametrize(
    ("in_flight", "own_process"), [("recompute", True), ("keep", False), ("keep", True), ("drain", False)]
)
def test_the_other_engines(model, tmp_path, in_flight, own_process):
    """Tokens on kept contexts have no log-probabilities of their own; their versions must be right all the same."""
    changes = {"in_flight": in_flight, "own_process": own_process, "tool_parser": "hermes", "inference_socket": True}
    with start(model, tmp_path, **changes) as live:
        trainer = Trainer(live, tmp_path / "weights")
        trainer.update()
        load = Load(live, each=2, length=150)
        load.wait_for(1)
        for _ in range(8):
            live.until_running()
            trainer.update()
        load.wait_for(1)
        answers = load.end()
        assert load.failures == []
        if in_flight == "keep":
            answers = [each for each in answers if len(each.versions[0]) == 1 or not each.token_ids]
        crossings = check_answers(live, answers, trainer.weights, trainer.digests)
        assert (crossings == 0) == (in_flight == "drain")


@pytest.mark.servers
def test_a_name_is_the_adapter_in_service_and_the_base_has_its_own(model, tmp_path):
    policy = PolicyModel.load(model)
    adapter = policy.add_adapter(AdapterConfig(4, 8.0, ("all-linear",), str(model)))
    room = {"lora_rank": 4, "lora_target_modules": adapter.config.target_modules}
    base = load_file(model / "model.safetensors")
    with start(model, tmp_path, inference_socket=True, tool_parser="hermes", **room) as live:
        bridge = create_adapter_bridge(
            folder=tmp_path / "adapters", engine=live.engine, adapter=adapter.config, base_weights=policy.base_weights()
        )
        with pytest.raises(openai.InternalServerError, match="no adapter yet"):
            ask(live, lambda clients: clients.completion())
        adapters, digests = {}, {}

        def update(step):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for _, tensor in adapter.named_weights():
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            ticket = bridge.publisher.publish(adapter.named_weights(), step, LINEAGE, lambda ticket: None)
            check_report(live.call(bridge.receiver.apply(ticket, 60)), ticket)
            name = ticket.version.name
            adapters[name] = {key: tensor.clone() for key, tensor in adapter.named_weights()}
            digests[name] = ticket.version.digest

        update(0)
        load = Load(live, each=2, length=100)
        for step in range(1, 6):
            load.wait_for(1)
            live.until_running()
            update(step)
        load.wait_for(1)
        answers = load.end()
        assert load.failures == []
        names = {name for answer in answers for spans in answer.versions for _, name in spans}
        assert names == adapters.keys(), "each request with one adapter"
        for answer in answers:
            assert {len(spans) for spans in answer.versions} == {1}
            assert answer.digests.items() <= digests.items()
        for name, tensors in adapters.items():
            with torch.no_grad():
                for key, tensor in adapter.named_weights():
                    tensor.copy_(tensors[key])
            mine = [answer for answer in answers if answer.token_ids and answer.versions[0][0][1] == name]
            for answer, ours in zip(mine, scores(live, {}, mine, policy), strict=True):
                assert (ours - torch.tensor(answer.logprobs)).abs().max() < 1e-3

        async def names_and_base(clients):
            models = [each.id async for each in await clients.openai.models.list()]
            got = await clients.openai.completions.create(
                model=f"{MODEL}-base", prompt=[1, 2, 3], max_tokens=8, logprobs=0, extra_body={"return_token_ids": True}
            )
            unnamed = await clients.http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
            return models, got, unnamed.json()

        models, got, unnamed = ask(live, names_and_base)
        assert models == [MODEL, f"{MODEL}-base"]
        assert (got.model, got.versions) == (f"{MODEL}-base", [[[0, "base"]]])
        assert unnamed["versions"] == [[[0, f"{LINEAGE}.5"]]], "no name is not the base"
        answer = Answer("", [], {}, [1, 2, 3], got.choices[0].token_ids)
        (ours,) = scores(live, base, [answer])
        assert (ours - torch.tensor(got.choices[0].logprobs.token_logprobs)).abs().max() < 1e-3


async def run_benchmark(path, model):
    """vLLM's own, as its command would run."""
    async with tcp_port(path) as port:
        code = (
            "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
            "from vllm.benchmarks.serve import add_cli_args, main\n"
            "p = P(); add_cli_args(p); main(p.parse_args())"
        )
        options = {"base-url": f"http://127.0.0.1:{port}", "model": MODEL, "tokenizer": str(model)}
        options |= {"dataset-name": "random", "random-input-len": "32", "random-output-len": "40"}
        options |= {"num-prompts": "150", "max-concurrency": "16", "endpoint": "/v1/completions"}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *arguments, stdout=-1, stderr=asyncio.subprocess.STDOUT
        )
        text = (await process.communicate())[0].decode()
        assert process.returncode == 0, text[-3000:]
        return text
