"""What the patches of vLLM's models and samplers compute, with plain objects and torch in the place of vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.inference.plugin.patches import experts, residual, sampled_logprobs, scoring
from slipstream.inference.plugin.patches.patch_table import EXPERTS, FP32_RESIDUAL, Absent, NotNeeded
from slipstream.records import GenerateRequest, SamplingParams

from .fakes import put


class Norm:
    """As vLLM's: what it computes by itself is told apart."""

    def __init__(self, weight):
        self.weight, self.variance_epsilon = torch.tensor(weight, dtype=torch.bfloat16), 0.25

    def forward_native(self):
        """Has no part in it."""

    def forward(self, x, residual):
        return "vLLM's", x, residual


@pytest.mark.parametrize(("name", "weight"), [("RMSNorm", [2.0, 3.0]), ("GemmaRMSNorm", [1.0, 2.0])])
def test_a_residual_is_added_up_in_float32(name, weight, monkeypatch):
    kinds = {each: type(each, (Norm,), {}) for each in ("RMSNorm", "GemmaRMSNorm")}
    put(monkeypatch, model_executor__layers={"layernorm": SimpleNamespace(**kinds)})
    monkeypatch.delenv(FP32_RESIDUAL, raising=False)
    with pytest.raises(NotNeeded):
        residual.add_in_float32()
    monkeypatch.setenv(FP32_RESIDUAL, "1")
    residual.add_in_float32()
    norm = kinds[name](weight)
    x = torch.tensor([[1.0, 256.0]], dtype=torch.bfloat16)
    before = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    output, total = norm.forward(x, before)
    assert (total.dtype, total.tolist()) == (torch.float32, [[2.0, 256.5]])
    scale = ((2.0**2 + 256.5**2) / 2 + 0.25) ** -0.5
    exact = torch.tensor([[2.0 * scale * 2.0, 256.5 * scale * 3.0]]).bfloat16()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, exact)
    small = torch.tensor([[0.5, -0.5], [0.0, 1.0], [0.25, 0.25]], dtype=torch.bfloat16)
    output = norm.forward(small[None], torch.zeros_like(small)[None])[0][0]
    scales = torch.tensor([[0.5**-0.5], [0.75**-0.5], [(1 / 16 + 0.25) ** -0.5]])
    torch.testing.assert_close(output, (small * scales * torch.tensor([2.0, 3.0])).bfloat16())
    assert norm.forward(x)[0] == "vLLM's"
    assert norm.forward(x, None)[1] is x
    norm.variance_size_override = 1
    assert norm.forward(x, before)[2] is before


@pytest.mark.parametrize("lacks", ["class", "method"])
def test_norms_that_are_not_known_are_not_patched(lacks, monkeypatch):
    kinds = {"RMSNorm": type("RMSNorm", (Norm,), {})}
    if lacks == "method":
        kinds["GemmaRMSNorm"] = object
    put(monkeypatch, model_executor__layers={"layernorm": SimpleNamespace(**kinds)})
    monkeypatch.setenv(FP32_RESIDUAL, "1")
    with pytest.raises(Absent, match=r"layernorm\.GemmaRMSNorm"):
        residual.add_in_float32()


def tensors(*fields):
    return fields


def test_log_probabilities_of_sampled_tokens_come_without_ranks(monkeypatch):
    put(monkeypatch, v1__outputs={"LogprobsTensors": tensors})
    sampler = type("Sampler", (), {"gather_logprobs": staticmethod(lambda *given: ("vLLM's", *given))})
    sampled_logprobs._without_ranks(sampler)
    logprobs, ids = torch.log_softmax(torch.arange(6.0).reshape(2, 3), -1), torch.tensor([2, 0])
    tokens, values, ranks = sampler().gather_logprobs(logprobs, 0, ids)
    assert (tokens.dtype, tokens.tolist(), ranks.tolist()) == (torch.int32, [[2], [0]], [0, 0])
    assert values.tolist() == [[logprobs[0, 2].item()], [logprobs[1, 0].item()]]
    assert sampler.gather_logprobs(logprobs, 2, ids) == ("vLLM's", logprobs, 2, ids)
    module = SimpleNamespace(compute_topk_scores=lambda *given, **options: ("vLLM's", *given, options))
    sampled_logprobs._second_without_ranks(module, lambda logits, ids: logits.gather(-1, ids))
    tokens, values, ranks, counts = module.compute_topk_scores(logprobs, 0, ids, [1, 1])
    assert (tokens.tolist(), values.tolist(), ranks.tolist(), counts) == (
        *([[2], [0]], [[logprobs[0, 2].item()], [logprobs[1, 0].item()]], [0, 0]),
        [1, 1],
    )
    assert module.compute_topk_scores(logprobs, 0, ids, logits_mode=False)[3] is None
    for number, options in ((1, {}), (0, {"logits_mode": True}), (0, {"max_per_req_token_ids": 2})):
        found = module.compute_topk_scores(logprobs, number, ids, [1], **options)
        assert found == ("vLLM's", logprobs, number, ids, [1], options)


