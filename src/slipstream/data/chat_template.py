"""Renders conversations to tokens with the model's chat template; no other module applies one.

The prompt that RL samples from and the prompt part of an SFT example are the same tokens; a conversation that the
template renders differently is refused. Loss is only on the assistant's content and its end-of-turn token, not on what
the template appends after that token (a newline). Placeholders of images are expanded here too
(`images/processor.py`), so that trainer, orchestrator and engine count the same tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.config.sft import TrainOn
from slipstream.data.images.families import image_processor
from slipstream.data.images.processor import ImageProcessor
from slipstream.data.template_variables import (
    THINKING_VARIABLES,
    ReadRecorder,
    check_kwargs,
    template_variables,
    thinking_kwargs,
)
from slipstream.data.tool_calls import with_text
from slipstream.data.unknown_characters import Vocabulary
from slipstream.errors import ConfigError, DataError, first_line, one_line
from slipstream.records import Media, Message
from slipstream.records import Sequence as TokenSequence

_REMEDY = "use a chat model, or put a chat_template into the model folder's tokenizer_config.json"


class ChatTokenizer:
    """A model's tokenizer and chat template.

    `path` is a folder in Hugging Face format or a hub id. `system_prompt` precedes every conversation that has no
    system message; `template_kwargs` are template variables for every rendering; `thinking` sets the template's own
    variable for it; `max_pixels` bounds images (`image_processor`). Raises `ConfigError` if there is no tokenizer or
    template, or if the template leaves the system prompt out, does not use one of these variables or has no thinking
    variable. It also must end an assistant's turn with a special token, otherwise a policy could not learn to stop.
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
        self._system: list[dict[str, Any]] = []
        self.system_prompt = system_prompt
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"model.path = {self.path}: no tokenizer can be loaded ({first_line(error)}): correct it"
            ) from error
        # Slipstream itself says which prompts are too long, and leaves them out.
        self._tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path = {self.path}: the tokenizer has no chat template: {_REMEDY}")
        given = dict(template_kwargs or {})
        check_kwargs(given, self._tokenizer)
        self.template_kwargs = given | thinking_kwargs(thinking, given, self._tokenizer.chat_template)
        """The template's variables in every rendering."""
        self._num_embeddings, self._placeholders = _embeddings(Path(self.path))
        self._turn_suffix = self._find_turn_suffix()
        if system_prompt:
            self._system = self._checked_system(system_prompt)
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
    def special_texts(self) -> frozenset[str]:
        """The texts of the special tokens: a message that holds one is tokenized to it."""
        return frozenset(text for text in self._tokenizer.convert_ids_to_tokens(sorted(self._special)) if text)

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """The tokens that stand for images and videos in a vision-language model; none in another one."""
        from transformers import AutoConfig

        try:
            config: Any = AutoConfig.from_pretrained(self.path, trust_remote_code=self._trusted)
        except (OSError, ValueError):  # a tokenizer alone
            return frozenset()
        if getattr(config, "vision_config", None) is None:
            return frozenset()
        names = ("image_token_id", "image_token_index", "video_token_id")
        found = [number for name in names if (number := getattr(config, name, None)) is not None]
        return frozenset(self._tokenizer.convert_ids_to_tokens(found))

    @cached_property
    def missing_bos(self) -> str:
        """The token with which the tokenizer begins a text but the chat template does not; empty if it has none."""
        first, bos = self._tokenizer.encode("a")[:1], self._tokenizer.bos_token_id
        prompt = self.render([Message("user", "a")])
        return str(self._tokenizer.bos_token) if bos is not None and first == [bos] and prompt[:1] != [bos] else ""

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`, or None."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, to find characters without a token."""
        return Vocabulary(self.plain_tokens, self._tokenizer.unk_token_id)

    def differs_from(self, path: str | Path, trust_remote_code: bool) -> str:
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
        turns = [
            place for place, message in enumerate(messages) if message.role == "assistant" and message.carries_loss
        ]
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
            self._check_beginning(messages)
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

    def _check_beginning(self, messages: Sequence[Message]) -> None:
        """Raises `DataError` where the last message's white space alone keeps it from being trained on: it becomes one
        token with the prompt's end, or the template strips it."""
        *before, last = messages
        stripped = msgspec.structs.replace(last, content=last.content.strip())
        if stripped.content in ("", last.content):
            return
        try:
            self._target([*before, stripped], self.render(before))
        except DataError:
            return
        raise DataError(
            f"an assistant's turn begins or ends with white space that is one token with what the chat template writes "
            f"there (turn: {last.content!r:.60}): strip it"
        )

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
        if self._wants_text:
            chat = with_text(chat)
        if read is not None:
            chat = [ReadRecorder(message, read) for message in chat]
        token_ids: list[int] = self._rendered(chat, messages[0].tools if messages else (), generation_prompt)
        return self.images.expand(token_ids, images) if images else token_ids

    def _rendered(
        self, chat: list[dict[str, Any]], tools: Sequence[Any], generation_prompt: bool, *, tokenize: bool = True
    ) -> Any:
        """Tokens or text of a conversation, with the system prompt. Raises `DataError` where the template refuses
        it."""
        if self._system and (not chat or chat[0]["role"] != "system"):
            chat = self._system + chat
        if not chat:
            raise DataError("no message comes before the assistant's first one: begin with a user's message")
        try:
            rendered = self._tokenizer.apply_chat_template(
                chat,
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **self.template_kwargs,
            )
        except Exception as error:  # templates raise their own errors: alternating roles, no system message, ...
            roles = ", ".join(str(message["role"]) for message in chat)
            raise DataError(
                f"the chat template of {self.path} refuses a conversation of {roles}: {one_line(error)}: change these "
                "messages (the text of a system message may begin the user's first one), or use another template"
            ) from error
        if tokenize:
            self._check_embedded(rendered)
        return rendered

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template wants the arguments of a call as JSON text, which it joins with other text: an object it
        would refuse, or write as Python does."""
        arguments = {"a": "it's"}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            if repr(arguments) not in self._rendered(chat, (), generation_prompt=False, tokenize=False):
                return False
        except DataError:
            pass
        try:
            return '"it\'s"' in self._rendered(with_text(chat), (), generation_prompt=False, tokenize=False)
        except DataError:
            return False

    def unrendered(self, messages: Sequence[Message]) -> list[int]:
        """The places of the messages whose content the template leaves out. Raises `DataError` where it refuses the
        conversation."""
        given = [place for place, message in enumerate(messages) if message.content.strip()]

        def text(contents: Mapping[int, str]) -> str:
            chat = [
                msgspec.structs.replace(message, content=contents.get(place, message.content)).as_chat()
                for place, message in enumerate(messages)
            ]
            chat = with_text(chat) if self._wants_text else chat
            is_prompt = messages[-1].role != "assistant"
            return self._rendered(chat, messages[0].tools, is_prompt, tokenize=False)

        marks = {place: f"content{place}mark" for place in given}
        marked = text({place: f"{messages[place].content} {mark}" for place, mark in marks.items()})
        missing = [place for place, mark in marks.items() if mark not in marked]
        plain = text({}) if missing else ""
        # A template may cut or rewrite a text: it is there if another text is rendered differently.
        return [place for place in missing if text({place: marks[place]}) == plain]

    def _checked_system(self, prompt: str) -> list[dict[str, Any]]:
        """The system message. Raises `ConfigError` where the template leaves it out or refuses it."""
        asked, problem = {"role": "user", "content": "a"}, ""
        try:
            first, second = (
                self._rendered([{"role": "system", "content": text}, asked], (), generation_prompt=True, tokenize=False)
                for text in (f"{prompt} b", f"{prompt} c")
            )
            problem = "leaves it out" if first == second else ""
        except DataError as error:
            problem = f"refuses it ({one_line(error.__cause__ or error)})"
        if problem:
            raise ConfigError(
                f"environment.system_prompt = {prompt!r:.60}: the chat template of {self.path} {problem}: put the text "
                "into the prompts, or use a model whose template renders a system message"
            )
        return [{"role": "system", "content": prompt}]

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
    except (OSError, ValueError, RecursionError):
        return sys.maxsize, frozenset()
    rows = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size") or sys.maxsize
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return rows, frozenset(config[name] for name in names if config.get(name) is not None)


def images_of(messages: Sequence[Message]) -> list[Media]:
    """The images of a conversation, in order."""
    return [image for message in messages for image in message.media]
