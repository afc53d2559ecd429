"""The environment `detection`: rows of a detector, `{"images": [...], "objects": [...], "width": ..., "height": ...}`.

Settings: `path` and `split`, `eval_path` and `eval_split` (as those of the environment `rows`; without the last two one
image in ten is held out, by its content), and `prompt`.

An object has `desc` and `bbox_2d`, x1, y1, x2, y2 in bins from 0 to 999 or coordinate tokens. The
prompt is the row's column `prompt`, or `settings.prompt`; images come before its text. The reward is the F1 of the
objects that an answer names, matched by their masks alone, descriptions playing no part; a broken answer is parsed
without repair. Every row is checked before a run starts, and named with its file and number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.envs import Score, SingleTurn, Split, split_of
from slipstream.errors import DataError, did_you_mean
from slipstream.plugins import COLUMNS, Row, check_settings, held_out_split, read_rows, subset_of, with_images
from slipstream.records import Message, Rollout, Task
from slipstream_matching.answer import answer_text
from slipstream_matching.figures import counts_of
from slipstream_matching.matching import IN_TASKS, MatchSettings, match
from slipstream_matching.objects import in_reading_order, true_objects
from slipstream_matching.text_tokens import parsed_text

if TYPE_CHECKING:
    from slipstream.plugins import ChatTokenizer

NAME = "detection"
"""In the run file."""
PROMPT = "Detect all objects in the image and give each with desc and bbox_2d as JSON."
_SETTINGS = ("path", "subset", "split", "eval_path", "eval_split", "prompt")
_ROW_KEYS = ("objects", "width", "height", "prompt", "summary", "metadata", *COLUMNS)


class Detection(SingleTurn):
    """The environment `detection`; see the module. Raises `ConfigError` for invalid settings, `DataError` for invalid
    rows."""

    grades_special_tokens = True
    """Coordinates may be such tokens."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        super().__init__(seed)
        self.name = NAME
        check_settings(settings, NAME, _SETTINGS, _SETTINGS)
        self._settings = dict(settings)

    @property
    def num_train_tasks(self) -> int:
        """All rows that are not held out."""
        return len(self._train)

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        if not self._has_own_eval:
            return f"one image in ten of {self._settings['path']}, by its content"
        return self._settings.get("eval_path", f"split {self._settings.get('eval_split')!r} of its folder")

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return self._eval

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment.tasks`: the first rows of the split, fewer if there are no more."""
        found = self._train if split == "train" else self._eval
        if not found:
            raise DataError(
                f"none of the {len(self._main)} images of {self._settings['path']} is for {split} (one in ten is held "
                "out): set environment.settings.eval_path, add rows, or turn the evaluation off"
            )
        return found[:num_tasks]

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raises `ConfigError` without 1000 coordinate tokens."""
        from slipstream_matching.answers import answer_tokens

        answer_tokens(tokenizer)

    def figures(
        self, tasks: Sequence[Task], rollouts: Sequence[Rollout], tokenizer: ChatTokenizer | None
    ) -> dict[str, float]:
        """Precision, recall and overlap over all samples, matched by the usual settings."""
        from slipstream_matching.settings import MatchingConfig
        from slipstream_matching.targets import detection_metrics

        return detection_metrics(tasks, rollouts, tokenizer, MatchingConfig())

    def score(self, task: Task, completion: str) -> Score:
        """F1 of the objects in the answer, with its counts; 0 for a broken one."""
        answer = parsed_text(completion)
        truths = true_objects(task.info["objects"], task.id)
        how = MatchSettings(**task.info.get(IN_TASKS, {}))
        matching = match([each.value for each in answer.objects], truths, how)
        counts = counts_of(answer, matching)
        sums = {"predictions": counts.predictions, "matched": counts.matched, "matched_iou": counts.matched_iou}
        f1 = 2 * counts.matched / (counts.predictions + counts.truths)
        return Score(f1, {name: float(value) for name, value in sums.items()})

    @property
    def _has_own_eval(self) -> bool:
        return "eval_path" in self._settings or "eval_split" in self._settings

    @cached_property
    def _main(self) -> list[Task]:
        return self._read("path", self._settings.get("split", ""))

    @cached_property
    def _train(self) -> list[Task]:
        return self._main if self._has_own_eval else [each for each in self._main if _split(each) == "train"]

    @cached_property
    def _eval(self) -> list[Task]:
        if not self._has_own_eval:
            return [each for each in self._main if _split(each) == "eval"]
        which = "eval_path" if "eval_path" in self._settings else "path"
        split, folder = self._settings.get("eval_split", ""), Path(self._settings[which])
        if not split and folder.is_dir():
            split = held_out_split(folder, "", f"environment.settings.{which}", self._subset_of(which))
        return self._read(which, split)

    def _subset_of(self, which: str) -> str:
        subset: str = self._settings.get("subset", "")
        return subset if which == "path" else subset_of(self._settings[which], subset)

    def _read(self, which: str, split: str) -> list[Task]:
        rows = read_rows(self._settings[which], split, f"environment.settings.{which}", self._subset_of(which))
        return [self._task(row, f"{which}/{number}") for number, row in enumerate(rows)]

    def _task(self, row: Row, id_: str) -> Task:
        for key, value in row.values.items():
            if key not in _ROW_KEYS and value is not None:
                raise DataError(
                    f"{row.where} has the key {key!r}, which nothing reads{did_you_mean(key, _ROW_KEYS)}: remove it"
                )
        for name in ("width", "height"):
            value = row.values.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise DataError(f"{row.where}: {name} is {value!r:.60}: give a number of pixels, at least 1")
        objects = true_objects(row.rendered(row.values.get("objects")), row.where)
        text = row.values.get("prompt") or self._settings.get("prompt", PROMPT)
        if not isinstance(text, str):
            raise DataError(f"{row.where}: prompt is {text!r:.60}: give a text")
        prompt = with_images([Message("user", text)], row.values, row.where, row.folder)
        if not any(turn.media for turn in prompt):
            raise DataError(f"{row.where} has no image: give the column images")
        _check_size(row, prompt)
        listed = [{"desc": each.desc, each.kind: list(each.coordinates)} for each in objects]
        return Task(id_, tuple(prompt), answer_text(in_reading_order(objects)), {"objects": listed})


def _check_size(row: Row, prompt: list[Message]) -> None:
    """Boxes are shares of the image that they were drawn on, so another size is another image."""
    image = next(image for turn in prompt for image in turn.media)
    given = row.values.get("width"), row.values.get("height")
    if given not in ((None, None), (image.width, image.height)) and None not in given:
        raise DataError(
            f"{row.where} says {given[0]} x {given[1]} pixels, and its image has {image.width} x {image.height}: "
            "correct one of the two"
        )


def _split(task: Task) -> Split:
    return split_of("\n".join(image.sha256 for turn in task.prompt for image in turn.media))
