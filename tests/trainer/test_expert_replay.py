"""Router replay: the engine's experts with the trainer's own weights and gradients, in rows of any layout."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.engine.mixtures import KINDS, close_choices
from tests.refusals import refuses

from slipstream.errors import ConfigError, TrainingError
from slipstream.records import ExpertChoices, Sequence
from slipstream.trainer.experts.replay import ExpertReplay, share_that_differs
from slipstream.trainer.experts.row_choices import MISSING, RowChoices, RowExperts
from slipstream.trainer.learner import score
from slipstream.trainer.model.compilation import compile_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches

LAYERS, EXPERTS, TOP = 2, 8, 4
PROMPT = [5, 9, 2, 7, 3, 8]


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory):
    return close_choices(
        tmp_path_factory.mktemp("mixture") / "model", request.param, num_layers=LAYERS, num_experts=EXPERTS
    )


def choices(ids):
    return ExpertChoices(np.asarray(ids, "<u1").tobytes(), *np.shape(ids)[1:])


def random_ids(num_tokens, seed=0):
    draw = np.random.default_rng(seed)
    return np.array([[draw.permutation(EXPERTS)[:TOP] for _ in range(LAYERS)] for _ in range(num_tokens)])


def sequence(completion, given=None, prompt=PROMPT):
    tokens = prompt + completion
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sequence(tokens, mask, experts=None if given is None else choices(given))


def sequences_of_a_group(shared=None):
    """Three completions of one prompt, with the prompt's choices in common and others after it, and one of another
    prompt."""
    shared = random_ids(len(PROMPT)) if shared is None else shared
    found = []
    for number in range(3):
        completion = [11 + number, 4, 6, 10 + 2 * number][: 2 + number]
        own = random_ids(len(completion) - 1, seed=number + 1)
        found.append(sequence(completion))
        found[-1].experts = choices(np.concatenate([shared, own]))
    found.append(sequence([3, 4, 5], None, [1, 2]))
    found[-1].experts = choices(random_ids(4, seed=9))
    return found


def plainly_replayed(network, ids_LTK, is_given_T):
    """The same written directly into transformers' routers: a forward pass of one sequence."""
    for layer, ids_TK in zip(network.model.layers, ids_LTK, strict=True):
        router = layer.mlp.gate

        def forward(hidden, router=router, ids_TK=ids_TK):
            logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            probabilities = logits.softmax(-1, dtype=torch.float32)
            own = probabilities.topk(router.top_k).indices
            chosen = torch.where(is_given_T[:, None], ids_TK, own)
            weights = torch.stack([probabilities[t, chosen[t]] for t in range(len(chosen))])
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), chosen

        router.forward = forward


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_are_those_of_the_given_experts(folder, checkpointing):
    model = PolicyModel.load(folder, checkpointing=checkpointing, replay_experts=True)
    one = sequence([4, 6, 1], random_ids(len(PROMPT) + 1))  # nothing known of the last input
    (row,) = micro_batches(StepBatch([one]), 64)
    logits = model.logits(row)
    logits.square().sum().backward()
    plain = copy.deepcopy(PolicyModel.load(folder).network)
    ids_TLK = torch.tensor(np.concatenate([random_ids(len(PROMPT) + 1), np.zeros((1, LAYERS, TOP), int)]))
    is_given_T = torch.arange(len(ids_TLK)) < len(PROMPT) + 1
    plainly_replayed(plain, ids_TLK.transpose(0, 1), is_given_T)
    (packed,) = micro_batches(StepBatch([sequence([4, 6, 1])]), 64)
    plain_logits = plain(
        input_ids=packed.token_ids_T[None], position_ids=packed.position_ids_T[None], segments=packed.layout
    ).logits[0, packed.predict_index_N]
    plain_logits.square().sum().backward()
    torch.testing.assert_close(logits, plain_logits)
    routers = 0
    for (name, ours), theirs in zip(model.network.named_parameters(), plain.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * scale, name
        if name.endswith("mlp.gate.weight"):
            routers += bool(ours.grad.abs().max() > 0)
    assert routers == LAYERS


def test_packed_rows_are_those_of_one_sequence_each(folder):
    model = PolicyModel.load(folder, replay_experts=True)
    group = sequences_of_a_group()
    (row,) = micro_batches(StepBatch(group), 256)
    assert any(prefix is not None for prefix in row.layout.prefixes), "the prompt is shared"
    together = score(model, group, micro_batch_tokens=256).logprobs
    for one, ours in zip(group, together, strict=True):
        (alone,) = score(model, [one], micro_batch_tokens=256).logprobs
        torch.testing.assert_close(ours, alone)
    unpacked = PolicyModel.load(folder, packing=False, replay_experts=True)
    for ours, theirs in zip(together, score(unpacked, group, micro_batch_tokens=256).logprobs, strict=True):
        torch.testing.assert_close(ours, theirs)
    free = [Sequence(each.token_ids, each.mask) for each in group]
    others = score(model, free, micro_batch_tokens=256).logprobs
    assert (torch.cat(together) - torch.cat(others)).abs().mean() > 0.1, "the experts decide"


def test_a_row_computed_again_has_its_own_choices(folder):
    """Two rows are computed before the backward pass of the first."""
    group, grads = sequences_of_a_group(), []
    for at_once in (False, True):
        model = PolicyModel.load(folder, checkpointing=True, replay_experts=True)
        rows = [next(iter(micro_batches(StepBatch([one]), 64))) for one in group[:2]]
        if at_once:
            losses = [model.logits(row).square().sum() for row in rows]
            for loss in losses:
                loss.backward()
        else:
            for row in rows:
                model.logits(row).square().sum().backward()
        grads.append({name: each.grad for name, each in model.network.named_parameters()})
    for name, ours in grads[0].items():
        assert (ours - grads[1][name]).abs().max() <= 1e-5 * float(ours.abs().max()), name


def test_what_differs_is_counted(folder):
    model = PolicyModel.load(folder, replay_experts=True)
    own = []
    one = sequence([4, 6, 1])
    for layer in model.network.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: own.append(output[2]))
    score(model, [one], micro_batch_tokens=64)
    ids = torch.stack(own, 1).numpy()
    last = LAYERS - 1  # of the last layer's choice nothing else depends
    missing = [expert for expert in range(EXPERTS) if expert not in ids[3, last]]
    ids[3, last, 0] = missing[0]
    one.experts = choices(ids[:5])
    score(model, [one], micro_batch_tokens=64)
    counted = {name: int(value) for name, value in model.replay.counted().items()}
    assert counted == {"experts_differ": 1, "experts_compared": 5 * LAYERS}
    score(model, [sequence([4])], micro_batch_tokens=64)
    assert model.replay.counted() == {"experts_differ": 0, "experts_compared": 0}, "no choice was given"


