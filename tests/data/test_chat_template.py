import logging

import pytest
from tests.data.conftest import CHATML

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.template_variables import template_variables
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message

USER = Message("user", "What is 2+2?")
FOUR = Message("assistant", "4")
TALK = (USER, FOUR, Message("user", "and 3+3?"), Message("assistant", " 6 "), Message("user", "thanks"))


@pytest.fixture
def chat(make_folder):
    return ChatTokenizer(make_folder())


def trained_text(chat, sequence):
    """The trained tokens as text, special tokens shown."""
    ids = [token for token, on in zip(sequence.token_ids, sequence.mask, strict=True) if on]
    return chat._tokenizer.decode(ids)


def test_the_prompt_is_the_template_with_the_assistants_turn_opened(chat):
    text = chat._tokenizer.decode(chat.render([USER]))
    assert text == "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_of_prompts_beyond_the_context_transformers_says_nothing(chat, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    chat._tokenizer.model_max_length = 100
    assert len(chat.render([Message("user", "a" * 200)])) > 200
    assert not caplog.records


def test_training_tokens_begin_with_the_rendered_prompt_and_end_with_the_end_token(chat):
    sequence = chat.training_tokens([USER, FOUR])
    prompt = chat.render([USER])
    assert sequence.token_ids[: len(prompt)] == prompt
    assert not any(sequence.mask[: len(prompt)])
    assert all(sequence.mask[len(prompt) :])
    assert trained_text(chat, sequence) == "4<|im_end|>"
    assert sequence.token_ids[-1] == chat.end_token_id
    assert sequence.logprobs is None


def test_all_turns_or_the_last_and_nothing_after_it(chat):
    every, last = chat.training_tokens(TALK, "all"), chat.training_tokens(TALK, "last")
    assert every.token_ids == last.token_ids
    assert trained_text(chat, every) == "4<|im_end|> 6 <|im_end|>"
    assert trained_text(chat, last) == " 6 <|im_end|>"
    assert "thanks" not in chat.decode(every.token_ids)
    for turn in (1, 3):  # what RL would sample from at either turn
        prompt = chat.render(TALK[:turn])
        assert every.token_ids[: len(prompt)] == prompt


def test_everything_is_the_whole_rendering_but_its_first_token(chat):
    """As TRL trains with assistant_only_loss = False."""
    sequence = chat.training_tokens(TALK, "everything")
    plain = [{"role": message.role, "content": message.content} for message in TALK]
    assert sequence.token_ids == chat._tokenizer.apply_chat_template(plain, return_dict=False)
    assert sequence.mask == [False] + [True] * (len(sequence) - 1)
    assert "thanks" in chat.decode(sequence.token_ids)


def test_a_message_of_weight_0_carries_no_loss_under_everything(chat):
    talk = [USER, Message("assistant", "5", carries_loss=False), *TALK[2:]]
    sequence = chat.training_tokens(talk, "everything")
    masked = [token for token, on in zip(sequence.token_ids, sequence.mask, strict=True) if not on]
    assert chat._tokenizer.decode(masked) == "<|im_start|><|im_start|>assistant\n5<|im_end|>\n"
    first = chat.training_tokens([Message("user", "x", carries_loss=False), FOUR], "everything")
    assert trained_text(chat, first) == "<|im_start|>assistant\n4<|im_end|>\n"


def test_a_message_of_weight_0_that_is_rendered_differently_later_is_refused(make_folder):
    template = CHATML.replace("message['content'] +", "(message['content'] if loop.last else 'old') +")
    chat = ChatTokenizer(make_folder(template))
    talk = [USER, Message("assistant", "5", carries_loss=False), USER]
    with pytest.raises(DataError, match="renders message 1, whose weight is 0, differently once others follow"):
        chat.training_tokens(talk, "everything")


@pytest.mark.parametrize(
    ("variable", "thinking", "thinks"),
    [("enable_thinking", None, True), ("enable_thinking", False, False), ("thinking", None, False),
     ("thinking", True, True), ("", None, False)],
)  # fmt: skip
def test_whether_thinking_is_on(make_folder, variable, thinking, thinks):
    template = f"{{% if {variable} %}}{{% endif %}}{CHATML}" if variable else CHATML
    assert ChatTokenizer(make_folder(template), thinking=thinking).thinks is thinks


