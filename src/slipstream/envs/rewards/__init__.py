"""Named rewards, for the environment `rows`, Python callers, and environments of your own.

`named("math")` is a reward, called as `reward(task, completion)`; so are `Rubric(...)` and `judge(...)`.
"""

from slipstream.envs.rewards.contract import NotApplicable, Options, Reward
from slipstream.envs.rewards.named import Rubric, judge, named

__all__ = ["NotApplicable", "Options", "Reward", "Rubric", "judge", "named"]
