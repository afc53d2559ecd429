"""Renders conversations to tokens with the model's chat template; no other module applies one.

The prompt that RL samples from and the prompt part of an SFT example are the same tokens; a conversation that the
template renders differently is refused. Loss is only on the assistant's content and its end-of-turn token, not on what
the template appends after that token (a newline). Placeholders of images are expanded here too
(`images/processor.py`), so that trainer, orchestrator and engine count the same tokens.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from slipstream.config.sft import TrainOn
from slipstream.data.images.families import image_processor
from slipstream.data.images.processor import ImageProcessor
from slipstream.data.message_fields import ReadRecorder
from slipstream.data.unknown_characters import Vocabulary
from slipstream.errors import ConfigError, DataError, first_line
from slipstream.records import Media, Message
from slipstream.records import Sequence as TokenSequence

_REMEDY = "use a chat model, or put a chat_template into the model folder's tokenizer_config.json"

_OWN_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now", "tokenize"}
    | {"return_dict", "return_tensors", "chat_template", "conversation", "padding", "truncation", "max_length"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}
)
"""Template variables that Slipstream or transformers sets."""

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names of the variable that turns thinking on: the first in Qwen3, GLM and others, the second in DeepSeek and
Granite."""


class ChatTokenizer:
    """A model's tokenizer and chat template.

    `path` is a folder in Hugging Face format or a hub id. `system_prompt` precedes every conversation that has no
    system message; `template_kwargs` are template variables for every rendering; `thinking` sets the template's own
    variable for it; `max_pixels` bounds images (`image_processor`). Raises `ConfigError` if there is no tokenizer or
    template, if the template does not use one of these variables or has no thinking variable, or if it does not end an
    assistant's turn with a special token (a policy could not learn to stop).
    """

    def __init__(
        self,
        path: str | Path,
        system_prompt: str = "",
        trust_remote_code: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        thinking: bool | None = None,
        max_pixels: int | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        self.path = str(path)
        self._trusted, self._max_pixels = trust_remote_code, max_pixels
        if os.path.isabs(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"model.path = {self.path}: there is no such folder: correct it, or make a model first")
        self._system: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path = {self.path}: no tokenizer can be loaded ({first_line(error)}): correct it"
            ) from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path = {self.path}: the tokenizer has no chat template: {_REMEDY}")
        given = dict(template_kwargs or {})
        _check_template_kwargs(given, self._tokenizer)
        self.template_kwargs = given | _thinking_kwargs(thinking, given, self._tokenizer.chat_template)
        """The template's variables in every rendering."""
        self._num_embeddings, self._placeholders = _embeddings(Path(self.path))
        self._turn_suffix = self._find_turn_suffix()
        self.has_thinking_switch = bool(template_variables(self._tokenizer.chat_template) & {*THINKING_VARIABLES})
        """Whether the template has a variable that turns thinking on or off."""
        set_to = {self.template_kwargs.get(name) for name in THINKING_VARIABLES}
        is_unset = set_to == {None} and THINKING_VARIABLES[0] in template_variables(self._tokenizer.chat_template)
        self.thinks = True in set_to or is_unset
        """Whether prompts are rendered with thinking on: where nothing sets it, as templates with the first of those
        variables have it."""
        self.end_token_id = self._turn_suffix[0]
        """The token that ends an assistant's turn; SFT trains on it."""
        self.stop_token_ids = self._find_stop_tokens(trust_remote_code)
        """All tokens that end generation: that one, and those that the tokenizer and the model's folder name."""
        self._stops = frozenset(self.stop_token_ids)
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        self._special = frozenset(
            {*self._tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        )
        self._silent_stops = frozenset(stop for stop in self._stops & self._special if not self.decode([stop]))
        """The end tokens that `decode` leaves out."""

    @property
    def end_tokens(self) -> tuple[tuple[int, ...], str]:
        """The tokens that end generation, first that of a turn; and its text, if the tokenizer may take it for its own
        end token: not if the template writes that token, or the tokenizer appends it to every text."""
        others = (stop for stop in self.stop_token_ids if stop != self.end_token_id)
        is_used = "eos_token" in template_variables(self._tokenizer.chat_template)
        is_used |= self._tokenizer.eos_token_id in self._tokenizer.encode("")
        text = "" if is_used else str(self._tokenizer.convert_ids_to_tokens(self.end_token_id))
        return (self.end_token_id, *others), text

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the start of the assistant's next turn."""
        return self._apply(messages, generation_prompt=True)

    @cached_property
    def images(self) -> ImageProcessor:
        """Expands the placeholders of images. Raises `ConfigError` for a model whose images cannot be trained on."""
        return image_processor(self.path, self._trusted, max_pixels=self._max_pixels)

    def place_images(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[Media, ...]:
        """The images of a conversation with their places in its tokens."""
        images = images_of(messages)
        return self.images.place(token_ids, images) if images else ()

    def request(self, token_ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[bytes, ...]]:
        """What the engine is asked for a prompt: its tokens with one placeholder for each image, and the images."""
        return self.images.request(token_ids, media) if media else (list(token_ids), ())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, without special tokens and without cleanup of spaces."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_turn(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Text of a sampled turn, as `decode`; and as the next prompt must hold it, with the special tokens in it (some
        models' tags of tool calls), which the template's text is tokenized to again, but without the token that ended
        it."""
        ended = bool(token_ids) and token_ids[-1] in self._stops
        spoken = list(token_ids[:-1] if ended else token_ids)
        whole = self._tokenizer.decode(spoken, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_plain = self._special.isdisjoint(spoken) and (not ended or token_ids[-1] in self._silent_stops)
        return (whole if is_plain else self.decode(token_ids)), whole

    def plain_tokens(self, text: str) -> list[int]:
        """Tokens of a text alone, without a chat template."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    @property
    def vocabulary_ids(self) -> dict[str, int]:
        """The id of each token, by its text in the vocabulary."""
        return self._tokenizer.get_vocab()

    @property
    def added_texts(self) -> dict[int, str]:
        """The texts of the tokens that were added to the vocabulary, by id: they stand for exactly these."""
        return {number: token.content for number, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`, or None."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, to find characters without a token."""
        return Vocabulary(self.plain_tokens, self._tokenizer.unk_token_id)

    def differs_from(self, path: str | Path, trust_remote_code: bool = False) -> str:
        """How the vocabulary of the tokenizer in `path` differs from this one; empty if all tokens are equal. Raises
        OSError or ValueError if there is no tokenizer."""
        from transformers import AutoTokenizer

        other: Any = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        ours, theirs = self._tokenizer.get_vocab(), other.get_vocab()
        different = [token for token, number in ours.items() if theirs.get(token) != number]
        if different:
            return f"{len(different)} of {len(ours)} tokens differ, such as {min(different)!r}"
        return f"it has {len(theirs)} tokens, not {len(ours)}" if len(theirs) != len(ours) else ""

    def training_tokens(self, messages: Sequence[Message], train_on: TrainOn = "all") -> TokenSequence:
        """Tokens and loss mask of a conversation, up to the end of its last assistant turn.

        The mask is true on content and end token of the last assistant turn, or of all assistant turns, except messages
        without loss. Tokens are built turn by turn: `render(messages before the turn)` must be a prefix of the turn's
        tokens, and each turn's tokens a prefix of the next turn's. Raises `DataError` otherwise, and for content that
        contains an end token. With `everything` all tokens of the rendered conversation but the first, which nothing
        predicts, carry loss.
        """
        if train_on == "everything":
            return self._all_tokens(messages)
        turns = [place for place, message in enumerate(messages) if _is_trained(message)]
        if not turns:
            raise DataError("a conversation has no assistant message, so nothing to train on: add one or remove it")
        token_ids: list[int] = []
        mask: list[bool] = []
        for place in turns if train_on == "all" else turns[-1:]:
            prompt = self.render(messages[:place])
            if prompt[: len(token_ids)] != token_ids:
                raise DataError(
                    f"the chat template of {self.path} renders earlier turns differently once message {place} follows "
                    "(it drops thinking, say), so they cannot be trained in one pass: set algorithm.train_on = 'last'"
                )
            target = self._target(messages[: place + 1], prompt)
            mask += [False] * (len(prompt) - len(mask)) + [True] * len(target)
            token_ids = prompt + target
        return self._with_images(messages[: turns[-1] + 1], TokenSequence(token_ids, mask))

    def _all_tokens(self, messages: Sequence[Message]) -> TokenSequence:
        """The whole conversation; what the template renders for a message without loss is masked out."""
        token_ids = self._apply(messages, generation_prompt=False)
        mask = [False] + [True] * (len(token_ids) - 1)
        for place, message in enumerate(messages):
            if message.carries_loss:
                continue
            before, after = (
                self._apply(messages[:end], generation_prompt=False) if end else [] for end in (place, place + 1)
            )
            if token_ids[: len(before)] != before or token_ids[: len(after)] != after:
                raise DataError(
                    f"the chat template of {self.path} renders message {place}, whose weight is 0, differently once "
                    "others follow, so it cannot be kept out of the loss: remove the weight"
                )
            mask[len(before) : len(after)] = [False] * (len(after) - len(before))
        return self._with_images(messages, TokenSequence(token_ids, mask))

    def _with_images(self, messages: Sequence[Message], sequence: TokenSequence) -> TokenSequence:
        """Adds the images of the messages; their placeholders carry no loss."""
        sequence.media = list(self.place_images(messages, sequence.token_ids))
        for image in sequence.media:
            sequence.mask[image.start : image.start + image.num_tokens] = [False] * image.num_tokens
        return sequence

    def _target(self, messages: Sequence[Message], prompt: list[int]) -> list[int]:
        """Tokens of the last message after `prompt`, including its end token."""
        full = self._apply(messages, generation_prompt=False)
        start, end = len(prompt), len(full) - len(self._turn_suffix) + 1
        if full[:start] != prompt or end <= start or full[end - 1 :] != self._turn_suffix:
            raise DataError(
                f"the chat template of {self.path} does not render an assistant's turn as the prompt for it, its text "
                f"and an end token (turn: {messages[-1].content!r:.60}): use another template"
            )
        target = full[start:end]
        if stops := self._stops.intersection(target[:-1]):
            token = self._tokenizer.convert_ids_to_tokens(min(stops))
            raise DataError(
                f"an assistant's turn holds the end token {token} in its text ({messages[-1].content!r:.60}): remove it"
            )
        return target

    def fields_read(self, messages: Sequence[Message]) -> set[tuple[str, str]]:
        """(role, field name) of the message fields that the template reads while it renders `messages`."""
        read: set[tuple[str, str]] = set()
        self._apply(messages, generation_prompt=messages[-1].role != "assistant", read=read)
        return read

    @property
    def template(self) -> str:
        """The chat template; of several, all of them."""
        given: str | Mapping[str, str] = self._tokenizer.chat_template
        return given if isinstance(given, str) else "\n".join(given.values())

    @property
    def renders_tools(self) -> bool:
        """Whether the template renders the tools of a conversation."""
        return "tools" in template_variables(self._tokenizer.chat_template)

    def _apply(
        self, messages: Sequence[Message], *, generation_prompt: bool, read: set[tuple[str, str]] | None = None
    ) -> list[int]:
        images = images_of(messages)
        if images:
            _ = self.images  # the first error of a model that reads none
        chat: list[dict[str, Any]] = [message.as_chat() for message in messages]
        if read is not None:
            chat = [ReadRecorder(message, read) for message in chat]
        tools = list(messages[0].tools) if messages else []
        if self._system and (not chat or chat[0]["role"] != "system"):
            chat = self._system + chat
        try:
            token_ids: list[int] = self._tokenizer.apply_chat_template(
                chat,
                tools=tools or None,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
                **self.template_kwargs,
            )
        except Exception as error:  # templates raise their own errors: alternating roles, no system message, ...
            raise DataError(f"the chat template of {self.path} refuses a conversation: {error}") from error
        self._check_embedded(token_ids)
        return self.images.expand(token_ids, images) if images else token_ids

    def _check_embedded(self, token_ids: Sequence[int]) -> None:
        """Refuse tokens that the model has no embedding of: some were added to the tokenizer alone."""
        if max(token_ids, default=0) < self._num_embeddings:
            return
        beyond = [each for each in token_ids if each >= self._num_embeddings and each not in self._placeholders]
        if beyond:
            token = self._tokenizer.convert_ids_to_tokens(min(beyond))
            raise DataError(
                f"the token {token!r} is number {min(beyond)}, and the embedding of {self.path} has "
                f"{self._num_embeddings} rows (its tokenizer has {len(self._tokenizer)} tokens): resize the embedding "
                "with resize_token_embeddings, or use a text without that token"
            )

    def _find_turn_suffix(self) -> list[int]:
        """What the template appends to an assistant's text, from the end token on."""
        question = Message("user", "a")
        try:
            first, second = (
                self._apply([question, Message("assistant", text)], generation_prompt=False) for text in ("b", "c")
            )
        except DataError as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise ConfigError(
                f"model.path = {self.path}: the chat template cannot render a question and an answer ({reason}): "
                f"{_REMEDY}"
            ) from error
        length = 0
        while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
            length += 1
        suffix = first[len(first) - length :]
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        if not suffix or suffix[0] not in special:
            raise ConfigError(
                f"model.path = {self.path}: the chat template does not end an assistant's turn with a special token, "
                f"so a policy cannot learn to stop: {_REMEDY}"
            )
        return suffix

    def _find_stop_tokens(self, trust_remote_code: bool) -> tuple[int, ...]:
        from transformers import GenerationConfig

        found = {self.end_token_id}
        if self._tokenizer.eos_token_id is not None:
            found.add(self._tokenizer.eos_token_id)
        try:
            named = cast(
                "int | list[int] | None",
                GenerationConfig.from_pretrained(self.path, trust_remote_code=trust_remote_code).eos_token_id,
            )
        except OSError:  # the model has no generation_config.json
            named = None
        found.update(named if isinstance(named, list) else [] if named is None else [named])
        return tuple(sorted(found))


def _embeddings(folder: Path) -> tuple[int, frozenset[int]]:
    """The rows of the model's embedding as its config.json says, and the placeholders of images, which need none;
    no bound where it does not say so."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return sys.maxsize, frozenset()
    rows = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size") or sys.maxsize
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return rows, frozenset(config[name] for name in names if config.get(name) is not None)


def images_of(messages: Sequence[Message]) -> list[Media]:
    """The images of a conversation, in order."""
    return [image for message in messages for image in message.media]


def _is_trained(message: Message) -> bool:
    return message.role == "assistant" and message.carries_loss


def _check_template_kwargs(given: Mapping[str, Any], tokenizer: Any) -> None:
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


def _thinking_kwargs(
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
    """Names of the variables that one or several chat templates read."""
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
