"""What [matching] does in a run: channel A's sequences, the loss, and batches of both channels."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.plugins import ChatTokenizer, Examples, Material, Method
from slipstream.records import Message, Rollout, Task
from slipstream_matching.answers import answer_tokens
from slipstream_matching.objective import MatchingObjective
from slipstream_matching.reader import MatchingReader
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import conversations_of, detection_metrics, examples_of, graded


class Matching(Method):
    """See `Method`."""

    section: MatchingConfig

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raises `ConfigError` without 1000 coordinate tokens."""
        answer_tokens(tokenizer)

    def tasks(self, tasks: list[Task]) -> list[Task]:
        """The tasks with the rules of matching."""
        return graded(tasks, self.section)

    def conversations(self, tasks: Sequence[Task], max_turns: int) -> list[Sequence[Message]]:
        """The tasks with the answers that list all objects."""
        return conversations_of(tasks, self.section, max_turns)

    def examples(self, tasks: Sequence[Task], tokenizer: ChatTokenizer, limit: int) -> Examples:
        """Channel A's sequences."""
        return examples_of(tasks, tokenizer, answer_tokens(tokenizer), self.section, limit)

    def objective(self, tokenizer: ChatTokenizer) -> MatchingObjective:
        """Cross-entropy and losses of boxes."""
        return MatchingObjective(self.section, answer_tokens(tokenizer).coordinate_ids)

    def batches(self, material: Material) -> MatchingReader:
        """Written answers or rollouts, by the step's channel."""
        return MatchingReader(self.section, answer_tokens(material.tokenizer), material)

    def figures(
        self, tasks: Sequence[Task], rollouts: Sequence[Rollout], tokenizer: ChatTokenizer | None
    ) -> dict[str, float]:
        """Precision, recall and overlap over all samples."""
        return detection_metrics(tasks, rollouts, tokenizer, self.section)
