"""Training on images: rows, positions, gradients and what the vision tower is asked."""

import io
import json

import pytest
import torch
import transformers
from PIL import Image
from tests.trainer.plain import logprobs_of
from tests.trainer.steps import learner_of
from tests.trainer.test_vision_towers import PATCHES, plain, save_with_tower
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from slipstream import records
from slipstream.data.images.families import image_processor
from slipstream.data.images.reading import read_image
from slipstream.errors import ConfigError, TrainingError
from slipstream.trainer.attention.row_images import image_positions
from slipstream.trainer.learner import score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches

GRIDS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
FAMILIES = (*GRIDS, "gemma3")
START, END, IMAGE = 60, 61, 62
NEWLINES = 51
"""The tokens from there are of one to four newlines."""


def save(folder, family):
    """A small model that reads images of 8 to 64 pixels a side, of which 8 x 8 are a token; or of 16, by 4 tokens."""
    save_with_tower(folder, family)
    if family == "gemma3":
        return with_squares(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCHES["patch_size"],
        "temporal_patch_size": PATCHES["temporal_patch_size"],
        "merge_size": PATCHES["spatial_merge_size"],
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def with_squares(folder):
    """What else Gemma 3 has in its folder."""
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    words = {"\n" * number: NEWLINES + number - 1 for number in range(1, 5)}
    Tokenizer(WordLevel(words, unk_token="\n")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: save(tmp_path_factory.mktemp("models") / family, family) for family in FAMILIES}


def picture(width, height, seed):
    noise = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(noise.numpy()).save(file, "PNG")
    return read_image(file.getvalue(), "picture")


WIDE, TALL, SMALL = picture(40, 16, 0), picture(16, 24, 1), picture(9, 11, 2)


def sequence(processor, parts, answer, seed=0):
    """Words and images, and an answer to train on."""
    tokens = []
    images = [part for part in parts if isinstance(part, records.Media)]
    for part in parts:
        if isinstance(part, records.Media):
            tokens += [START, IMAGE, END] if processor.token_id == IMAGE else [START]
        else:
            tokens += [(7 * place + seed) % 50 + 1 for place in range(part)]
    tokens = processor.expand(tokens, images)
    placed = processor.place(tokens, images)
    said = [(11 * place + answer) % 50 + 1 for place in range(4 + answer)]
    return records.Sequence([*tokens, *said], [False] * len(tokens) + [True] * len(said), media=list(placed))


def sequences(folder):
    """Two completions of one prompt, two images in another, text alone, and an image in a second turn."""
    processor = image_processor(folder)
    second = sequence(processor, [5, TALL, 3, SMALL, 4], 3)
    second.mask[2:4] = [True, True]  # a turn before the images
    return [
        sequence(processor, [3, WIDE, 6], 1),
        sequence(processor, [3, WIDE, 6], 5),
        sequence(processor, [WIDE, 2, TALL, 7], 2),
        sequence(processor, [3, TALL, 1, 1, 6], 1),  # as many tokens of an image, but another one
        sequence(processor, [12], 4),
        second,
    ]


def own_loss(network, folder, batch):
    """The loss by transformers alone, one sequence at a time, with positions that the model counts."""
    processor = image_processor(folder)
    total = sum(each.num_trainable for each in batch)
    loss = 0.0
    for each in batch:
        ids, images = torch.tensor([each.token_ids]), {}
        if each.media:
            kinds = "token_type_ids" if processor.sees_itself else "mm_token_type_ids"
            images = processor.pixels(each.media) | {kinds: (ids == IMAGE).int()}
        loss = loss - logprobs_of(network, each, **images).sum() / total
    return loss


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_images_give_the_plain_models_loss_and_gradients(family, trained, folders, gradients_of):
    folder = folders[family]
    batch = sequences(folder)
    network = plain(folder)
    loss = own_loss(network, folder, batch)
    loss.backward()
    model = PolicyModel.load(folder, train_tower=trained)
    learner = learner_of(model)
    found = learner.forward_backward(StepBatch(batch), SFTObjective())
    assert found["num_micro_batches"] == 1
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
    ours = gradients_of(learner)
    towers = {name for name in ours if "visual" in name or "vision_tower" in name or "projector" in name}
    assert bool(towers) == trained
    for name, parameter in network.named_parameters():
        if name in ours:
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(ours[name], expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("tokens", [40, 512])
def test_gradients_do_not_depend_on_packing(packing, tokens, folders, gradients_of):
    folder = folders["qwen3-vl"]
    batch = sequences(folder)
    expected = learner_of(PolicyModel.load(folder, train_tower=True))
    expected.forward_backward(StepBatch(batch), SFTObjective())
    learner = learner_of(PolicyModel.load(folder, train_tower=True, packing=packing))
    learner.micro_batch_tokens = tokens
    assert learner.forward_backward(StepBatch(batch), SFTObjective())["num_micro_batches"] > 1 - (tokens > 40)
    for name, gradient in gradients_of(expected).items():
        torch.testing.assert_close(gradients_of(learner)[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_placeholder_may_be_no_token_of_the_vocabulary(folders):
    """As transformers allows it: the token has no embedding of its own."""
    folder = folders["gemma3"]
    model, batch = PolicyModel.load(folder), sequences(folder)
    expected = score(model, batch, micro_batch_tokens=512).logprobs
    for each in batch:
        beyond = model.config.get_text_config().vocab_size
        each.token_ids = [beyond if token == IMAGE else token for token in each.token_ids]
    assert all(map(torch.equal, score(model, batch, micro_batch_tokens=512).logprobs, expected))


@pytest.mark.parametrize("trained", [False, True])
def test_the_tower_reads_an_image_once_a_step(trained, folders):
    folder = folders["qwen2-vl"]
    model = PolicyModel.load(folder, train_tower=trained)
    learner, batch = learner_of(model), sequences(folder)
    learner.micro_batch_tokens = 40
    learner.forward(batch)
    assert model.images.num_read == 3
    learner.forward_backward(StepBatch(batch), SFTObjective())
    assert model.images.num_read == (6 if trained else 3)  # a trained one again, for its gradient
    before = learner.forward(batch).logprobs
    learner.optim_prepare(1e-2)
    learner.optim_commit()
    after = learner.forward(batch).logprobs
    assert model.images.num_read == (9 if trained else 3)
    assert not before[0].allclose(after[0])


@pytest.mark.parametrize("family", GRIDS)
def test_positions_are_the_models_own(family, folders):
    network = plain(folders[family])
    for each in sequences(folders[family]):
        if each.media:
            ids = torch.tensor([each.token_ids])
            merge = PATCHES["spatial_merge_size"]
            grids = torch.tensor([[f, merge * r, merge * c] for f, r, c in (image.grid for image in each.media)])
            expected, _ = network.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)
            places = [(image.start, image.grid) for image in each.media]
            assert image_positions(len(each), places).equal(expected[:, 0])
            assert image_positions(len(each) - 2, places).equal(expected[:, 0, :-2])


def test_what_the_tower_gives_must_fit_the_prompt(folders):
    wrong = sequences(folders["qwen2-vl"])[0]
    (image,) = wrong.media
    wrong.media = [records.Media("image", image.uri, image.sha256, image.start, 2, 40, 16, image.grid)]
    with pytest.raises(TrainingError, match=r"gives 10 features .* and the prompt has 2 placeholder tokens"):
        PolicyModel.load(folders["qwen2-vl"]).logits(*micro_batches(StepBatch([wrong]), 512))


def test_other_families_are_refused(tmp_path):
    transformers.PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="of the type paligemma: images can be trained on with qwen2_vl, qwen2_5_vl"):
        image_processor(tmp_path)
