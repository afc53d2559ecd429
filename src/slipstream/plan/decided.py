"""From settings to a plan's, without any `auto`. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from slipstream.config import planned
from slipstream.config.bounds import Section
from slipstream.config.planned import PlannedConfig
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, RunConfig


def planned_config(config: RunConfig) -> PlannedConfig:
    """`config` without any `auto`: its recipe's choices in [algorithm], else the defaults of `config.planned`. Each of
    these must be without effect."""
    if isinstance(config.algorithm, RLConfig):
        config = config.model_copy(update={"algorithm": resolved(config.algorithm)})
    tables = config.model_dump()
    for path in undecided(config):
        section, _, key = path.partition(".")
        del tables[section][key]
    return PlannedConfig.model_validate(tables)


_NARROWED = {
    planned_class.__base__: inspect.get_annotations(planned_class)
    for planned_class in vars(planned).values()
    if inspect.isclass(planned_class) and planned_class.__module__ == planned.__name__
}
"""The fields without `auto` in the planned class of each section as written."""


def undecided(config: RunConfig) -> list[str]:
    """Keys with a value `auto` to decide, also those without an effect; not other texts "auto", such as a name."""
    return [path.lstrip(".") for path in _undecided("", config)]


def _undecided(path: str, section: Section) -> Iterator[str]:
    narrowed = next((_NARROWED[kind] for kind in type(section).__mro__ if kind in _NARROWED), {})
    for name, value in section:
        if isinstance(value, Section):
            yield from _undecided(f"{path}.{name}", value)
        elif value == "auto" and name in narrowed:
            yield f"{path}.{name}"
