"""Resolves a name in the run file to an environment; every failure is a `ConfigError`.

Names: `rows` (questions and answers from a file); `agent` (a program that sends requests); `atropos` (programs on
atroposlib); `path/to/file.py` or `path/to/file.py:Class`; `mixture`, of several of these; an entry point of a plug-in
in the group `slipstream.environments` (a subclass of `Environment`). An entry point `family/` has all names with this
beginning, as `reasoning_gym/` has `reasoning_gym/<task>`. `name@digest` has become a path before (`store`). Loading a
file runs its code, in this process and in every reward worker.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from slipstream.config.atropos import NAME as ATROPOS
from slipstream.config.environment import EnvironmentConfig, GradedText
from slipstream.config.methods import loaded
from slipstream.config.mixture import MIXTURE
from slipstream.config.python_objects import is_python_object
from slipstream.config.user_code import import_file, place_of
from slipstream.envs.agent import NAME as AGENT
from slipstream.envs.agent import Agent
from slipstream.envs.atropos import Atropos
from slipstream.envs.base import Environment
from slipstream.envs.from_python import FunctionEnvironment, load_python_environment
from slipstream.envs.hosted.apart import Apart
from slipstream.envs.mixed import Mixture
from slipstream.envs.rewards.contract import Plain
from slipstream.envs.rewards.functions import function_in
from slipstream.envs.rows import NAME as ROWS
from slipstream.envs.rows import Rows
from slipstream.envs.single_turn import SingleTurn, shown_settings
from slipstream.envs.tools.mcp_servers import tools_of
from slipstream.envs.tools.schemas import Tool, schemas_of
from slipstream.errors import ConfigError, SlipstreamError, did_you_mean, one_line

GROUP = "slipstream.environments"
OF_THIS_WHEEL = {
    "detection": "slipstream_matching.image_rows:Detection",
    "reasoning_gym/": "slipstream_adapters.gym:ReasoningGym",
    "verifiers/": "slipstream_adapters.verifiers_package:Verifiers",
}
"""Plug-ins in this wheel, found without installed metadata. `family/` has all names with this beginning."""
_MCP = "mcp:"
_TOOL_TURNS = 4
"""Most turns of an environment of one turn that is given tools."""
_FORMS = (
    f"reasoning_gym/<task>, verifiers/<name>, {ROWS}, detection, {AGENT}, {ATROPOS}, path/to/file.py, "
    f"path/to/file.py:Class, name@digest, or an entry point of the group {GROUP}"
)


def load_environment(config: EnvironmentConfig) -> Environment:
    """Constructs the environment that `config` names, with its settings and seed."""
    environment = _load(config)
    _check_grades(environment)
    if config.processes not in ("auto", 0) and environment.plays_itself:
        raise ConfigError(f"environment.processes has no effect: {config.name} has a process of its own: remove it")
    environment.given_settings = config.settings
    if config.name != MIXTURE:
        environment.num_solved_examples = config.num_examples
        _check_graded_text(environment, config.graded_text)
    environment.graded_text = config.graded_text
    if config.tools:
        _add_tools(environment, config)
    if environment.plays_itself or config.max_turns == "auto":
        return environment
    if config.max_turns != environment.max_turns:
        if environment.max_turns == 1 and not environment.tools:
            raise ConfigError(
                f"environment.max_turns = {config.max_turns} has no effect: {environment.name} has one turn and no "
                "tools: remove it, or add environment.tools"
            )
        environment.max_turns = config.max_turns
    return environment


def played(environment: Environment | None, config: EnvironmentConfig | None) -> Environment | None:
    """The environment as a run plays it, by the planned `config`: with its episodes in `environment.processes`. None
    if there is none."""
    if environment is None or config is None or config.processes in ("auto", 0):
        return environment
    return Apart(environment, config)


def _check_grades(environment: Environment) -> None:
    """Raises `ConfigError` for an environment that grades nothing."""
    kind = type(environment)
    has_group = kind.score_group is not Environment.score_group
    if environment.scores_groups and not has_group:
        raise ConfigError(f"environment.name: class {kind.__name__} has scores_groups, and no score_group: define it")
    if environment.grades_texts or kind.score_episode is not Environment.score_episode or environment.scores_groups:
        return
    usual = "reward" if isinstance(environment, SingleTurn) else "score"
    remedy = "set scores_groups = True for its score_group" if has_group else "define it, or score_episode"
    raise ConfigError(f"environment.name: class {kind.__name__} does not define {usual}: {remedy}")


def _check_graded_text(environment: Environment, part: GradedText) -> None:
    if part == "all":
        return
    if environment.plays_itself or type(environment).score_episode is not Environment.score_episode:
        reason = "grades whole episodes"
    elif environment.scores_groups:
        reason = "grades groups"
    else:
        return
    raise ConfigError(f"environment.graded_text = {part!r} has no effect: {environment.name} {reason}: remove it")


def _add_tools(environment: Environment, config: EnvironmentConfig) -> None:
    """Gives the environment the tools of `environment.tools`."""
    if environment.plays_itself or isinstance(environment, Agent):
        raise ConfigError(f"environment.tools: {config.name} brings its own tools: remove the setting")
    added: list[Tool] = []
    for place, name in enumerate(config.tools):
        setting = f"environment.tools[{place}] = {name!r}"
        file, _, attribute = name.rpartition(":")
        if name.startswith(_MCP):
            added += tools_of(name.removeprefix(_MCP), config.variables)
        elif file.endswith(".py"):
            added.append(function_in(Path(file), attribute, "environment.tools"))  # as provenance knows it
        else:
            raise ConfigError(f"{setting} is not a tool: use path/to/file.py:function, or {_MCP}COMMAND")
    environment.tools = (*environment.tools, *added)
    schemas_of(environment.tools)
    if environment.max_turns == 1:
        environment.max_turns = _TOOL_TURNS


def _load(config: EnvironmentConfig) -> Environment:
    name = config.name
    if missing := [variable for variable in config.variables if variable not in os.environ]:
        raise ConfigError(f"environment.variables: {', '.join(missing)} is not set: set it, or leave it out")
    if name == MIXTURE:
        return Mixture(config, load_environment)
    family = name.partition("/")[0] + "/"
    plug_in = OF_THIS_WHEEL.get(name) or OF_THIS_WHEEL.get(family)
    found = loaded(plug_in) if plug_in else None
    if config.python and not getattr(found, "plays_itself", False):
        raise ConfigError("environment.python has an effect on verifiers/<name> only: remove it")
    if found is not None and found.takes_section:
        return _make(found, name, config)
    if "seed" in config.settings:
        raise ConfigError("environment.settings.seed is not set here: use environment.seed")
    if is_python_object(name):
        return load_python_environment(name, config.seed, config.settings)
    if name == ROWS:
        return Rows(config.seed, config.settings, reward_timeout_s=config.reward_timeout_s)
    if name == AGENT:
        return Agent(config)
    if name == ATROPOS:
        return Atropos(config)
    if found is not None:
        return _make(found, name, config)
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    if path.endswith(".py"):
        return _from_file(Path(path), attribute, config)
    points = importlib.metadata.entry_points(group=GROUP)
    point = next((each for each in (name, family) if each in points.names), None)
    if point is None:
        hint = did_you_mean(name, points.names) if points.names else f": use {_FORMS}"
        raise ConfigError(f"environment.name = {name!r} is not installed{hint}")
    try:
        found = points[point].load()
    except (Exception, SystemExit) as error:  # the package's code, whatever it raises
        raise ConfigError(f"environment.name: entry point {name!r} cannot be loaded: {one_line(error)}") from error
    return _make(found, name, config)


def _from_file(path: Path, attribute: str, config: EnvironmentConfig) -> Environment:
    module = import_file(path, "environment.name")
    own = {
        name: found
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, Environment) and found.__module__ == module.__name__
    }
    if attribute:
        if not hasattr(module, attribute):
            raise ConfigError(f"environment.name: {path} has no class {attribute!r}{did_you_mean(attribute, own)}")
        return _make(getattr(module, attribute), attribute, config)
    if len(own) > 1:
        raise ConfigError(f"environment.name: {path} has the environments {', '.join(own)}: name one as {path}:Class")
    if own:
        name, found = next(iter(own.items()))
        return _make(found, name, config)
    functions = {name: getattr(module, name, None) for name in ("tasks", "reward")}
    missing = [name for name, found in functions.items() if not callable(found)]
    if missing:
        raise ConfigError(
            f"environment.name: {path} has neither an Environment class nor the function {' and '.join(missing)}: "
            "define a class, or the functions tasks(split, num_tasks, seed) and reward(task, completion)"
        )
    make_tasks, reward = functions["tasks"], functions["reward"]
    assert make_tasks is not None
    assert reward is not None
    _check_arguments(make_tasks, ("train", 1, 0), config.settings, f"tasks() in {path}", "split, num_tasks, seed")
    _check_arguments(reward, (None, ""), {}, f"reward() in {path}", "task, completion")
    return FunctionEnvironment(path.stem, make_tasks, Plain(reward), config.seed, config.settings)


def _make(found: object, name: str, config: EnvironmentConfig) -> Environment:
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(f"environment.name: {name} is not an Environment: derive it from slipstream.envs.SingleTurn")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(cast("Any", found).__abstractmethods__))
        raise ConfigError(f"environment.name: class {name} does not define {missing}: define it")
    if found.takes_section:
        return cast("Any", found)(config)
    _check_arguments(found, (), {"seed": 0, **config.settings}, f"class {name}", "seed")
    try:
        environment = found(seed=config.seed, **config.settings)
    except SlipstreamError:
        raise
    except Exception as error:  # the user's code, whatever it raises
        raise ConfigError(
            f"environment.settings: class {name} refused its settings: {one_line(error)} ({place_of(error)}"
            f"{shown_settings(config.settings)})"
        ) from error
    if not hasattr(environment, "seed"):
        raise ConfigError(f"environment.name: class {name} does not call super().__init__(seed): add the call")
    turns: object = getattr(environment, "max_turns", None)
    if not isinstance(turns, int) or turns < 1:
        reason = "does not say how many turns an episode may take" if turns is None else f"has max_turns = {turns!r}"
        raise ConfigError(
            f"environment.name: class {name} {reason}, which inference.max_model_len is planned with: write "
            "max_turns = 1, or as many as there may be, in the class"
        )
    return environment


def _check_arguments(
    function: Any, positional: tuple[Any, ...], settings: Mapping[str, Any], what: str, expected: str
) -> None:
    """Raises `ConfigError` with the name of a setting that `function` does not accept, or of a missing argument."""
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **settings)
        return
    except TypeError as error:
        reason = str(error)
    parameters = list(signature.parameters)[len(positional) :]
    for key in settings:
        if key not in parameters and key != "seed":
            known = [name for name in parameters if name != "seed"]
            hint = did_you_mean(key, known) or ": it takes no settings"
            raise ConfigError(f"environment.settings.{key}: {what} has no such setting{hint}")
    raise ConfigError(f"environment.name: {what} cannot be called with {expected} and the settings: {reason}")