def test_an_empty_answer_trains_the_end_token_alone(chat):
    assert trained_text(chat, chat.training_tokens([USER, Message("assistant", "")])) == "<|im_end|>"


def test_the_system_prompt_stands_before_conversations_without_one(make_folder):
    chat = ChatTokenizer(make_folder(), system_prompt="Be brief.")
    assert chat.decode(chat.render([USER])).startswith("system\nBe brief.")
    own = chat.decode(chat.render([Message("system", "Be long."), USER]))
    assert own.startswith("system\nBe long.")
    assert "brief" not in own
    sequence = chat.training_tokens([USER, FOUR])
    assert sequence.token_ids[: len(chat.render([USER]))] == chat.render([USER])


@pytest.mark.parametrize("text", [" leading", "trailing ", "two\nlines\n", "a  b", "don 't , really ?"])
def test_decode_gives_the_text_back(chat, text):
    sequence = chat.training_tokens([USER, Message("assistant", text)])
    sampled = [token for token, on in zip(sequence.token_ids, sequence.mask, strict=True) if on]
    assert chat.decode(sampled) == text


@pytest.mark.parametrize(("named", "more"), [(None, set()), (5, {5}), ([5, 6], {5, 6})])
def test_stop_tokens_are_the_turns_end_the_eos_and_what_the_folder_names(make_folder, named, more):
    chat = ChatTokenizer(make_folder(generation_eos=named))
    ids = chat._tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    assert set(chat.stop_token_ids) == {*ids, *more}
    assert list(chat.stop_token_ids) == sorted(chat.stop_token_ids)


def test_a_tokenizer_without_a_template_is_refused_with_a_remedy(make_folder):
    with pytest.raises(ConfigError, match=r"no chat template.*tokenizer_config\.json"):
        ChatTokenizer(make_folder(template=None))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        ChatTokenizer(tmp_path / "nowhere")


def test_a_template_without_an_end_token_is_refused(make_folder):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: "
    with pytest.raises(ConfigError, match="cannot learn to stop"):
        ChatTokenizer(make_folder(template=template))


def test_a_template_that_opens_something_the_answer_lacks_is_refused(make_folder):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    )
    chat = ChatTokenizer(make_folder(template=template))
    with pytest.raises(DataError, match="does not render an assistant's turn as the prompt for it"):
        chat.training_tokens([USER, FOUR])
    assert chat.training_tokens([USER, Message("assistant", "<think>hm</think>4")]).num_trainable


def test_a_template_that_drops_thinking_can_train_the_last_turn_only(make_folder):
    template = (
        "{% for m in messages %}{% set c = m['content'] %}"
        "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = ChatTokenizer(make_folder(template=template))
    talk = [USER, Message("assistant", "<think>hm</think>4"), USER, Message("assistant", "<think>so</think>4")]
    with pytest.raises(DataError, match="train_on = 'last'"):
        chat.training_tokens(talk, "all")
    sequence = chat.training_tokens(talk, "last")
    assert trained_text(chat, sequence) == "<think>so</think>4<|im_end|>"
    assert "hm" not in chat.decode(sequence.token_ids)


def test_a_template_that_refuses_a_conversation_says_why(make_folder):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    chat = ChatTokenizer(make_folder(template=template + CHATML))
    with pytest.raises(DataError, match="no system messages"):
        chat.render([Message("system", "x"), USER])


@pytest.mark.parametrize(
    ("talk", "said"),
    [
        ([USER, Message("assistant", "4<|im_end|>\n<|im_start|>user\nmore")], r"holds the end token <\|im_end\|>"),
        ([Message("assistant", "4"), USER, Message("assistant", "5")], "begin with a user's message"),
        ([USER], "no assistant message"),
    ],
)
def test_conversations_that_cannot_be_trained_on_are_refused(chat, talk, said):
    with pytest.raises(DataError, match=said):
        chat.training_tokens(talk)


THINKING = CHATML.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<none>' }}{% endif %}{% endif %}",
)


def test_variables_of_the_template_are_set_in_every_rendering(make_folder):
    folder, question = make_folder(template=THINKING), [Message("user", "x")]
    silent = ChatTokenizer(folder, template_kwargs={"enable_thinking": False})
    assert silent.decode(silent.render(question)).endswith("<none>")
    chat = ChatTokenizer(folder, template_kwargs={"enable_thinking": True})
    assert chat.render(question) == ChatTokenizer(folder).render(question)