def test_positions_without_a_choice():
    collected = RowChoices()
    first = sequence([1, 2], random_ids(3))
    collected.add(first, 0, 5)
    collected.add(sequence([1]), 2, 4)
    found = collected.experts("cpu")
    assert found.ids_TLK.shape == (7, LAYERS, TOP)
    assert (found.ids_TLK[:3].numpy() == random_ids(3)).all()
    assert (found.ids_TLK[3:] == MISSING).all()
    assert RowChoices().experts("cpu") is None


def test_two_bytes_an_id():
    given = ExpertChoices(np.full((2, 1, 3), 511, "<u2").tobytes(), 1, 3, 2)
    assert len(given) == 2
    collected = RowChoices()
    collected.add(Sequence([1, 2], [False, True], experts=given), 0, 2)
    found = collected.experts("cpu")
    assert found.highest == 511
    assert (found.ids_TLK == 511).all()


def test_wrong_choices_are_one_sentence(folder):
    model = PolicyModel.load(folder, replay_experts=True)
    one = sequence([4, 6])
    for ids, text in (
        (
            np.zeros((3, LAYERS + 1, TOP)),
            rf"for {LAYERS + 1} layers of {TOP} experts, .* has {LAYERS} layers of {TOP} out",
        ),
        (np.zeros((3, LAYERS, TOP - 1)), rf"for {LAYERS} layers of {TOP - 1} experts"),
        (np.full((3, LAYERS, TOP), EXPERTS), rf"ids up to {EXPERTS}, and the model .* {TOP} out of {EXPERTS}: engine"),
    ):
        one.experts = choices(ids)
        with pytest.raises(TrainingError, match=text):
            score(model, [one], micro_batch_tokens=64)
    one.experts = ExpertChoices(b"123", LAYERS, TOP)
    with pytest.raises(TrainingError, match=r"3 bytes of experts, which are not 2 layers of 4 ids .* make it again"):
        score(model, [one], micro_batch_tokens=64)
    one.experts = choices(np.zeros((3, LAYERS, TOP)))
    other = sequence([4, 6])
    other.experts = choices(np.zeros((3, LAYERS, TOP - 1)))
    with pytest.raises(TrainingError, match="in one batch: they are of two models"):
        score(model, [one, other], micro_batch_tokens=64)


