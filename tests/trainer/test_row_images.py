"""Where the images of a row lie, and the rotary positions that follow from them."""

import pytest

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.attention.row_images import RowImages, image_positions


def image(start, num_tokens, grid=(1, 1, 2), *, sees_itself=False):
    return records.Media("image", "file", f"{start:064}", start, num_tokens, 8, 8, grid, sees_itself)


def sequence(length, *images):
    return records.Sequence([1] * length, [False] * (length - 1) + [True], media=list(images))


def test_positions_go_on_after_the_longer_side_of_an_image():
    found = image_positions(14, [(2, (1, 2, 3)), (9, (2, 2, 1))])
    frames = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 7, 7, 8]
    rows = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 6, 7, 8]
    columns = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 8]
    assert found.tolist() == [frames, rows, columns]


def test_positions_end_where_the_sequence_is_cut():
    images = [(2, (1, 2, 3)), (9, (2, 2, 1)), (20, (1, 1, 1))]
    whole = image_positions(30, images)
    for length in range(1, 31):
        assert image_positions(length, images).equal(whole[:, :length])


def test_a_sequence_without_images_is_counted():
    assert image_positions(3, []).tolist() == [[0, 1, 2]] * 3


def test_images_are_found_where_their_segment_begins():
    own = sequence(12, image(2, 3), image(5, 2), image(8, 4))
    collected = RowImages()
    collected.add(own, 2, 7, 30)
    collected.add(own, 7, 12, 50)
    assert [(each.media.start, each.start) for each in collected.found] == [(2, 30), (5, 33), (8, 51)]


@pytest.mark.parametrize(("start", "end", "is_cut"), [(0, 4, False), (0, 5, True), (6, 9, True), (7, 9, False)])
def test_a_segment_has_an_image_as_a_whole_or_not_at_all(start, end, is_cut):
    collected = RowImages()
    if is_cut:
        with pytest.raises(TrainingError, match=f"of tokens 4 to 7 is cut by tokens {start} to {end}"):
            collected.add(sequence(9, image(4, 3)), start, end, 0)
        return
    collected.add(sequence(9, image(4, 3)), start, end, 0)
    assert not collected.found


def test_blocks_are_the_images_that_see_themselves():
    collected = RowImages()
    collected.add(sequence(12, image(1, 4, sees_itself=True), image(6, 2), image(8, 3, sees_itself=True)), 0, 12, 10)
    assert collected.blocks() == [(11, 15), (18, 21)]


def test_rotary_positions_of_a_row():
    collected = RowImages()
    collected.add(sequence(5, image(1, 2, (1, 1, 2))), 1, 5, 0)
    assert collected.rotary_ids().tolist() == [[1, 1, 3, 4], [1, 1, 3, 4], [1, 2, 3, 4]]
    collected.add(sequence(2), 0, 2, 4)
    assert collected.rotary_ids().tolist() == [[1, 1, 3, 4, 0, 1], [1, 1, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1]]


@pytest.mark.parametrize("images", [[], [image(1, 2, (0, 0, 0))], [image(1, 0, (1, 1, 2))]])
def test_a_row_without_grids_has_no_rotary_positions_of_its_own(images):
    collected = RowImages()
    collected.add(sequence(5, *images), 0, 5, 0)
    assert collected.rotary_ids() is None
