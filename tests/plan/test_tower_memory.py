"""What the plan counts of a vision tower is what torch's allocator sees: activations by patches, features, states."""

import dataclasses
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.config import ModelConfig
from slipstream.data.images.families import image_processor
from slipstream.plan.facts import AdapterFacts
from slipstream.plan.measure import measure_tower, read_trained_model
from slipstream.plan.memory.sizes import BYTES_OF, optimizer_bytes
from slipstream.plan.memory.tower import block_elements, feature_bytes, patches_at_once, tower_bytes
from slipstream.trainer.learner import Learner, score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch
from slipstream.weights.adapter_folder import AdapterConfig
from tests.plan.test_memory import most_bytes
from tests.plan.test_plan import CARD, GRPO, LORA, SFT, plan
from tests.trainer.test_image_rows import FAMILIES, picture, save, sequence, sequences
from tests.trainer.test_vision_towers import MODELS

TOWERS = re.compile("visual|vision_tower|multi_modal_projector")
DTYPES = ("float32", "bfloat16")
QUICK = pytest.mark.quick("*-float32", "gemma3-bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family and depth of the tower. Its vectors are wide, so that little else counts."""
    made = {}

    def folder_of(family, depth=2):
        if (family, depth) not in made:
            kind, own, tower, tokens = MODELS[family]
            wide = {"embed_dim": 128} if family == "qwen2-vl" else {"hidden_size": 128, "intermediate_size": 320}
            with pytest.MonkeyPatch.context() as patch:
                layers = "num_hidden_layers" if family == "gemma3" else "depth"
                patch.setitem(MODELS, family, (kind, own, tower | wide | {layers: depth}, tokens))
                made[family, depth] = save(tmp_path_factory.mktemp("models") / family, family)
        return made[family, depth]

    return folder_of


def facts_of(folder, batch, dtype="float32", *, trained=True):
    config = SFT.model_copy(update={"model": ModelConfig(path=str(folder), dtype=dtype, train_tower=trained)})
    images = [[(media.sha256, media.num_tokens) for media in sequence.media] for sequence in batch if sequence.media]
    return measure_tower(config, read_trained_model(str(folder), with_tower=trained), images)


def images_of(batch):
    return list({media.sha256: media for sequence in batch for media in sequence.media}.values())


def many(folder):
    """So many patches that parameters are few beside what is made of them."""
    processor = image_processor(folder)
    num_images = 10 * 64 // processor.num_tokens(picture(64, 64, 0))
    return [sequence(processor, [picture(64, 64, seed), 3], 1) for seed in range(num_images)]


def kept(work):
    """What is allocated more after `work`, whose result is kept, than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    assert result is not None
    return sum(event.self_cpu_memory_usage for event in profiler.events())


@QUICK
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_is_planned(family, dtype, folders):
    """The difference that two more blocks make for a patch."""
    sizes, planned = {}, {}
    for depth in (2, 4):
        folder = folders(family, depth)
        batch = sequences(folder)
        tower, images = facts_of(folder, batch, dtype), images_of(batch)
        model = PolicyModel.load(folder, dtype, train_tower=True)
        model.images._read(images)  # tables are made
        sizes[depth] = kept(lambda model=model, images=images: model.images._read(images))
        planned[depth] = tower_bytes(tower, dtype)
        assert tower.depth == depth
    num_patches = patches_at_once(tower)
    assert planned[4] - planned[2] == 2 * num_patches * BYTES_OF[dtype] * block_elements(tower, dtype)
    assert 0.97 * (planned[4] - planned[2]) <= sizes[4] - sizes[2] <= 1.03 * (planned[4] - planned[2])


@pytest.mark.quick("*-float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_tower_takes_at_most_what_is_planned(family, dtype, folders):
    folder = folders(family, 4)
    batch = many(folder)
    tower, images = facts_of(folder, batch, dtype), images_of(batch)
    model = PolicyModel.load(folder, dtype, train_tower=True)

    def both_passes():
        found = model.images._read(images)
        torch.autograd.grad([part.sum() for each in found for part in each.parts], list(tower_parameters(model)))

    both_passes()
    gradients = sum(parameter.nbytes for parameter in tower_parameters(model))
    assert gradients < 0.1 * tower_bytes(tower, dtype)
    assert 0.7 * tower_bytes(tower, dtype) <= most_bytes(both_passes) <= tower_bytes(tower, dtype) + gradients


def tower_parameters(model):
    return (parameter for name, parameter in model.network.named_parameters() if TOWERS.search(name))


@QUICK
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_takes_a_block_at_a_time(family, dtype, folders):
    folder = folders(family, 4)
    batch = many(folder)
    tower = facts_of(folder, batch, dtype, trained=False)
    model, images = PolicyModel.load(folder, dtype), images_of(batch)
    with torch.no_grad():
        model.images._read(images)
        taken = most_bytes(lambda: model.images._read(images))
    assert 0.35 * tower_bytes(tower, dtype) <= taken <= tower_bytes(tower, dtype)
    assert tower_bytes(tower, dtype) < 0.5 * tower_bytes(dataclasses.replace(tower, is_trained=True), dtype)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_states_are_those_that_are_there(family, trained, folders):
    folder = folders(family)
    batch = sequences(folder)
    tower = facts_of(folder, batch, trained=trained)
    model = PolicyModel.load(folder, train_tower=trained)
    learner = Learner(model, MasterAdamW(model.network.named_parameters()), micro_batch_tokens=512)
    sizes = []
    model.images.backward = lambda: sizes.append(
        sum(part.nbytes * (1 + (part.grad is not None)) for each in model.images._kept.values() for part in each.parts)
    )
    learner.forward_backward(StepBatch(batch), SFTObjective())
    assert sizes == [feature_bytes(tower, "float32", len(batch))]
    masters = learner.optimizer.masters()
    known = read_trained_model(str(folder), with_tower=trained)
    assert known.num_decoding == sum(master.numel() for master in masters.values())
    of_tower = sum(master.numel() for name, master in masters.items() if TOWERS.search(name))
    assert tower.num_parameters == known.num_tower == sum(parameter.numel() for parameter in tower_parameters(model))
    assert of_tower == (tower.num_parameters if trained else 0)
    assert optimizer_bytes("adamw", of_tower, None) == 16 * of_tower


def test_a_reference_beside_an_adapter_of_the_tower_keeps_features_of_its_own(folders):
    folder = folders("qwen3-vl")
    batch = sequences(folder)
    tower = dataclasses.replace(facts_of(folder, batch), total_tokens=10**5)
    model = PolicyModel.load(folder, train_tower=True)
    model.add_adapter(AdapterConfig(4, 8.0, ("all-linear",), str(folder), with_tower=True))
    reference = model.without_adapter()
    score(reference, batch, micro_batch_tokens=512)
    kept = sum(features.num_bytes for features in reference.images._kept.values())
    tokens = sum(media.num_tokens for media in images_of(batch))
    towers = LORA.model_copy(update={"model": GRPO.model.model_copy(update={"train_tower": True, "dtype": "float32"})})
    rows, facts = {"training.micro_batch_tokens": 512}, {"adapter": AdapterFacts(10_000, ("q_proj",)), "tower": tower}
    without, with_one = (plan(rows | {"algorithm.kl_coef": kl}, towers, **facts).trainer_bytes for kl in (0.0, 0.1))
    assert with_one - without == kept * 10**5 // tokens


def test_masked_attention_of_a_gpu_is_counted(folders):
    """Elsewhere the plan was compared with what torch allocates; a GPU's is in BENCHMARKS.md."""
    towers = {family: facts_of(folders(family), sequences(folders(family)), trained=False) for family in FAMILIES}
    rows = {"training.micro_batch_tokens": 4096, "training.compile": False}
    each = {
        family: [plan(rows, tower=dataclasses.replace(towers["qwen3-vl"], model_type=tower.model_type), **on)
                 for on in (CARD, {})]
        for family, tower in towers.items()
    }  # fmt: skip
    on_gpu, on_cpu = ({family: made[place].trainer_bytes for family, made in each.items()} for place in (0, 1))
    assert on_gpu["gemma3"] > on_gpu["qwen3-vl"] == on_gpu["qwen2-vl"]
    assert on_cpu["gemma3"] <= on_cpu["qwen3-vl"]


def test_large_images_and_many(folders):
    tower = facts_of(folders("qwen2-vl"), sequences(folders("qwen2-vl")))
    many = dataclasses.replace(tower, total_tokens=10**6, image_tokens=1000, row_tokens=2000)
    assert patches_at_once(many) == 16_384
    assert patches_at_once(dataclasses.replace(many, image_tokens=16_000)) == 64_000
    each = tower.token_outputs * 4
    assert feature_bytes(many, "float32", 8) == 2 * each * 16_000, "of a step"
    frozen = dataclasses.replace(many, is_trained=False, total_tokens=10**9)
    assert feature_bytes(frozen, "float32", 8) == 1 << 30
