"""From tasks with objects, and from rollouts of them, to the sequences that are trained on.

A task has its objects in `info["objects"]`, as the rows of a detector list them.
What is wrong with them is a `DataError` that names the task, before anything starts; what a rollout gets wrong is
dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from slipstream.errors import ConfigError, DataError
from slipstream.plugins import ChatTokenizer, Examples
from slipstream.records import TRAINABLE_OUTCOMES, Media, Message, Rollout, Task
from slipstream.records import Sequence as TokenSequence
from slipstream_matching.answer import answer_text
from slipstream_matching.answers import answer_tokens, match_settings
from slipstream_matching.coordinates import AnswerTokens
from slipstream_matching.figures import DetectionCounts, counts_of
from slipstream_matching.matching import IN_TASKS, match
from slipstream_matching.objects import SceneObject, in_reading_order, true_objects
from slipstream_matching.parser import parse
from slipstream_matching.row_boxes import mask_and_streams
from slipstream_matching.row_targets import Target, from_rollout, teacher_forced
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.text_tokens import parsed_text

_SHOWN = 3
"""Examples of invalid answers that are kept of a batch."""


def objects_of(task: Task, config: MatchingConfig) -> list[SceneObject]:
    """The true objects of a task, in the order of answers. Raises `DataError` that names it."""
    where = f"task {task.id}"
    if "objects" not in task.info:
        raise DataError(f"{where} has no objects: use an environment whose tasks have them, such as detection")
    found = true_objects(task.info["objects"], where)
    return in_reading_order(found) if config.object_order == "sorted" else found


def conversations_of(tasks: Sequence[Task], config: MatchingConfig, max_turns: int) -> list[Sequence[Message]]:
    """The tasks with their gold answers, for people, checks and digests; they are not tokenized. Raises `ConfigError`
    for an environment of several turns: what can be matched is one answer."""
    if max_turns > 1:
        raise ConfigError(
            f"[matching] matches one answer to the objects of a task, and the environment has up to {max_turns} turns: "
            'use one of a single turn, such as environment.name = "detection"'
        )
    return [[*task.prompt, Message("assistant", answer_text(objects_of(task, config)))] for task in tasks]


def examples_of(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, tokens: AnswerTokens, config: MatchingConfig, limit: int
) -> Examples:
    """Channel A's sequences, one for each task in their order. Raises `DataError` for one of more than `limit`
    tokens: cut to fewer, it would have other objects."""
    examples = Examples()
    for task in tasks:
        truths, prompt_ids = objects_of(task, config), tokenizer.render(task.prompt)
        try:
            target = teacher_forced(prompt_ids, truths, tokens)
        except DataError as error:
            raise DataError(f"task {task.id}: {error}") from error
        if len(target.token_ids) > limit:
            raise DataError(
                f"task {task.id} has {len(target.token_ids)} tokens with its {len(truths)} objects, more than the "
                f"model's context of {limit} tokens: remove it, or lower model.max_pixels"
            )
        examples.append(sequence_of(target, tokenizer.place_images(task.prompt, prompt_ids), config))
    return examples


def sequence_of(
    target: Target, media: Sequence[Media], config: MatchingConfig, *, is_rollout: bool = False
) -> TokenSequence:
    """A target as the trainer takes it."""
    weights = target.ce_weights(config.desc_ce_weight)
    mask, streams = mask_and_streams(weights, target.boxes, is_rollout=is_rollout)
    return TokenSequence(target.token_ids, mask, streams=streams, media=list(media))


@dataclass
class Matched:
    """What came of the rollouts of a batch."""

    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    """With the sequences that are trained on."""
    counts: DetectionCounts = field(default_factory=DetectionCounts)
    too_long: int = 0
    """Left out, because with the missed objects they leave the model's context."""
    lengths: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Tokens of each prompt, rollout, kept prefix, appended rest, and whole."""
    invalid: list[str] = field(default_factory=list[str])
    """The first answers of which nothing could be kept."""

    def metrics(self) -> dict[str, float]:
        """Under the names of the log."""
        found = self.counts.metrics()
        found["rollout/num_samples"] = float(self.counts.samples)
        found["dropped/too_long"] = float(self.too_long)
        for name, values in self.lengths.items():
            ranked = sorted(values)
            found[f"rollout/{name}_mean"] = sum(values) / len(values)
            found[f"rollout/{name}_p90"] = float(ranked[(9 * len(ranked) - 1) // 10])
        if truths := self.counts.truths:
            found["rollout/match_rate"] = self.counts.matched / truths
        return found


def matched(
    rollouts: Sequence[Rollout], tasks: Sequence[Task], tokens: AnswerTokens, config: MatchingConfig, limit: int
) -> Matched:
    """Channel B: parse each rollout, match it to its task's objects, append what was missed."""
    found, settings = Matched(), match_settings(config)
    for rollout, task in zip(rollouts, tasks, strict=True):
        (sequence,) = rollout.sequences
        prompt_ids, answer_ids = _divided(sequence)
        answer, truths = parse(answer_ids, tokens), objects_of(task, config)
        matching = match([each.value for each in answer.objects], truths, settings)
        found.counts += counts_of(answer, matching)
        if answer.is_invalid and len(found.invalid) < _SHOWN:
            found.invalid.append(rollout.completion[:200])
        target = from_rollout(prompt_ids, answer, matching, truths, tokens)
        lengths = {
            "rollout_len": len(answer_ids),
            "prompt_len": len(prompt_ids),
            "prefix_len": target.num_prefix,
            "append_len": len(target.token_ids) - len(prompt_ids) - target.num_prefix,
            "train_len": len(target.token_ids) - len(prompt_ids),
            "encoded_len": len(target.token_ids),
        }
        for name, length in lengths.items():
            found.lengths.setdefault(name, []).append(length)
        if len(target.token_ids) > limit:
            found.too_long += 1
            continue
        trained = sequence_of(target, sequence.media, config, is_rollout=True)
        found.rollouts.append(msgspec.structs.replace(rollout, sequences=[trained], outcome="done"))
    return found


