"""A scorer without workers, for rewards and tools that are known to end."""

from collections.abc import Sequence

from slipstream.envs.base import Environment, Episode, Score, ToolResult
from slipstream.envs.scoring.pool import unreadable
from slipstream.envs.scoring.worker_calls import judge, judge_group, run_tool
from slipstream.records import Task, ToolCall


class InlineScorer:
    """Runs rewards and tools in this process, where they cannot be killed."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def score(self, task: Task, episode: Episode | str) -> Score:
        """See `base.Scorer`."""
        found = judge(self._environment, task, Episode(episode) if isinstance(episode, str) else episode)
        return found if isinstance(found, Score) else await found

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """See `base.Scorer`."""
        found = judge_group(self._environment, task, tuple(episodes))
        return found if isinstance(found, list) else await found

    async def call_tool(self, task: Task, call: ToolCall) -> ToolResult:
        """See `base.Scorer`."""
        if call.error:
            return unreadable(call)
        found = run_tool(self._environment, task, call)
        return found if isinstance(found, ToolResult) else await found
