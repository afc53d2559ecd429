"""What is kept of a vision tower's features, in what portions it reads images, and what gradients pass through it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.records import Media
from slipstream.trainer.attention.row_images import RowImage
from slipstream.trainer.model import image_features
from slipstream.trainer.model.image_features import (
    Features,
    ImageFeatures,
    RowEmbeddings,
    embed_images,
    image_places,
    uses_its_own_attention,
)

WIDTH = 3


class Tower(nn.Module):
    """Gives each image's number times its weight for each token, and twice that for a deeper layer."""

    def __init__(self, *, deep=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.deep, self.read = deep, []

    @property
    def base_model(self):
        return self

    def get_image_features(self, numbers, counts, return_dict):
        assert return_dict
        self.read.append([int(number) for number in numbers])
        pooled = [
            number * self.weight.expand(count, WIDTH) for number, count in zip(numbers, counts.tolist(), strict=True)
        ]
        deep = [[2 * each for each in pooled]] if self.deep else None
        return SimpleNamespace(pooler_output=pooled, deepstack_features=deep)


class Processor:
    patches_per_token = 4

    def pixels(self, images):
        numbers = torch.tensor([float(image.sha256) for image in images])
        return {"numbers": numbers, "counts": torch.tensor([image.num_tokens for image in images])}


def image(number, num_tokens=2, start=0):
    return RowImage(Media("image", "", str(number), 0, num_tokens, 8, 8, (1, 1, num_tokens)), start)


@pytest.fixture
def make(monkeypatch, tmp_path):
    monkeypatch.setattr(image_features, "image_processor", lambda folder, trusted: Processor())

    def made(*, trained, deep=True, most_bytes=None, most_patches=None):
        if most_bytes is not None:
            monkeypatch.setattr(image_features, "MOST_BYTES", most_bytes)
        if most_patches is not None:
            monkeypatch.setattr(image_features, "_MOST_PATCHES", most_patches)
        tower = Tower(deep=deep)
        return tower, ImageFeatures(tower, tmp_path, trained=trained)

    return made


BYTES = 2 * 2 * WIDTH * 4
"""Of an image of two tokens, with its deeper layer."""


def test_an_image_is_read_once_and_given_in_the_order_of_the_row(make):
    tower, images = make(trained=False)
    found = images.of([image(3), image(5), image(3)])
    assert [each.parts[0][0, 0].item() for each in found] == [3.0, 5.0, 3.0]
    assert [each.parts[1][0, 0].item() for each in found] == [6.0, 10.0, 6.0]
    assert not any(part.requires_grad for each in found for part in each.parts)
    images.of([image(5), image(4)])
    images.clear()
    images.of([image(3)])
    assert tower.read == [[3, 5], [4]], "a tower that is not trained stays the same"
    assert images.num_read == 3
    assert found[0].num_bytes == BYTES


def test_other_grids_of_the_same_picture_are_other_images(make):
    tower, images = make(trained=False)
    assert [len(each.parts[0]) for each in images.of([image(3), image(3, 5)])] == [2, 5]
    assert tower.read == [[3, 3]]


def test_the_least_recently_used_are_given_up(make):
    tower, images = make(trained=False, most_bytes=3 * BYTES)
    for number in (1, 2, 3):
        images.of([image(number)])
    images.of([image(1)])
    images.of([image(4)])  # 2 is given up
    images.of([image(1), image(3), image(4)])
    assert tower.read == [[1], [2], [3], [4]], "three fit exactly"
    images.of([image(2)])  # 1 is given up
    images.of([image(3), image(4)])
    images.of([image(1)])
    assert tower.read == [[1], [2], [3], [4], [2], [1]]


def test_what_a_row_needs_is_kept_however_large_it_is(make):
    tower, images = make(trained=False, most_bytes=1)
    images.of([image(1), image(2)])
    images.of([image(2), image(1)])
    images.of([image(1)])
    images.of([image(2)])
    assert tower.read == [[1, 2], [2]]


@pytest.mark.parametrize("deep", [True, False])
def test_gradients_of_all_rows_pass_through_the_tower_once(make, deep):
    tower, images = make(trained=True, deep=deep, most_bytes=1)
    for number, factor in ((3, 1.0), (5, 10.0), (3, 100.0), (7, 0.0)):
        (found,) = images.of([image(number)])
        if factor:
            sum(factor * part.sum() for part in found.parts).backward()
    assert tower.weight.grad is None
    images.of([image(8)])
    images.backward()
    layers = 3.0 if deep else 1.0
    assert tower.weight.grad.tolist() == [2 * layers * (3 * 101 + 5 * 10)] * WIDTH
    assert [sorted(each) for each in tower.read] == [[3], [5], [7], [8], [3, 5]], "each with a gradient again"
    images.backward()
    assert tower.weight.grad.tolist() == [2 * layers * (3 * 101 + 5 * 10)] * WIDTH, "it is used up"
    images.clear()
    images.of([image(3)])
    assert tower.read[-1] == [3], "the tower has changed"


def test_a_gradient_of_the_deeper_layer_alone_does_not_stop_a_tower_that_has_none(make):
    """As where only what comes after the first part has an adapter."""
    tower, images = make(trained=True)
    tower.weight.requires_grad_(False)
    (found,) = images.of([image(3)])
    sum(part.sum() for part in found.parts).backward()
    images.backward()
    assert tower.weight.grad is None
    assert all(part.grad is None for part in found.parts)


def test_a_frozen_view_of_a_trained_tower_has_features_of_its_own(make):
    tower, images = make(trained=True)
    images.of([image(3)])
    frozen = images.frozen()
    (found,) = frozen.of([image(3)])
    assert not found.parts[0].requires_grad
    frozen.backward()
    assert frozen.frozen() is frozen
    assert tower.read == [[3], [3]]


def test_own_code_of_a_processor_is_trusted_where_the_models_is(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(image_features, "image_processor", lambda *given: asked.append(given) or Processor())
    for trusted in (True, False):
        images = ImageFeatures(Tower(), tmp_path, trained=True, trust_remote_code=trusted)
        images.of([image(1)])
        images.frozen().of([image(1)])
    assert asked == [(tmp_path, True)] * 2 + [(tmp_path, False)] * 2


def test_the_tower_reads_portions_of_bounded_size(make):
    tower, images = make(trained=False, most_patches=23)  # 5 tokens
    images.of([image(1, 2), image(2, 3), image(3, 1), image(4, 9), image(5, 1), image(6, 4), image(7, 5)])
    assert tower.read == [[1, 2], [3], [4], [5, 6], [7]]
    images.of([])
    assert len(tower.read) == 5


@pytest.mark.parametrize("layout", ["one tensor", "of one size"])
def test_layers_in_one_tensor_are_divided_by_image(make, monkeypatch, layout):
    _, images = make(trained=False)
    own = Tower.get_image_features

    def together(self, **given):
        output = own(self, **given)
        join = torch.cat if layout == "one tensor" else torch.stack
        deep = [join(layer) for layer in output.deepstack_features]
        return SimpleNamespace(pooler_output=join(output.pooler_output), deepstack_features=deep)

    monkeypatch.setattr(Tower, "get_image_features", together)
    found = images.of([image(3), image(5), image(6, 2 if layout == "of one size" else 4)])
    assert [each.parts[0][-1, 0].item() for each in found] == [3.0, 5.0, 6.0]
    assert [each.parts[1][-1, 0].item() for each in found] == [6.0, 10.0, 12.0]


def test_features_take_the_places_of_placeholders():
    embeds, row = torch.zeros(8, WIDTH), [image(1, 2, start=1), image(2, 3, start=5)]
    places = image_places(row)
    assert places.tolist() == [1, 2, 5, 6, 7]
    first = torch.arange(15.0, dtype=torch.float64).view(5, WIDTH) + 1
    found = [Features([part, 10 * part], image.media) for part, image in zip(first.split([2, 3]), row, strict=True)]
    row = embed_images(embeds, places, found)
    expected = torch.zeros(8, WIDTH)
    expected[[1, 2, 5, 6, 7]] = first.float()
    assert torch.equal(row.embeds_TD, expected)
    assert not embeds.any(), "a new tensor"
    assert row.image_mask_T.tolist() == [False, True, True, False, False, True, True, True]
    further = row.further()
    assert further.keys() == {"visual_pos_masks", "deepstack_visual_embeds"}
    assert torch.equal(further["visual_pos_masks"], row.image_mask_T[None])
    (deep,) = further["deepstack_visual_embeds"]
    assert torch.equal(deep, 10 * first.float())


def test_a_decoder_is_told_of_deeper_features_only_where_there_are_some():
    plain = embed_images(
        torch.zeros(2, WIDTH), torch.tensor([1]), [Features([torch.ones(1, WIDTH)], image(1, 1).media)]
    )
    assert plain.further() == {}
    assert RowEmbeddings(torch.zeros(2, WIDTH)).further() == {}


def test_only_a_tower_attends_as_transformers_does():
    class VisionConfig(SimpleNamespace):
        pass

    class TextConfig(SimpleNamespace):
        pass

    parts = [nn.Linear(1, 1) for _ in range(4)]
    parts[0].config = VisionConfig(_attn_implementation="ours")
    parts[1].config = TextConfig(_attn_implementation="ours")
    parts[2].config = VisionConfig()
    uses_its_own_attention(nn.ModuleList(parts))
    assert parts[0].config._attn_implementation == "sdpa"
    assert parts[1].config._attn_implementation == "ours"
    assert not vars(parts[2].config)