def _divided(sequence: TokenSequence) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and those that were sampled after it."""
    num_prompt = sequence.mask.index(True) if True in sequence.mask else len(sequence)
    return sequence.token_ids[:num_prompt], sequence.token_ids[num_prompt:]


def graded(tasks: Sequence[Task], config: MatchingConfig) -> list[Task]:
    """The tasks with the rules of [matching], so that reward, figures and training count the same matches."""
    how = asdict(match_settings(config))
    return [msgspec.structs.replace(task, info={**task.info, IN_TASKS: how}) for task in tasks]


def detection_metrics(
    tasks: Sequence[Task], rollouts: Sequence[Rollout], tokenizer: ChatTokenizer | None, config: MatchingConfig
) -> dict[str, float]:
    """Figures of an evaluation, from the sums over all samples. Rollouts of a task follow one another; of one that
    failed all objects count as missed. Answers are read from their text where there is no `tokenizer`."""
    tokens = answer_tokens(tokenizer) if tokenizer is not None else None
    size, settings, total = len(rollouts) // len(tasks), match_settings(config), DetectionCounts()
    for place, rollout in enumerate(rollouts):
        truths = objects_of(tasks[place // size], config)
        if rollout.outcome not in TRAINABLE_OUTCOMES or (tokens is not None and not rollout.sequences):
            total += DetectionCounts(samples=1, truths=len(truths))
            continue
        if tokens is None:
            answer = parsed_text(rollout.completion)
        else:
            answer = parse(_divided(rollout.sequences[0])[1], tokens)
        total += counts_of(answer, match([each.value for each in answer.objects], truths, settings))
    found = total.metrics()
    rates = {"eval/invalid_rate": total.invalid / total.samples, "eval/num_objects": float(total.truths)}
    kept = ("precision", "recall", "f1", "matched_maskiou_mean", "sample_any_match_rate", "parse_truncated_rate")
    named = {f"eval/{name}": found[f"rollout/{name}"] for name in kept if f"rollout/{name}" in found}
    return {**named, **rates}
