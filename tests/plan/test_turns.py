"""A chat template that insists on alternating roles is found out before the run, where turns would break it."""

from types import SimpleNamespace

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs import Environment, Message, SingleTurn, Task
from slipstream.errors import ConfigError
from slipstream.plan.preflight.turns import check_gold_turns, check_turns

ALTERNATING = """{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{ message['content'] }}{{ eos_token }}
{%- endfor -%}
{%- if tools %}{% endif -%}"""


def twice(x: int) -> int:
    return 2 * x


class Asks(SingleTurn):
    tools = (twice,)
    max_turns = 4

    def tasks(self, split, num_tasks):
        return [Task("t", (Message("user", "q"),), "a")]

    def reward(self, task, completion):
        return 0.0


class Own(Environment):
    max_turns = 3

    def tasks(self, split, num_tasks):
        return [Task("t", (Message("user", "q"),), "a")]

    async def run(self, task, policy):
        raise NotImplementedError

    def score(self, task, completion):
        raise NotImplementedError


class OwnWithTools(Own):
    tools = (twice,)


@pytest.fixture
def tokenizer_of(tmp_path):
    def make(template=None):
        made = new_tokenizer("char", context_length=256)
        made.chat_template = template or made.chat_template
        made.save_pretrained(tmp_path / "model")
        return ChatTokenizer(str(tmp_path / "model"))

    return make


def check(tokenizer, environment):
    return check_turns(tokenizer, environment, environment.tasks("train", 1)[0].prompt, "org/name")


def test_tools_under_alternating_roles_are_refused_in_one_sentence(tokenizer_of):
    with pytest.raises(ConfigError) as refused:
        check(tokenizer_of(ALTERNATING), Asks())
    text = str(refused.value)
    assert text.startswith("the chat template of org/name refuses a message of role tool after a turn of the model")
    assert "roles must alternate user/assistant" in text
    assert text.endswith("which Asks continues with in up to 4 turns: use a model whose template renders it, or "
                         "max_turns = 1 without tools")  # fmt: skip
    assert "\n" not in text


def test_turns_that_alternate_are_fine_and_a_run_may_say_what_it_likes(tokenizer_of):
    tokenizer = tokenizer_of(ALTERNATING)
    assert check(tokenizer, Own()) == []
    (warning,) = check(tokenizer, OwnWithTools())
    assert warning.endswith("unless its run() says something else")


def test_the_small_models_template_takes_both(tokenizer_of):
    assert check(tokenizer_of(), Asks()) == check(tokenizer_of(), Own()) == []


def test_results_of_tools_that_the_template_leaves_out_are_refused(tokenizer_of):
    silent = ALTERNATING.partition("{%- endif -%}")[2].replace(
        "message['content']", "message['content'] if message.role != 'tool' else ''"
    )
    tokenizer = tokenizer_of("{%- for message in messages -%}" + silent)
    with pytest.raises(ConfigError, match=r"a message of role tool .*it leaves the text out"):
        check(tokenizer, Asks())
    (warning,) = check(tokenizer, OwnWithTools())
    assert "leaves the text out" in warning


def test_gold_answers_of_one_turn_get_a_warning_where_episodes_have_several():
    question, answer = Message("user", "q"), Message("assistant", "a")
    environment = SimpleNamespace(name="talk", max_turns=3)
    (warning,) = check_gold_turns(environment, [[question, answer], [question, answer]])
    assert "3 turns" in warning
    assert check_gold_turns(environment, [[question, answer], [question, answer, question, answer]]) == []
    assert check_gold_turns(SimpleNamespace(name="one", max_turns=1), [[question, answer]]) == []
    assert check_gold_turns(environment, []) == check_gold_turns(None, [[question, answer]]) == []
