"""The reader of rollout matching: channels by the step's number, seeds, counters, and the limit of invalid rollouts."""

import re
from types import SimpleNamespace

import pytest
from tests.matching.matching_runs import answer_ids, new_detector, rollout

from slipstream.config.traits import generates_for
from slipstream.errors import TrainingError
from slipstream.orchestrator.method import Material
from slipstream.plan.draw_notes import method_notes
from slipstream_matching.reader import MatchingReader
from slipstream_matching.settings import MatchingConfig


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return new_detector(tmp_path_factory.mktemp("detector") / "model")


def config_of(steps=100, **matching):
    return SimpleNamespace(
        method=MatchingConfig(**matching),
        run=SimpleNamespace(seed=17),
        sampling=SimpleNamespace(max_tokens=200),
        training=SimpleNamespace(steps=steps),
        algorithm=SimpleNamespace(kind="sft"),
    )


def reader_of(detector, said=None, change=None, **matching):
    """A reader whose engine says `said` of each task; and what it was asked. `change`: wraps the engine."""
    asked = []

    def roll_out(step, items, *, seed, temperature):
        asked.append((step, list(items), seed, temperature))
        return [rollout(detector, item, said(item), step) for item in items]

    asks = (change(roll_out) if change else roll_out) if said is not None else None
    given = (config_of(), detector.tasks, detector.examples, detector.tokenizer, 512)
    material = Material(*given, lambda step: [step % 2, (step + 1) % 2], roll_out=asks)
    return MatchingReader(MatchingConfig(**matching), detector.tokens, material), asked


def found(detector):
    return lambda item: answer_ids(detector, ("tiny", (7, 600, 90, 700)))


def test_steps_of_channel_a_ask_no_engine(detector):
    reader, _ = reader_of(detector, pattern=("A",))
    for step in range(3):
        batch = reader.take(step)
        assert (batch.step, batch.metrics) == (step, {"stage2/channel_a": 1.0, "stage2/channel_b": 0.0})
        expected = [detector.examples[step % 2], detector.examples[(step + 1) % 2]]
        assert [each.sequences[0] for each in batch.rollouts] == expected


def test_channels_follow_the_pattern_or_the_exact_share(detector):
    reader, asked = reader_of(detector, found(detector), pattern=("A", "A", "B"))
    channels = ["AB"[int(reader.take(step).metrics["stage2/channel_b"])] for step in range(7)]
    assert channels == list("AABAABA")
    assert [step for step, *_ in asked] == [2, 5]
    again, _ = reader_of(detector, found(detector), pattern=("A", "A", "B"))
    assert again.take(5).metrics["stage2/channel_b"] == 1.0, "a resume goes on from any step"
    share = MatchingConfig(b_ratio=0.29)
    assert sum(share.channel_of(step) == "B" for step in range(100)) == 29


def test_the_engine_is_needed_before_steps_of_channel_b_only():
    config = config_of(steps=6, pattern=("A", "A", "B"))
    assert [step for step in range(9) if generates_for(config, step)] == [2, 5]
    notes = {note.name: (note.value, note.how) for note in method_notes(config)}
    assert notes["steps of channel B"] == (2, "of 6, by matching.pattern = A, A, B")


def test_seeds_follow_from_run_and_step_alone(detector):
    reader, asked = reader_of(detector, found(detector), pattern=("B",))
    for step in (0, 1, 3000):
        assert reader.take(step).metrics["rollout/seed_base"] == (17 + step * 1_000_003) & 0x7FFF_FFFF
    assert [seed for *_, seed, _ in asked] == [17, 1_000_020, (17 + 3_000_009_000) & 0x7FFF_FFFF]
    assert {temperature for *_, temperature in asked} == {0.0}


def test_a_step_of_channel_b_has_the_keys_of_the_log(detector):
    metrics = reader_of(detector, found(detector), pattern=("B",))[0].take(0).metrics
    names = (
        "channel_a channel_b invalid_rollout empty_rollout drop_poly drop_unknown drop_bbox_invalid|"
        "seed_base backend_vllm decode_mode_greedy do_sample temperature max_new_tokens rollout_len_mean "
        "rollout_len_p90 prompt_len_mean prefix_len_mean train_len_mean append_len_mean encoded_len_mean "
        "parse_truncated parse_truncated_rate parse_dropped_invalid parse_obj_valid_frac sample_valid_pred_rate "
        "sample_any_match_rate precision recall f1 match_rate fn_appended gating_rejections matched_maskiou_mean "
        "gen_new_tokens_mean gen_tokens_per_s"
    )
    stage2, own = (part.split() for part in names.split("|"))
    wanted = {f"stage2/{name}" for name in stage2} | {f"rollout/{name}" for name in own}
    wanted |= {"time/rollout_generate_s", "time/rollout_parse_match_s", "dropped/too_long"}
    assert wanted <= metrics.keys()
    assert metrics["stage2/channel_a"] + metrics["stage2/channel_b"] == 1
    assert (metrics["rollout/precision"], metrics["rollout/recall"]) == (0.5, pytest.approx(1 / 3))


def test_what_failed_is_dropped_and_counted(detector):
    def with_a_failure(made):
        def roll_out(*given, **named):
            rollouts = made(*given, **named)
            rollouts[0].outcome, rollouts[0].sequences = "prompt_mismatch", []
            return rollouts

        return roll_out

    reader, _ = reader_of(detector, found(detector), with_a_failure, pattern=("B",))
    batch = reader.take(0)
    assert (batch.dropped, batch.metrics["dropped/prompt_mismatch"]) == ({"prompt_mismatch": 1}, 1.0)
    assert len(batch.rollouts) == 1
    assert batch.rollouts[0].task_id == "1"


def test_fewer_rollouts_than_tasks_end_the_run(detector):
    def less(made):
        return lambda *given, **named: made(*given, **named)[:1]

    reader, _ = reader_of(detector, found(detector), less, pattern=("B",))
    with pytest.raises(TrainingError, match="1 rollouts of 2 tasks came at step 0"):
        reader.take(0)


@pytest.mark.parametrize("limit", [{}, {"max_invalid": 0.5}, {"max_invalid": 1.0}])
def test_a_run_of_invalid_rollouts_ends_with_examples_unless_that_is_asked_for(detector, limit):
    ids = detector.tokenizer.plain_tokens("nothing of the kind")
    reader, _ = reader_of(detector, lambda item: ids, pattern=("B",), **limit)
    for step in range(9):
        reader.take(step)
    if limit.get("max_invalid") == 1.0:
        reader.take(9)
        return
    named = re.escape(f"matching.max_invalid = {limit.get('max_invalid', 0.9)}")
    with pytest.raises(TrainingError, match=rf"20 of the 20 rollouts .*{named}.*'nothing of the kind'"):
        reader.take(9)