def test_samplers_that_are_not_known_are_not_patched(monkeypatch):
    put(monkeypatch, v1__sample__sampler={"Sampler": object})
    with pytest.raises(Absent, match=r"Sampler\.gather_logprobs"):
        sampled_logprobs.without_ranks()
    known = {"sampler": SimpleNamespace(compute_topk_scores=1), "logprob": SimpleNamespace(compute_token_logprobs=1)}
    for name in known:
        put(monkeypatch, v1__worker__gpu__sample={**known, name: SimpleNamespace()})
        with pytest.raises(Absent, match="compute_topk_scores of its second sampler"):
            sampled_logprobs.second_without_ranks()
    put(monkeypatch, v1__worker__gpu__sample={})
    with pytest.raises(Absent, match="second sampler"):
        sampled_logprobs.second_without_ranks()


def ask(temperature, **fields):
    return GenerateRequest("a", [5, 6, 7], SamplingParams(1, temperature=temperature), scores_prompt=True, **fields)


def test_what_can_be_scored():
    for temperature in (1.0, 0.01, 2.0):
        scoring.check(ask(temperature), (scoring.PATCH,))
    for given, why in (
        (ask(0.0), "temperature 0 has no log-probabilities"),
        (ask(1.0, images=(b"",)), "a prompt with images cannot be scored"),
    ):
        with pytest.raises(ValueError, match=why):
            scoring.check(given, (scoring.PATCH,))
    scoring.check(ask(1.0), ("another",))
    with pytest.raises(ValueError, match=r"at temperature 1 only, and 1.5 is asked for"):
        scoring.check(ask(1.5), ("another",))


def test_each_token_of_a_prompt_has_its_score_and_the_first_none():
    entries = [None, {6: SimpleNamespace(logprob=-1.0), 9: None}, {7: SimpleNamespace(logprob=-2.0)}]
    assert scoring.prompt_logprobs(SimpleNamespace(prompt_logprobs=entries), ask(1.0)) == [0.0, -1.0, -2.0]
    for found, shown in ((None, "none"), (entries[:2], "2")):
        with pytest.raises(RuntimeError, match=f"vLLM scored {shown} of 3 tokens"):
            scoring.prompt_logprobs(SimpleNamespace(prompt_logprobs=found), ask(1.0))


class Runner:
    """Scores like vLLM's first model runner, which removes requests whose last token it has scored."""

    def __init__(self, **temperatures):
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(temperature=by)) for name, by in temperatures.items()
        }
        self.num_prompt_logprobs = dict.fromkeys(temperatures, 0)
        self.sampler = SimpleNamespace(compute_logprobs=lambda logits: logits)
        self.fails, self.ending = "", ()

    def _get_prompt_logprobs_dict(self, hidden, scheduled):
        names = list(self.num_prompt_logprobs)
        found = {name: self.sampler.compute_logprobs(hidden).item() for name in names}
        if self.fails in names:
            raise KeyError(self.fails)
        for name in set(names) & set(self.ending):
            del self.num_prompt_logprobs[name]
        return found


