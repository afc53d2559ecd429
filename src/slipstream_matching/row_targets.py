"""What a forward pass is trained on: the tokens, the region of each, and where which box is to be read.

| region | cross-entropy | box |
|---|---|---|
| prompt; of a rollout's prefix all but matched objects: false positives, invalid objects, keys, separators | 0 | |
| a matched object's JSON | 1 | the true box at the predicted object's coordinates |
| its description | 0 | |
| JSON of appended (or, without a rollout, all) objects, final brace, end of the turn | 1 | the true box |
| their descriptions | `desc_ce_weight` | |
| coordinate tokens | 0 | as above |

All by the token that is predicted: what concerns the token at p is computed from the logits at p - 1. A token that
stands for parts of two regions of a prefix counts as the one that is not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream_matching.answer import Fragment, Region, Tokenized, answer_fragments, objects_fragments, tokenized
from slipstream_matching.coordinates import AnswerTokens
from slipstream_matching.matching import Matching
from slipstream_matching.objects import SceneObject
from slipstream_matching.parser import ParsedAnswer


class BoxTarget(NamedTuple):
    """A box, and where it is to be predicted."""

    slots: tuple[int, ...]
    """Places of its four coordinate tokens among all tokens."""
    coordinates: tuple[int, ...]
    """Bins of x1, y1, x2, y2 of the true box."""
    is_appended: bool
    """Whether it stands after the rollout's prefix."""


@dataclass(frozen=True)
class Target:
    """The tokens of one teacher-forced forward and what is trained on."""

    token_ids: list[int]
    num_prompt: int
    num_prefix: int
    """Tokens that are kept of the rollout, which follow the prompt; 0 without one."""
    regions: list[Region]
    """Of each token."""
    boxes: list[BoxTarget]

    def ce_weights(self, desc_ce_weight: float) -> list[float]:
        """The weight of each token's cross-entropy; a mean is to be divided by their sum."""
        weights: dict[Region, float] = {"context": 0.0, "structure": 1.0, "desc": desc_ce_weight, "coordinate": 0.0}
        return [weights[region] for region in self.regions]


def teacher_forced(prompt_ids: Sequence[int], truths: Sequence[SceneObject], tokens: AnswerTokens) -> Target:
    """Channel A: the prompt and the answer that lists all objects in the given order.

    Raises `DataError` if tokens cannot hold the answer.
    """
    tail = tokenized(answer_fragments(truths), tokens)
    context: list[Region] = ["context"] * len(prompt_ids)
    return _target(list(prompt_ids), 0, context, [], tail, truths, tokens)


def from_rollout(
    prompt_ids: Sequence[int],
    answer: ParsedAnswer,
    matching: Matching,
    truths: Sequence[SceneObject],
    tokens: AnswerTokens,
) -> Target:
    """Channel B: the prompt, what is kept of the rollout, and the objects that it missed, in the order of `truths` and
    under keys that follow its own.

    `matching`: of `answer.objects` to `truths`. Raises `DataError` if tokens cannot hold what is appended.
    """
    regions: list[Region] = ["context"] * (len(prompt_ids) + len(answer.prefix_ids))
    boxes: list[BoxTarget] = []
    for pair in matching.pairs:
        found = answer.objects[pair.prediction]
        slots = tuple(len(prompt_ids) + place for place in found.slots)
        for place in found.tokens:
            regions[len(prompt_ids) + place] = "structure"
        for place in found.desc_tokens:
            regions[len(prompt_ids) + place] = "context"
        for place in slots:
            regions[place] = "coordinate"
        boxes.append(BoxTarget(slots, truths[pair.truth].coordinates, is_appended=False))
    missed = [truths[place] for place in matching.missed]
    separator: list[Fragment] = [(", ", "structure")] if missed and answer.has_closed else []
    appended = objects_fragments(missed, answer.next_index)
    tail = tokenized([*separator, *appended, ("}", "structure")], tokens)
    context = [*prompt_ids, *answer.prefix_ids]
    return _target(context, len(answer.prefix_ids), regions, boxes, tail, missed, tokens)


def _target(
    context: list[int],
    num_prefix: int,
    regions: list[Region],
    boxes: list[BoxTarget],
    tail: Tokenized,
    objects: Sequence[SceneObject],
    tokens: AnswerTokens,
) -> Target:
    """The context, the answer's rest that lists `objects`, and the end of the turn."""
    slots = [len(context) + place for place in tail.slots]
    appended = [
        BoxTarget(tuple(slots[4 * place : 4 * place + 4]), object_.coordinates, is_appended=True)
        for place, object_ in enumerate(objects)
    ]
    return Target(
        [*context, *tail.ids, tokens.end_id],
        len(context) - num_prefix,
        num_prefix,
        [*regions, *tail.regions, "structure"],
        [*boxes, *appended],
    )
