"""Finds a reward by what a run file or a Python caller says of it.

Names: `exact`, `number`, `math`, `code`; `path/to/file.py:function`, of the signature `reward(task, completion)` or
verl's; `trl:...` (TRL's); `judge:<name>`; `model:path/to/folder`, a reward model. A list of parts, tables with `reward`
and `weight`, is a rubric. A Python caller may also give a `Reward` or such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from slipstream.config.methods import loaded
from slipstream.envs.rewards import trl
from slipstream.envs.rewards.code_tests import Code
from slipstream.envs.rewards.contract import Options, Reward
from slipstream.envs.rewards.functions import by_signature, function_of_file
from slipstream.envs.rewards.judges import Judge, judge_of
from slipstream.envs.rewards.math_answers import Math
from slipstream.envs.rewards.rubric import Part, WeightedParts
from slipstream.envs.rewards.texts import Exact, Number
from slipstream.errors import ConfigError, did_you_mean

BUILT_IN = ("exact", "number", "math", "code")
JUDGE, MODEL = "judge:", "model:"
FORMS = (
    '"exact", "number", "math", "code", "path/to/file.py:function", "trl:path/to/file.py:function", '
    '"trl:package.module:function", "judge:name", "model:path/to/folder"'
)


def named(given: Any, options: Options | None = None, setting: str = "reward") -> Reward:
    """The reward that `given` stands for; `setting` is what error messages call it. Raises ConfigError."""
    options = options or Options()
    if isinstance(given, Reward):
        return given
    if callable(given):
        return by_signature(cast("Callable[..., Any]", given), f"{setting}()")
    if isinstance(given, list | tuple):
        rows = enumerate(cast("Sequence[Any]", given))
        made = WeightedParts([_part(part, options, f"{setting}[{number}]") for number, part in rows], setting)
    elif isinstance(given, str):
        made = _by_name(given, options, setting)
    else:
        raise ConfigError(f"{setting} = {given!r:.80} is not a reward: use {FORMS}")
    made.made_by = (named, given, options, setting)
    made.grades_groups = options.score_groups
    return made


def _by_name(name: str, options: Options, setting: str) -> Reward:
    makers: dict[str, Callable[[], Reward]] = {
        "exact": Exact,
        "number": Number,
        "math": lambda: Math(setting),
        "code": lambda: Code(options, setting),
    }
    if name in makers:
        return makers[name]()
    if name.startswith(trl.PREFIX):
        return trl.trl_function(name, setting, options.tokenizer)
    if name.startswith(JUDGE):
        judge = name.removeprefix(JUDGE)
        if judge not in options.judges:
            hint = did_you_mean(judge, options.judges) or ": describe it there"
            raise ConfigError(f"{setting} = {name!r}: environment.settings.judges has no {judge!r}{hint}")
        return judge_of(options.judges[judge], judge, options.reward_timeout_s)
    if name.startswith(MODEL):
        return loaded("slipstream_preferences.scorer:ModelReward")(name.removeprefix(MODEL), setting)
    if name.partition(":")[0].endswith(".py"):
        return function_of_file(name, setting, strip_thinking=options.strip_thinking)
    raise ConfigError(f"{setting} = {name!r:.80} is not a reward: use {FORMS}")


class _PartSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward: Any
    weight: float = 1.0
    name: str = ""


def _part(given: Any, options: Options, setting: str) -> Part:
    if isinstance(given, Part):
        return given
    if not isinstance(given, dict):
        given = {"reward": given}
    try:
        part = msgspec.convert(given, _PartSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting}: {error}: a part has reward, weight and name") from None
    return Part(named(part.reward, options, f"{setting}.reward"), part.weight, part.name)


class Rubric(WeightedParts):
    """A rubric for Python: `Rubric(("math", 1.0), (style, 0.2))`. Each part is a reward's name, a `Reward` or a
    function `reward(task, completion)` with its weight and perhaps the name of its metric; the weight is 1 if none is
    given."""

    def __init__(self, *parts: Any, options: Options | None = None) -> None:
        keys = ("reward", "weight", "name")
        given = [dict(zip(keys, part, strict=False)) if isinstance(part, tuple) else part for part in parts]
        found = options or Options()
        super().__init__([_part(part, found, f"part {place} of the rubric") for place, part in enumerate(given)])
        self.grades_groups = found.score_groups
        self.made_by = (_rubric_of, parts, found)


def _rubric_of(parts: Sequence[Any], options: Options) -> Rubric:
    return Rubric(*parts, options=options)


def judge(name: str = "judge", *, reward_timeout_s: float = 10.0, **settings: Any) -> Judge:
    """A judge for Python, with the settings of `judges.JudgeSettings`. Raises ConfigError."""
    made = judge_of(settings, name, reward_timeout_s)
    made.made_by = (judge_of, settings, name, reward_timeout_s)
    return made