def test_every_request_is_scored_at_its_own_temperature_and_vllm_keeps_its_books():
    runner = Runner(a=0.5, b=2.0, c=0.5, d=0.0)
    wanted, normalise = runner.num_prompt_logprobs, runner.sampler.compute_logprobs
    scoring.at_request_temperature(runner)
    runner.ending = ("a", "b")
    found = runner._get_prompt_logprobs_dict(torch.tensor([3.0], dtype=torch.bfloat16), {})
    assert found == {"a": 6.0, "c": 6.0, "b": 1.5, "d": 3.0}
    assert runner.num_prompt_logprobs is wanted
    assert wanted == {"c": 0, "d": 0}
    runner.fails = "d"
    with pytest.raises(KeyError):
        runner._get_prompt_logprobs_dict(torch.tensor([3.0]), {})
    assert (runner.num_prompt_logprobs, runner.sampler.compute_logprobs) == (wanted, normalise)


class Worker:
    """Scores like vLLM's second one, some tokens at a time."""

    def __init__(self, chunk):
        self.chunk, self.calls = chunk, []

    def add_request(self, name, index, params):
        self.calls.append((name, index))

    def remove_request(self, name):
        self.calls.append(name)

    def compute_prompt_logprobs(self, logits_of, hidden, batch, *rest):
        parts = [logits_of(part) for part in hidden.split(self.chunk)[: self.calls.count("stop") or None]]
        return torch.cat(parts), rest


def test_tokens_of_a_step_are_scored_at_their_requests_temperatures():
    worker = Worker(2)
    for odd in ({}, {"_get_prompt_logprobs_dict": 1}, {"num_prompt_logprobs": 1}):
        with pytest.raises(Absent):
            scoring.at_request_temperature(SimpleNamespace(prompt_logprobs_worker=None, sampler=None, **odd))
    scoring.at_request_temperature(SimpleNamespace(prompt_logprobs_worker=worker))
    for index, (name, temperature, scored) in enumerate(
        [("a", 0.5, 0), ("b", 4.0, None), ("c", 0.0, 0), ("d", 2.0, 0)]
    ):
        worker.add_request(name, index, SimpleNamespace(temperature=temperature, prompt_logprobs=scored))
    assert worker.calls == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    batch = SimpleNamespace(req_ids=["a", "b", "c", "d"], num_scheduled_tokens=[2, 1, 1, 1])
    hidden = torch.full((5, 1), 8.0)
    found, rest = worker.compute_prompt_logprobs(lambda some: some, hidden, batch, 7)
    assert (found[:, 0].tolist(), rest) == ([16.0, 16.0, 8.0, 8.0, 4.0], (7,))
    for number in (1, 2):
        worker.calls = ["stop"] * number
        with pytest.raises(RuntimeError, match=f"vLLM scored {2 * number} of the 5 tokens of a step"):
            worker.compute_prompt_logprobs(lambda some: some, hidden, batch)
    worker.calls = []
    worker.remove_request("a")
    worker.remove_request("unknown")
    assert worker.calls == ["a", "unknown"]
    found, _ = worker.compute_prompt_logprobs(lambda some: some, hidden, batch)
    assert found[:, 0].tolist() == [8.0, 8.0, 8.0, 8.0, 4.0]
    plain = SimpleNamespace(req_ids=["b", "c"], num_scheduled_tokens=[2, 1])
    given = torch.full((3, 1), 8.0, dtype=torch.bfloat16)
    assert worker.compute_prompt_logprobs(lambda some: some, given, plain)[0].dtype == torch.bfloat16


def runner_of(num_experts=300):
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 2, get_num_experts_per_tok=lambda: 2, get_num_experts=lambda: num_experts
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=8))
    slots = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.tensor([9, -1, 4, 5, 0])))
    return SimpleNamespace(
        vllm_config=config,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=3),
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        model="model",
        input_batch=SimpleNamespace(block_table=[slots]),
        _model_forward=lambda input_ids, positions, *given, **options: (input_ids, positions, given, options),
    )


class Scheduler:
    """Frees some requests in each step."""

    def __init__(self):
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda id_: ([2, 1],))
        self.freed = []

    def _free_request(self, request, *given, **options):
        self.freed.append((request.request_id, given, options))
        return "freed"

    def update_from_output(self, ending, fails=False):
        for id_, reason in ending:
            if reason is not None and id_ != "elsewhere":
                assert self._free_request(SimpleNamespace(request_id=id_, num_tokens=3), 1, x=2) == "freed"
        if fails:
            raise KeyError
        outputs = [SimpleNamespace(request_id=id_, finish_reason=reason, routed_experts=None) for id_, reason in ending]
        return {0: SimpleNamespace(outputs=outputs)}