def test_a_model_without_experts(model_folder):
    with refuses("model.replay_experts"):
        PolicyModel.load(model_folder, replay_experts=True)


@pytest.mark.quick("Qwen3Moe")
@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_replay_too(folder):
    group = sequences_of_a_group()
    plain, compiled = (PolicyModel.load(folder, replay_experts=True) for _ in range(2))
    assert compile_layers(compiled) == ""
    others = [sequence([3, 4]), sequence([8, 4, 1], random_ids(7, seed=4))]
    for batch in (group, others, group):
        expected = torch.cat(score(plain, batch, micro_batch_tokens=256).logprobs)
        found = torch.cat(score(compiled, batch, micro_batch_tokens=256).logprobs)
        torch.testing.assert_close(found, expected)


@pytest.fixture
def mixture():
    """A network of three layers in bfloat16, the first without experts."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP,
        norm_topk_prob=True, mlp_only_layers=[0],
    )  # fmt: skip
    network = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    for layer in network.model.layers[1:]:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    return network


def routed(network, tokens, **given):
    """What each layer's router gives."""
    found = []
    gates = [layer.mlp.gate for layer in network.model.layers[1:]]
    hooks = [gate.register_forward_hook(lambda _module, _inputs, output: found.append(output)) for gate in gates]
    with torch.no_grad():
        network.model(input_ids=torch.tensor([tokens]), use_cache=False, **given)
    for hook in hooks:
        hook.remove()
    return found


def test_its_own_choices_have_the_weights_that_they_had(mixture):
    tokens = list(range(3, 23))
    before = routed(mixture, tokens)
    replay = ExpertReplay(mixture)
    ids = torch.stack([torch.zeros_like(before[0][2]), *(ids for _, _, ids in before)], 1)
    after = routed(mixture, tokens, **replay.arguments(RowExperts(ids.short(), EXPERTS - 1)))
    for ours, theirs in zip(after, before, strict=True):
        assert all(map(torch.equal, ours, theirs)), "bit for bit"
    assert replay.counted() == {"experts_differ": 0, "experts_compared": 2 * 20}
    assert replay.arguments(None) == {}
    assert replay.counted() == {"experts_differ": 0, "experts_compared": 0}


def test_tokens_with_other_experts_are_counted_one_by_one(mixture):
    tokens = list(range(3, 23))
    ((_, _, first), (_, _, last)) = routed(mixture, tokens)
    replay, given = ExpertReplay(mixture), last.clone()
    for token in (0, 3, 4, 7, 11, 12, 13):
        given[token, 1] = next(expert for expert in range(EXPERTS) if expert not in last[token])
    given[1] = last[1].flip(0)
    ids = torch.stack([torch.zeros_like(first), first, given], 1)
    ids[15:] = MISSING
    routed(mixture, tokens, **replay.arguments(RowExperts(ids.short(), EXPERTS - 1)))
    assert replay.counted() == {"experts_differ": 7, "experts_compared": 2 * 15}


def test_a_decoder_without_layers_of_the_known_kind_is_refused(mixture):
    del mixture.model.layers[1].mlp
    with refuses("model.replay_experts"):
        ExpertReplay(mixture)
    mixture.get_decoder = lambda: torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="has no layers with an mlp"):
        ExpertReplay(mixture)


def test_the_share_that_differs_is_of_what_was_compared():
    sums = {"loss": torch.tensor(1.0), "experts_differ": torch.tensor(3.0), "experts_compared": torch.tensor(12.0)}
    assert share_that_differs(sums) == {"mismatch/experts_differ": 0.25}
    assert list(sums) == ["loss"]
    assert share_that_differs(sums) == {}
    for compared, share in ((1.0, 1.0), (0.0, 0.0)):
        sums = {"experts_differ": torch.tensor(compared), "experts_compared": torch.tensor(compared)}
        assert share_that_differs(sums) == {"mismatch/experts_differ": share}
    assert share_that_differs({"experts_compared": torch.tensor(1.0)}) == {}
