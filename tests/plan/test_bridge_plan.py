"""Which bridge `weights.bridge = "auto"` becomes, and that the plan says why."""

import pytest

from slipstream.config import LoraConfig
from slipstream.config.checks import contradictions
from slipstream.errors import ConfigError
from slipstream.plan.facts import AdapterFacts
from slipstream.plan.memory.sizes import GIB

from .test_plan import ALONE, CARD, GENERATED, GRPO, LORA, SFT, SFT_DATA, plan, reasons

ADAPTER = AdapterFacts(num_parameters=10_000, target_modules=("q_proj",))
SMALL = CARD | {"gpu_memory_bytes": 48 * GIB}
TWO = CARD | {"num_gpus": 2}


def bridge_of(values=None, config=GRPO, **measured):
    made = plan(GENERATED | (values or {}), config, **measured)
    assert not list(contradictions(made.config)), "what is derived could have been set"
    return made.config.weights.bridge, reasons(made)["weights.bridge"]


@pytest.mark.parametrize(
    ("values", "measured", "bridge", "reason"),
    [
        ({}, CARD, "single_copy", "one copy of the weights, and nothing moves in an update; it leaves up to "),
        ({"training.staleness": 1}, CARD, "single_copy", "nothing moves"),
        ({"algorithm.kl_coef": 0.1}, CARD, "single_copy", "nothing moves"),
        ({"training.optimizer": "adamw_bf16"}, CARD, "single_copy", "nothing moves"),
        ({"training.optimizer": "muon"}, CARD, "single_copy", "nothing moves"),
        ({"model.dtype": "float32"}, CARD, "single_copy", "nothing moves"),
        ({"algorithm.kind": "ppo"}, CARD, "single_copy", "nothing moves"),
        ({}, CARD | {"num_experts": 8}, "single_copy", "nothing moves"),
        ({"inference.options": {"max_num_batched_tokens": 4096}}, CARD, "single_copy", "nothing moves"),
        ({"run.placement": "shared"}, TWO, "single_copy", "nothing moves"),
        ({}, TWO, "broadcast", "from GPU to GPU"),
        ({}, {"context_length": 4096}, "disk", "there is no GPU"),
        ({"inference.sleep": True}, CARD, "disk", "inference.sleep = true frees the engine's weights"),
        ({"weights.delta": True}, CARD, "disk", "weights.delta = true sends what changed"),
        ({"inference.options": {"quantization": "fp8"}}, CARD, "disk", "inference.options.quantization"),
        ({"inference.options": {"cpu-offload-gb": 4}}, CARD, "disk", "inference.options.cpu-offload-gb"),
        ({"inference.replicas": 2, "run.placement": "shared"}, TWO, "disk", "each of inference.replicas = 2 engines"),
        ({"inference.tensor_parallel_size": 2, "run.placement": "shared"}, TWO, "disk", "which must be equal"),
    ],
)
def test_the_rule(values, measured, bridge, reason):
    found, why = bridge_of(values, **measured)
    assert found == bridge
    assert reason in why


def test_an_adapter_travels_alone_and_dora_as_a_whole_model():
    dora = LORA.model_copy(update={"lora": LoraConfig(dora=True)})
    for measured in (CARD, {"context_length": 4096}):
        assert bridge_of(config=LORA, adapter=ADAPTER, **measured)[0] == "lora"
    found, why = bridge_of(config=dora, adapter=ADAPTER, **CARD)
    assert (found, "DoRA" in why) == ("disk", True)
    assert bridge_of(config=dora, adapter=ADAPTER, **TWO)[0] == "broadcast"


def test_an_adapter_of_a_tower_that_vllm_does_not_find_travels_merged():
    towers = LORA.model_copy(update={"model": GRPO.model.model_copy(update={"train_tower": True})})
    gemma, qwen = ({"architecture": f"{kind}ForConditionalGeneration"} for kind in ("Gemma3", "Qwen3VL"))
    found, why = bridge_of(config=towers, adapter=ADAPTER, **gemma, **CARD)
    assert (found, "other names for the layers of Gemma3" in why) == ("disk", True)
    assert bridge_of(config=towers, adapter=ADAPTER, **gemma, **TWO)[0] == "broadcast"
    assert bridge_of(config=towers, adapter=ADAPTER, **qwen, **CARD)[0] == "lora"
    for bridge in ("lora", "single_copy"):
        with pytest.raises(ConfigError, match=f'weights.bridge = "{bridge}" publishes the adapter alone'):
            bridge_of({"weights.bridge": bridge}, towers, adapter=ADAPTER, **gemma, **CARD)