@pytest.mark.parametrize(
    ("template", "name", "said"),
    [
        (THINKING, "enable_thinkin", "does not use this variable: it uses enable_thinking"),
        (CHATML, "enable_thinking", "it uses none, so remove the setting"),
        (THINKING, "add_generation_prompt", "is set by Slipstream or the tokenizer"),
        (THINKING, "eos_token", "is set by Slipstream or the tokenizer"),
    ],
)
def test_a_variable_that_the_template_does_not_use(make_folder, template, name, said):
    with pytest.raises(ConfigError, match=said):
        ChatTokenizer(make_folder(template=template), template_kwargs={name: False})


def test_variables_are_found_past_loops_and_transformers_own_tag():
    template = (
        "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{%- generation %}{{ m.content }}"
        "{% endgeneration -%}{{ style | default('a') }}{% endfor %}"
    )
    assert template_variables(template) == {"messages", "style"}
    assert template_variables({"default": template, "tool_use": "{{ tools }}"}) == {"messages", "style", "tools"}


DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + CHATML
    + "{% if add_generation_prompt and not thinking %}{{ '</think>' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "silent"), [(THINKING, "<none>"), (DEEPSEEK, "</think>")])
def test_thinking_is_switched_by_whatever_the_template_calls_it(make_folder, template, silent):
    folder, question = make_folder(template=template), [Message("user", "x")]
    ends = {
        thinking: (chat := ChatTokenizer(folder, thinking=thinking)).decode(chat.render(question)).endswith(silent)
        for thinking in (True, False, None)
    }
    assert ends == {True: False, False: True, None: template == DEEPSEEK}


def test_thinking_goes_together_with_other_variables(make_folder):
    folder = make_folder(template=THINKING + "{{ style }}")
    chat = ChatTokenizer(folder, template_kwargs={"style": "brief"}, thinking=False)
    assert chat.template_kwargs == {"style": "brief", "enable_thinking": False}
    assert chat.decode(chat.render([Message("user", "x")])).endswith("<none>brief")


@pytest.mark.parametrize(
    ("template", "given", "said"),
    [
        (CHATML, {}, "neither enable_thinking nor thinking, so its thinking cannot be switched: remove the setting"),
        (THINKING, {"enable_thinking": False}, "set the same switch: remove one of them"),
        (THINKING, {"enable_thinking": True}, "set the same switch: remove one of them"),
    ],
)
def test_thinking_that_cannot_be_switched(make_folder, template, given, said):
    with pytest.raises(ConfigError, match=said):
        ChatTokenizer(make_folder(template=template), template_kwargs=given, thinking=True)


def test_both_texts_of_a_turn_are_those_of_the_tokenizer(tmp_path):
    made = new_tokenizer("byte")
    made.add_tokens(["[TOOL]"], special_tokens=True)
    made.add_tokens(["<think>"])
    made.save_pretrained(tmp_path)
    chat = ChatTokenizer(tmp_path)
    end = chat.end_token_id
    for text in ("plain", "<think>a", "[TOOL]f", " [TOOL] ", ""):
        ids = chat.plain_tokens(text)
        for sampled in (ids, [*ids, end], [*ids, end, end]):
            said, whole = chat.decode_turn(sampled)
            assert said == chat.decode(sampled) == text.replace("[TOOL]", "")
            assert whole == text + "<|im_end|>" * (sampled.count(end) - 1)


def test_white_space_that_merges_with_the_prompt_is_named(make_folder):
    """As Qwen's newlines, which become one token: here the template strips them."""
    folder = make_folder(CHATML.replace("message['content'] +", "message['content'] | trim +"))
    chat = ChatTokenizer(folder)
    asked = Message("user", "q")
    merging = CHATML.replace("message['content'] +", "(message['content'] | replace(' ', '')) +")
    assert chat.training_tokens([asked, Message("assistant", "a")])
    folder = make_folder("{% if messages[-1].content[:1] == ' ' %}x{% endif %}" + merging)
    with pytest.raises(DataError, match=r"white space .* strip it"):
        ChatTokenizer(folder).training_tokens([asked, Message("assistant", " a")])
