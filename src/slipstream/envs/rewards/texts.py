"""The rewards `exact` (the answer's text, white space aside) and `number` (the last number in it)."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.data.plain_values import text_of
from slipstream.envs.answers import last_number, same_text
from slipstream.envs.base import Score
from slipstream.envs.rewards.contract import Checked, Graded, right_answers, texts_of
from slipstream.errors import DataError
from slipstream.records import Task


class Exact(Graded):
    """1 if the answer is one of the right ones, white space aside."""

    name = "exact"

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises an error for a right answer that no text could equal."""
        texts_of(rows, self.name)

    def grade(self, task: Task, answer: str) -> Score:
        """See the class."""
        return Score(float(any(same_text(answer, text_of(right)) for right in right_answers(task))))


class Number(Exact):
    """1 if the last number in the answer is the last one in a right answer."""

    name = "number"

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises an error for a right answer without a number, too."""
        for where, answer in texts_of(rows, self.name):
            if last_number(answer) is None:
                raise DataError(
                    f'{where}: the answer {answer!r:.60} holds no number, which reward = "number" needs: correct '
                    "the row, or use another reward"
                )

    def grade(self, task: Task, answer: str) -> Score:
        """See the class."""
        found = last_number(answer)
        return Score(float(found is not None and found in [last_number(str(right)) for right in right_answers(task)]))
