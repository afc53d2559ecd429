"""Loads a run file and a command line into one checked `RunConfig`, and records where each value was set.

All wrong keys and values are reported at once, in one ConfigError with a line for each, before anything starts. Paths
in the result are absolute, so it means the same in any folder.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from slipstream.config.addresses import hub_reference, is_address, run_reference
from slipstream.config.bounds import keyed
from slipstream.config.checks import contradictions, foreign_key, inapplicable, reason_against
from slipstream.config.parse.command_line import Override, apply_override, parse_overrides
from slipstream.config.parse.keys import all_keys, dotted, flatten, leaves, optional_sections, sections, with_values
from slipstream.config.parse.messages import located, rewrite, shortened, show
from slipstream.config.parse.paths import path_problems, unusable_path
from slipstream.config.parse.run_file import RunFile, read_run_file
from slipstream.config.parse.suggestions import OTHER_NAMES, suggestion
from slipstream.config.python_objects import is_python_object
from slipstream.config.recipes import BUILT_IN
from slipstream.config.schema import RunConfig
from slipstream.config.sft import SFTConfig, is_hub_name
from slipstream.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT = "default"
LAUNCHER = "launcher"


@dataclass(frozen=True)
class Loaded:
    """A checked config and, for each leaf `section.key`, its origin: `run.toml:12`, `command line`, `launcher` or
    `default`. A section that is turned off is a leaf too."""

    config: RunConfig
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()
    """Notes on keys of the file that have no effect because of the command line."""

    def with_values(self, values: Mapping[str, Any]) -> Loaded:
        """The same with these `section.key` values, see `keys.with_values`."""
        return replace(self, config=with_values(self.config, values))


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    algorithm: str | None = None,
    steps: int | None = None,
    implied: Mapping[str, Any] | None = None,
) -> Loaded:
    """Loads the run file at `path` and the settings that follow it on the command line. `algorithm` is the kind that
    the command implies (`slipstream sft`). A command without training gives `steps`, for a file with neither
    `training.steps` nor `epochs`. `implied`: `section.key` values of a launcher; the user's win. Raises
    ConfigError."""
    return _checked(read_run_file(path), overrides, algorithm, steps, implied or {})


def load_settings(tree: Mapping[str, Any], *, algorithm: str | None = None) -> Loaded:
    """The same for settings that a Python program gives, as a run file's tables; relative paths are the current
    folder's. Raises ConfigError."""
    lines = {name: 0 for section, content in tree.items() for name, _ in flatten((section,), content)}
    return _checked(RunFile(Path("Python call"), dict(tree), lines), (), algorithm)