@pytest.fixture
def routed(monkeypatch):
    kind, bound = type("Fresh", (Scheduler,), {}), []
    state = SimpleNamespace(kind=kind, bound=bound, fields=("routed_experts",))
    put(
        monkeypatch,
        v1__core__sched__scheduler={"Scheduler": kind},
        v1__engine={"EngineCoreOutput": SimpleNamespace(__struct_fields__=("routed_experts",))},
        model_executor__layers__fused_moe__routed_experts_capturer={
            "bind_routed_experts_capturer": lambda model, capturer: bound.append((model, capturer))
        },
    )
    monkeypatch.setenv(EXPERTS, "1")
    return state


def test_a_request_ends_with_the_experts_of_its_tokens_by_their_slots(routed):
    runner = runner_of()
    experts.return_choices(runner)
    ((model, capturer),) = routed.bound
    assert model == "model"
    for layer in range(2):
        capturer.capture(layer, torch.arange(10).reshape(5, 2) + 100 * layer + 200)
    assert runner._model_forward("abcde", "at", 1, x=2) == ("abcde", "at", (1,), {"x": 2})
    scheduler = routed.kind()
    assert scheduler._free_request(SimpleNamespace(request_id="outside", num_tokens=2)) == "freed"
    (answer,) = scheduler.update_from_output(
        [("a", "stop"), ("b", None), ("c", "length"), ("elsewhere", "abort")]
    ).values()
    a, b, c, elsewhere = answer.outputs
    assert elsewhere.routed_experts is None
    assert a.routed_experts.dtype == np.uint16
    assert a.routed_experts.tolist() == [[[0, 0], [0, 0]], [[200, 201], [300, 301]]]
    assert (b.routed_experts, c.routed_experts.tolist()) == (None, a.routed_experts.tolist())
    assert scheduler.freed[1:] == [("a", (1,), {"x": 2}), ("c", (1,), {"x": 2})]
    assert capturer.of_blocks([1], 2).tolist() == [[[204, 205], [304, 305]], [[206, 207], [306, 307]]]
    assert capturer.of_blocks([0], 1).tolist() == [[[208, 209], [308, 309]]]
    with pytest.raises(KeyError):
        scheduler.update_from_output([("d", "stop")], fails=True)
    assert scheduler._slipstream_experts is None
    capturer.capture(0, torch.full((2, 2), 7))
    runner._model_forward(None, inputs_embeds="ab")
    assert capturer.of_blocks([2], 2)[1].tolist() == [[7, 7], [300, 301]]
    assert capturer.of_blocks([1], 1).tolist() == [[[204, 205], [304, 305]]], "not of this step"


@pytest.mark.parametrize(("number", "kind"), [(256, np.uint8), (257, np.uint16)])
def test_the_ids_of_few_experts_take_a_byte(number, kind, routed):
    assert experts.Capturer(runner_of(number)).of_blocks([0], 4).dtype == kind


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda runner, kind, patch: patch.delenv(EXPERTS), "replay_experts is off"),
        (lambda runner, kind, patch: delattr(runner, "_model_forward"), "SimpleNamespace._model_forward"),
        (
            lambda runner, kind, patch: setattr(runner.parallel_config, "distributed_executor_backend", "mp"),
            "its worker",
        ),
        (lambda runner, kind, patch: runner.kv_cache_config.kv_cache_groups.append(1), "single table"),
        (lambda runner, kind, patch: setattr(runner, "model", None), "routers choose .none"),
    ],
)
def test_where_choices_cannot_be_seen_it_is_told(change, error, routed, monkeypatch):
    def bind(model, capturer):
        if model is None:
            raise ValueError("none")

    import vllm.model_executor.layers.fused_moe.routed_experts_capturer as module

    module.bind_routed_experts_capturer = bind
    runner = runner_of()
    change(runner, routed.kind, monkeypatch)
    with pytest.raises((Absent, NotNeeded), match=error):
        experts.return_choices(runner)
