"""Variables of a chat template: those in it, those of a run, and the switch of thinking. Fields of messages in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import ConfigError

_OWN_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now", "tokenize"}
    | {"return_dict", "return_tensors", "chat_template", "conversation", "padding", "truncation", "max_length"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}
)
"""Template variables that Slipstream or transformers sets."""

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names of the variable that turns thinking on: the first in Qwen3, GLM and others, the second in DeepSeek and
Granite."""


def check_kwargs(given: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuses variables that the template does not use: they would have no effect."""
    if not given:
        return
    used = template_variables(tokenizer.chat_template) - _OWN_VARIABLES - set(tokenizer.special_tokens_map)
    for name in given:
        setting = f"model.chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES or name in tokenizer.special_tokens_map:
            raise ConfigError(f"{setting} is set by Slipstream or the tokenizer in every rendering: remove it")
        if name not in used:
            known = f"it uses {', '.join(sorted(used))}" if used else "it uses none, so remove the setting"
            raise ConfigError(f"{setting}: the model's chat template does not use this variable: {known}")


def thinking_kwargs(
    thinking: bool | None, given: Mapping[str, Any], template: str | Mapping[str, str]
) -> dict[str, bool]:
    """Translates `model.thinking` into template variables."""
    if thinking is None:
        return {}
    setting = f"model.thinking = {str(thinking).lower()}"
    used = template_variables(template)
    switches = [name for name in THINKING_VARIABLES if name in used]
    if not switches:
        raise ConfigError(
            f"{setting}: the model's chat template uses neither {' nor '.join(THINKING_VARIABLES)}, so its thinking "
            "cannot be switched: remove the setting, or set what the template does use in model.chat_template_kwargs"
        )
    if both := [name for name in switches if name in given]:
        raise ConfigError(f"{setting} and model.chat_template_kwargs.{both[0]} set the same switch: remove one of them")
    return dict.fromkeys(switches, thinking)


def template_variables(template: str | Mapping[str, str]) -> set[str]:
    """Names of the variables in one or several chat templates."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    found: set[str] = set()
    for text in [template] if isinstance(template, str) else template.values():
        # Transformers' own tag, which marks the assistant's content.
        plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", text)
        try:
            found |= meta.find_undeclared_variables(environment.parse(plain))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the model's chat template is not valid (line {error.lineno}: {error.message}): use another model"
            ) from error
    return found


class ReadRecorder(dict[str, Any]):
    """A message that records reads of its fields, as (role, field name)."""

    def __init__(self, values: dict[str, Any], read: set[tuple[str, str]]) -> None:
        super().__init__(values)
        self._role = str(values["role"])
        self._read = read

    def _on_read(self, name: str) -> None:
        self._read.add((self._role, name))

    def __getitem__(self, name: str) -> Any:
        self._on_read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._on_read(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dictionary."""
        self._on_read(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self._on_read(name)
            yield name

    def keys(self) -> Any:
        """As of any dictionary."""
        return list(self)

    def items(self) -> Any:
        """As of any dictionary."""
        return [(name, self[name]) for name in self]
