import itertools
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.matching.scripted_tokens import Pieces

from slipstream_matching.answer import answer_text
from slipstream_matching.coordinates import literal
from slipstream_matching.figures import DetectionCounts, counts_of
from slipstream_matching.matching import MatchSettings, match
from slipstream_matching.objects import SceneObject
from slipstream_matching.parser import parse
from slipstream_matching.schedule import channel_by_pattern, channel_by_share, rollout_seed

LEFT = SceneObject("cat", "bbox_2d", (0, 0, 400, 999))
RIGHT = SceneObject("dog", "bbox_2d", (500, 0, 999, 999))
LINE = '"object_8": {"desc": "a", "line": [1]}, '
BROKEN = '"object_9": {"desc": "a", "bbox_2d": [1]}, '


def counts(text, truths):
    pieces = Pieces()
    answer = parse(pieces.encode(text), pieces.tokens())
    return counts_of(answer, match([each.value for each in answer.objects], truths, MatchSettings()))


def test_figures_of_samples_are_those_of_their_sums():
    half = SceneObject("cat", "bbox_2d", (0, 0, 400, 499))
    corners = ", ".join(f'["{literal(x)}", "{literal(y)}"]' for x, y in ((1, 2), (3, 4), (5, 6)))
    polygon = f'{{"object_1": {{"desc": "a", "poly": [{corners}]}}}}'
    each = [
        counts(answer_text([LEFT, half]).replace("{", "{" + LINE + BROKEN, 1), [LEFT, RIGHT]),
        counts(answer_text([half])[:-1], [LEFT]),
        counts(polygon, [RIGHT]),
        counts("{}", [RIGHT]),
        counts("", [RIGHT]),
    ]
    total = sum(each, DetectionCounts())
    iou = (103 * 128) / (103 * 256)  # of bins 0 to 400 and 0 to 499 on 256 pixels
    assert total.metrics() == pytest.approx(
        {
            "stage2/invalid_rollout": 1,
            "stage2/empty_rollout": 1,
            "stage2/drop_poly": 1,
            "stage2/drop_unknown": 1,
            "stage2/drop_bbox_invalid": 1,
            "rollout/parse_truncated": 2,
            "rollout/parse_dropped_invalid": 2,
            "rollout/gating_rejections": total.gating_rejections,
            "rollout/fn_appended": 4,
            "rollout/parse_truncated_rate": 2 / 5,
            "rollout/parse_obj_valid_frac": 3 / 6,
            "rollout/sample_valid_pred_rate": 2 / 5,
            "rollout/sample_any_match_rate": 2 / 5,
            "rollout/precision": 2 / 3,
            "rollout/recall": 2 / 6,
            "rollout/f1": 4 / 9,
            "rollout/matched_maskiou_mean": (1 + iou) / 2,
        }
    )


def test_checklist_23_what_has_no_divisor_is_left_out():
    assert not [
        name for name in DetectionCounts().metrics() if name.endswith(("rate", "frac", "mean", "precision", "f1"))
    ]
    nothing = counts("{}", [LEFT]).metrics()
    assert (nothing["rollout/precision"], nothing["rollout/recall"], nothing["rollout/f1"]) == (0.0, 0.0, 0.0)
    assert "rollout/matched_maskiou_mean" not in nothing
    assert "rollout/parse_obj_valid_frac" not in nothing


@given(st.permutations([("", [LEFT]), (answer_text([LEFT]), [LEFT, RIGHT]), (answer_text([RIGHT, LEFT]), [LEFT])]))
def test_checklist_23_counters_are_sums_in_any_order(samples):
    total = sum(itertools.starmap(counts, samples), DetectionCounts())
    assert astuple(total)[:6] == (3, 1, 1, 0, 3, 0)
    assert (total.truths, total.matched, total.matched_iou) == (4, 2, 2.0)


def test_checklist_19_schedules_are_exact_functions_of_the_step():
    assert [channel_by_pattern(step, ["A", "A", "B"]) for step in range(7)] == list("AABAABA")
    assert [channel_by_share(step, 0.4) for step in range(10)] == list("AABABAABAB")
    assert {channel_by_share(step, 0.0) for step in range(50)} == {"A"}
    assert {channel_by_share(step, 1.0) for step in range(50)} == {"B"}


@given(st.integers(0, 100), st.integers(0, 300))
def test_checklist_19_a_share_is_met_at_every_step(percent, num_steps):
    """Where multiplication in floating point is not: 100 * 0.29 is below 29."""
    share = float(f"0.{percent:02d}") if percent < 100 else 1.0
    assert [channel_by_share(step, share) for step in range(num_steps)].count("B") == num_steps * percent // 100


def test_checklist_16_seeds_follow_from_the_runs_seed_and_the_step():
    assert rollout_seed(17, 0) == 17
    assert rollout_seed(17, 3) == 17 + 3 * 1000003
    assert rollout_seed(17, 5000) == (17 + 5000 * 1000003) % 2**31