def _checked(
    file: RunFile,
    overrides: Sequence[str],
    algorithm: str | None,
    steps: int | None = None,
    implied: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    settings, problems = parse_overrides(overrides)
    warnings: list[str] = []
    sources = _Origins(file, settings)
    tree = copy.deepcopy(file.tables)
    for setting in settings:
        apply_override(tree, setting)
    _replace_steps(tree, sources, warnings)
    problems += _force_algorithm(tree, algorithm, sources)
    _imply(tree, implied, sources)
    problems += _remove_unknown(tree, sources, warnings)
    for section in optional_sections():
        if tree.get(section) is False:
            tree[section] = None
    _resolve_paths(tree, file.path.parent, sources)
    if steps is not None and _missing_steps(tree):
        tree.setdefault("training", {})["steps"] = steps
    problems += _unreported(_missing_steps(tree), problems)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems += _unreported(rewrite(error, sources.place), problems)
        raise ConfigError("\n".join(problems)) from None
    if problems:
        raise ConfigError("\n".join(problems))
    config = _drop_unusable_evaluation(config, sources)
    origins = sources.origins(config)
    wrong = (*path_problems(config), *contradictions(config))
    problems = [located(sentence, sources.place(key)) for key, sentence in keyed(wrong)]
    problems += _without_effect(config, origins, sources, warnings)
    if problems:
        raise ConfigError("\n".join(problems))
    return Loaded(config, origins, tuple(warnings))


class _Origins:
    """Records where each value was set."""

    def __init__(self, file: RunFile, overrides: Sequence[Override]) -> None:
        self.file = file
        self.flags: dict[str, str] = {dotted(setting.path): setting.flag for setting in overrides}
        self.forced: set[str] = set()
        self.implied: set[str] = set()

    @property
    def is_alone(self) -> bool:
        """Whether only the run file sets values."""
        return not self.flags and not self.forced

    def place(self, path: str) -> str:
        """For error messages: the flag or line that set `path`; empty for a default."""
        flag = self._flag(path)
        if flag is not None:
            return flag
        return self.file.where(path) if self._in_file(path) else ""

    def is_set(self, path: str) -> bool:
        """Whether the user set `path` or anything below it."""
        return self._flag(path) is not None or self._in_file(path)

    def origin(self, path: str) -> str:
        """The origin of `path`, see `Loaded`."""
        if self._flag(path) is not None or path in self.forced:
            return COMMAND_LINE
        if path in self.implied:
            return LAUNCHER
        return self.file.where(path) if self._in_file(path) else DEFAULT

    def origins(self, config: RunConfig) -> dict[str, str]:
        """The origin of every leaf, and of every section that is turned off."""
        found = {path: self.origin(path) for path, _ in leaves(config)}
        for section in optional_sections():
            if getattr(config, section) is None:
                found[section] = self.origin(section)
        return found

    def _flag(self, path: str) -> str | None:
        # A flag that sets a whole table also sets its keys, and one that sets a key also sets its table.
        for known, flag in self.flags.items():
            if f"{known}.".startswith(f"{path}.") or ("." in known and path.startswith(f"{known}.")):
                return flag
        return None

    def _in_file(self, path: str) -> bool:
        return any(known == path or known.startswith(f"{path}.") for known in self.file.lines)


def _replace_steps(tree: dict[str, Any], sources: _Origins, warnings: list[str]) -> None:
    """Has `training.epochs` of the command line replace the file's `training.steps`."""
    training, steps = tree.get("training"), "training.steps"
    is_flag = sources.origin("training.epochs") == COMMAND_LINE and sources.origin(steps) not in (COMMAND_LINE, DEFAULT)
    if is_flag and isinstance(training, dict):
        warnings.append(located(f"{steps} has no effect beside --training.epochs", sources.place(steps)))
        del training["steps"], sources.file.lines[steps]


def _missing_steps(tree: Mapping[str, Any]) -> dict[str, str]:
    """The sentence for settings that have neither steps nor epochs, by the key."""
    training = tree.get("training", {})
    if not isinstance(training, dict) or any(training.get(name) is not None for name in ("steps", "epochs")):
        return {}
    sentence = (
        "training.steps is missing: set it to a positive whole number, or training.epochs to the passes over the "
        "training data, in [training] or with --training.steps VALUE"
    )
    return {"training.steps": sentence}


def _force_algorithm(tree: dict[str, Any], kind: str | None, sources: _Origins) -> list[str]:
    """Sets the kind that the command implies; returns a sentence if the settings have another kind."""
    if kind is None:
        return []
    section = tree.setdefault("algorithm", {})
    if not isinstance(section, dict):
        return []
    found = section.setdefault("kind", kind)
    if found == kind:
        if not sources.is_set("algorithm.kind"):
            sources.forced.add("algorithm.kind")
        return []
    # The schema refuses unknown kinds.
    if found not in all_keys()["algorithm.kind"].choices:
        return []
    sentence = (
        f"algorithm.kind = {show(found)} is not what `slipstream {kind}` does: "
        f'run `slipstream train` with this run file, or set kind = "{kind}"'
    )
    return [located(sentence, sources.place("algorithm.kind"))]


def _imply(tree: dict[str, Any], implied: Mapping[str, Any], sources: _Origins) -> None:
    """Sets values beside the user's."""
    for path, value in implied.items():
        section, _, name = path.partition(".")
        table = tree.setdefault(section, {})
        if isinstance(table, dict) and name not in table:
            table[name] = value
            sources.implied.add(path)


def _remove_unknown(tree: dict[str, Any], sources: _Origins, warnings: list[str]) -> list[str]:
    """Removes unknown keys and sections from the tree. Returns a sentence for each; it is a warning instead if the
    command line selected another algorithm than the file was written for."""
    problems: list[str] = []
    chosen = sources.origin("algorithm.kind") == COMMAND_LINE

    def refuse(path: str, reason: str) -> None:
        place = next((sources.place(leaf) for leaf in (path, path.split(".")[0]) if sources.place(leaf)), "")
        is_foreign = reason.startswith("applies to") and chosen and sources.origin(path) != COMMAND_LINE
        (warnings if is_foreign else problems).append(located(f"{shortened(path)} {reason}", place))

    for section in list(tree):
        content = tree[section]
        if section not in sections():
            foreign = [path for path, _ in flatten((section,), content) if path.rpartition(".")[2] in OTHER_NAMES]
            for path in foreign:
                refuse(path, f"is not a known setting: {suggestion(path)}")
            if not foreign:
                refuse(dotted((section,)), f"is not a known section: {suggestion(section)}")
            del tree[section]
        elif section in optional_sections() and content is False:
            continue
        elif not isinstance(content, dict):
            remedy = f"write [{section}] and its keys below it"
            if section in optional_sections():
                remedy += f", or {section} = false to turn it off"
            refuse(section, f"= {show(content)} is not a table: {remedy}")
            del tree[section]
        else:
            _remove_unknown_keys(section, content, refuse)
    return problems


def _unreported(sentences: Mapping[str, str], problems: Sequence[str]) -> list[str]:
    """Drops the sentence that a key is missing if a misspelling of the key or of its section is already reported."""
    reported = "\n".join(problems)

    def is_reported(path: str) -> bool:
        section = path.split(".")[0]
        hints = (f"mean {path}?", f"mean the section [{section}]?", f"{section} = ")
        return any(hint in reported for hint in hints)

    return [text for path, text in sentences.items() if " is missing: " not in text or not is_reported(path)]


def _remove_unknown_keys(section: str, content: dict[str, Any], refuse: Callable[[str, str], None]) -> None:
    kind = content.get("kind") if section == "algorithm" else None
    for name in list(content):
        key = all_keys().get(f"{section}.{name}")
        if key is None:
            refuse(dotted((*section.split("."), name)), f"is not a known key: {suggestion(f'{section}.{name}')}")
            del content[name]
        elif key.kinds and isinstance(kind, str) and (sentence := foreign_key(name, kind)):
            if kind in all_keys()["algorithm.kind"].choices:
                refuse(f"{section}.{name}", sentence)
            del content[name]
    arguments = content.get("arguments")
    if section == "algorithm" and isinstance(arguments, dict) and content.get("hooks") is None:
        _remove_unknown_keys("algorithm.arguments", arguments, refuse)


def _resolve_paths(tree: dict[str, Any], folder: Path, sources: _Origins) -> None:
    """Makes relative paths in the tree absolute.

    A path in the run file is looked up beside the file first, then in the current folder; a path on the command line
    only in the current folder. A model path that exists in neither and has no leading dot is a hub id, and so is a
    path of data that has the form of one.
    """

    def resolve(path: str, text: str, *, always: bool) -> str:
        bases = [Path.cwd()] if sources.origin(path) == COMMAND_LINE else [folder.absolute(), Path.cwd()]
        candidates = [os.path.join(base, os.path.expanduser(text)) for base in bases]
        existing = [candidate for candidate in candidates if os.path.exists(candidate)]
        if unusable_path(text) or (not existing and not always):
            return text
        return os.path.realpath((existing or candidates)[0])

    def text_at(section: str, name: str) -> str:
        return _text_at(tree.get(section), name)

    if text := text_at("model", "path"):
        is_local = text.startswith(("./", "../", "/", "~")) or text in (".", "..")
        tree["model"]["path"] = resolve("model.path", text, always=is_local)
    for name in ("path", "eval_path"):
        if (text := text_at("data", name)) and not is_python_object(text):
            tree["data"][name] = resolve(f"data.{name}", text, always=not is_hub_name(text))
    if (text := text_at("lora", "path")) and run_reference(text) is hub_reference(text) is None:
        tree["lora"]["path"] = resolve("lora.path", text, always=True)
    if (text := text_at("environment", "registry")) and not is_address(text):
        tree["environment"]["registry"] = resolve("environment.registry", text, always=True)
    if isinstance(section := tree.get("environment"), dict):
        _resolve_environment(section, "environment", resolve)
        parts: Any = section.get("mixture")
        for name, part in parts.items() if isinstance(parts, dict) else ():
            if isinstance(part, dict):
                _resolve_environment(part, dotted(("environment", "mixture", name)), resolve)
    for name in BUILT_IN:
        if text := text_at("algorithm", name):
            tree["algorithm"][name] = _code(partial(resolve, f"algorithm.{name}", always=True), text)
    if (text := text_at("run", "folder")) and not unusable_path(text):
        tree["run"]["folder"] = os.path.realpath(os.path.expanduser(text))


def _text_at(table: Any, name: str) -> str:
    """The text under `name`; empty if it is no text, or no possible path."""
    value = table.get(name) if isinstance(table, dict) else None
    return value if isinstance(value, str) and value.strip() and "\0" not in value else ""


def _resolve_environment(table: dict[str, Any], prefix: str, resolve: Callable[..., str]) -> None:
    """Resolves the paths of [environment], or of one part of its mixture, which stands at `prefix`."""

    def change(table: Any, name: str, setting: str, *, is_code: bool = False) -> None:
        if isinstance(table, dict) and table.get(name):
            at = partial(resolve, f"{prefix}.{setting}", always=True)
            table[name] = _each_text(table[name], partial(_code, at) if is_code else at)

    kind, settings = table.get("name"), table.get("settings")
    change(table, "name", "name", is_code=True)
    change(table, "tools", "tools", is_code=True)
    if "/" in (text := _text_at(table, "python")):
        # Only its folder's links are followed: the program of a virtual environment is a link itself.
        bin_folder, program = os.path.split(text)
        table["python"] = os.path.join(resolve(f"{prefix}.python", bin_folder, always=True), program)
    if kind not in ("rows", "detection", "agent") or not isinstance(settings, dict):
        return
    for name in ("path", "eval_path", "tokenizer"):
        change(settings, name, f"settings.{name}")
    judges = settings.get("judges")
    for name, judge in judges.items() if isinstance(judges, dict) else ():
        change(judge, "cache", f"settings.judges.{name}.cache")
    for name in ("reward", "rubric"):
        if isinstance(reward := settings.get(name), list):
            parts = settings[name] = [{**part} if isinstance(part, dict) else {"reward": part} for part in reward]
            for part in parts:
                change(part, "reward", "settings.reward", is_code=True)
        else:
            change(settings, name, "settings.reward", is_code=True)
    if kind == "agent":
        change(settings, "callable", "settings.callable", is_code=True)
        change(settings, "tasks", "settings.tasks", is_code=True)
        command = settings.get("command")
        words = shlex.split(command) if isinstance(command, str) else command
        if isinstance(words, list):
            at = partial(resolve, f"{prefix}.settings.command", always=True)
            settings["command"] = [at(word) if str(word).endswith(".py") else word for word in words]


_CODE = re.compile(r"(trl:|verifiers/|)((?!mcp:).+?[.]py)(:.*|)", re.DOTALL)
"""A Python file and what is taken from it, in a setting that may name other things, too."""


def _code(at: Callable[..., str], text: str) -> str:
    if text.startswith("model:"):  # a folder, or a hub id
        return "model:" + at(text.removeprefix("model:"), always=False)
    found = _CODE.fullmatch(text)
    return found[1] + at(found[2]) + found[3] if found else text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with its texts changed, those of lists and tables in it too, but for impossible paths."""
    if isinstance(value, dict):
        return {key: _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) and value.strip() and not unusable_path(value) else value


def _drop_unusable_evaluation(config: RunConfig, sources: _Origins) -> RunConfig:
    """Turns evaluation off under SFT without an environment and held-out rows, unless the user set it."""
    if config.environment is not None or not isinstance(config.algorithm, SFTConfig) or sources.is_set("evaluation"):
        return config
    if config.data is not None and config.data.has_eval:
        return config
    return config.model_copy(update={"evaluation": None})


def _without_effect(config: RunConfig, origins: Mapping[str, str], sources: _Origins, warnings: list[str]) -> list[str]:
    """One sentence for each key without effect that the user set. A key of the file that has an effect there, but not
    together with the command line, becomes a warning."""
    reasons, problems = inapplicable(config), list[str]()
    by_itself = _reasons_in_file(sources.file)
    for path, origin in origins.items():
        if origin in (DEFAULT, LAUNCHER) or not (reason := reason_against(path, reasons)):
            continue
        if origin == COMMAND_LINE or (sources.is_alone or reason_against(path, by_itself)):
            problems.append(located(f"{path} {reason}: remove it", sources.place(path)))
        else:
            warnings.append(located(f"{path} {reason}", sources.place(path)))
    return problems


def _reasons_in_file(file: RunFile) -> dict[str, str]:
    """The keys that have no effect in the file alone; empty if the file is not complete without the command line."""
    tree = {name: None if name in optional_sections() and it is False else it for name, it in file.tables.items()}
    try:
        return inapplicable(RunConfig.model_validate(tree))
    except ValidationError:
        return {}