def test_where_both_sides_do_not_fit_the_one_that_leaves_more_room_wins_and_both_are_shown():
    found, why = bridge_of(**SMALL)
    assert found == "disk"
    assert "as that leaves more memory: single_copy leaves up to" in why
    assert "disk, where the engine sleeps while the trainer works, up to" in why
    assert plan(GENERATED, **SMALL).config.inference.sleep is True
    # Where the engine may not sleep, one copy always leaves more.
    for values in ({"training.staleness": 1}, {"inference.sleep": False}):
        made = plan(GENERATED | values, **SMALL)
        assert (made.config.weights.bridge, made.config.inference.sleep) == ("single_copy", False)
    # A model whose weights the trainer cannot have beside the engine's, not even while that sleeps.
    large = SMALL | {"num_parameters": 2_200_000_000}
    found, why = bridge_of(**large)
    assert found == "single_copy"
    assert "0.00 GiB" in why.partition("disk, where the engine sleeps")[2]


@pytest.mark.parametrize(
    ("num_gpus", "gib", "values", "bridge", "placement"),
    [
        (2, 139, {}, "single_copy", "shared"),
        (4, 139, {}, "broadcast", "separate"),
        (4, 139, {"run.placement": "shared"}, "single_copy", "shared"),
        (2, 34, {}, "single_copy", "shared"),  # by another bridge ranks need cards of their own
    ],
)
def test_ranks_and_as_many_workers_share_cards_where_there_are_no_others(num_gpus, gib, values, bridge, placement):
    values = GENERATED | {"training.ranks": 2, "inference.tensor_parallel_size": 2} | values
    made = plan(values, **CARD | {"num_gpus": num_gpus, "gpu_memory_bytes": gib * GIB})
    assert (made.config.weights.bridge, made.config.run.placement) == (bridge, placement)


def test_sft_that_is_evaluated():
    assert bridge_of(config=SFT, max_sequence_tokens=SFT_DATA.max_sequence_tokens, **CARD)[0] == "single_copy"
    made = plan(GENERATED, ALONE, max_sequence_tokens=SFT_DATA.max_sequence_tokens, **CARD)
    assert "weights.bridge" not in reasons(made)


def test_what_was_set_stays():
    for bridge in ("disk", "broadcast", "restart", "single_copy"):
        made = plan(GENERATED | {"weights.bridge": bridge}, **CARD)
        assert made.config.weights.bridge == bridge
        assert "weights.bridge" not in reasons(made)


TWO_ENGINES = {"inference.replicas": 2, "weights.bridge": "disk", "training.staleness": 1}
EVALUATED = {"evaluation.every": 10}


@pytest.mark.parametrize(
    ("values", "beside", "reason"),
    [
        ({}, True, "one engine stays on the version and evaluates it, the other goes on"),
        ({"inference.replicas": 3}, True, "evaluates it, the other 2 go on"),
        ({"weights.delta": True}, True, "the other goes on"),
        ({"weights.bridge": "broadcast"}, False, '"broadcast" brings a version to all engines at once'),
        ({"weights.bridge": "restart"}, False, 'weights.bridge = "restart" brings a version to all'),
        ({"inference.replicas": 1}, False, "the run has inference.replicas = 1 engine, and two or more are needed"),
        ({"training.staleness": 0}, False, "without training.staleness the course of a run depends on no timing"),
        ({"evaluation.stop_at": 0.5}, False, "evaluation.stop_at may end the run by what they say"),
        ({"evaluation.patience": 3}, False, "evaluation.patience may end the run"),
    ],
)
def test_whether_an_engine_evaluates_while_others_go_on(values, beside, reason):
    card = CARD | {"num_gpus": 4}
    made = plan(GENERATED | EVALUATED | TWO_ENGINES | values, **card)
    assert made.config.evaluation.beside is beside
    assert reason in reasons(made)["evaluation.beside"]
    # What was asked for is done, or refused with the same reason.
    asked = GENERATED | EVALUATED | TWO_ENGINES | values | {"evaluation.beside": True}
    if values.get("weights.bridge") or values.get("inference.replicas") == 1:
        with pytest.raises(ConfigError, match=r"evaluation\.beside = true needs an engine that can stay") as refused:
            plan(asked, **card)
        assert reason in str(refused.value)
    else:
        made = plan(asked, **card)
        assert made.config.evaluation.beside is True
        assert "evaluation.beside" not in reasons(made)
    made = plan(asked | {"evaluation.beside": False}, **card)
    assert (made.config.evaluation.beside, "evaluation.beside" in reasons(made)) == (False, False)


def test_of_engines_that_sleep_none_evaluates():
    values = EVALUATED | {"inference.replicas": 2, "run.placement": "shared", "inference.sleep": True}
    made = plan(GENERATED | values, **TWO)
    assert made.config.evaluation.beside is False
    assert "under inference.sleep = true all engines sleep" in reasons(made)["evaluation.beside"]


def test_an_adapter_can_be_evaluated_beside_training():
    values = EVALUATED | {"inference.replicas": 2, "training.staleness": 1}
    made = plan(GENERATED | values, LORA, adapter=ADAPTER, **CARD | {"num_gpus": 3})
    assert made.config.evaluation.beside is True
