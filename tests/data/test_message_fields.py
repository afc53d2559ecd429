"""Every field of a message reaches the template, as with TRL; one that no template looks at is told."""

import json
from pathlib import Path

import pytest
from tests.data.conftest import CHATML

from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import read_conversations
from slipstream.data.message_fields import check_contents, check_fields
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
QUESTION = {"role": "user", "content": "2+2?"}
THOUGHTFUL = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
BRIEF = {"role": "system", "content": "Be brief."}
ROWS = {
    "reasoning": {"prompt": [QUESTION], "completion": [THOUGHTFUL]},
    "tools": {"prompt": [QUESTION], "completion": [CALLING], "tools": [TOOL]},
    "tools as text": {
        "prompt": [BRIEF, QUESTION],
        "completion": [{**THOUGHTFUL, "tool_calls": [CALL]}],
        "tools": json.dumps([TOOL]),
    },
}


@pytest.fixture
def qwen3(make_folder):
    trl = pytest.importorskip("trl")
    return make_folder(template=(Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8"))


def read(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_conversations(path)


@pytest.mark.parametrize("name", ROWS)
def test_tokens_and_mask_are_those_of_trl(qwen3, tmp_path, name):
    """As TRL's SFTTrainer prepares a row of prompt and completion; it also trains what follows the end token."""
    from transformers import AutoTokenizer
    from trl.trainer import sft_trainer

    chat, reference = ChatTokenizer(qwen3), AutoTokenizer.from_pretrained(qwen3)
    row = ROWS[name]
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    prompt = sft_trainer._tokenize(reference, row["prompt"], add_generation_prompt=True, tools=tools)["input_ids"]
    whole = sft_trainer._tokenize(reference, row["prompt"] + row["completion"], tools=tools)["input_ids"]
    start = sft_trainer.common_prefix_length(prompt, whole)
    theirs = [0] * start + [1] * (len(whole) - start)
    ours = chat.training_tokens(read(tmp_path, row)[0])
    assert whole[: len(ours)] == ours.token_ids
    assert theirs[: len(ours)] == ours.mask
    assert reference.decode(whole[len(ours) :]) == "\n"
    text = reference.decode(ours.token_ids)
    assert ("two and two" in text) == ("reasoning_content" in row["completion"][0])
    assert ("# Tools" in text) == bool(tools)


def test_a_message_of_weight_zero_is_not_trained_on(make_folder, tmp_path):
    wrong = {"role": "assistant", "content": "5", "weight": 0}
    right = {"role": "assistant", "content": "4"}
    chat = ChatTokenizer(make_folder())
    (talk,) = read(tmp_path, {"messages": [QUESTION, wrong, QUESTION, right]})
    every = chat.training_tokens(talk)
    assert chat.decode([t for t, on in zip(every.token_ids, every.mask, strict=True) if on]) == "4"
    assert "5" in chat.decode(every.token_ids)


def check(folder, *conversations):
    counts = {}
    check_fields(ChatTokenizer(folder), conversations, counts)
    return counts


def test_fields_that_the_template_reads_are_not_told(qwen3, tmp_path):
    assert check(qwen3, *read(tmp_path, *ROWS.values())) == {}


def test_a_field_that_no_template_looks_at_is_counted(qwen3):
    asked = Message("user", "2+2?", extra={"name": "ann", "empty": ""})
    # Qwen3's template reads a name, but of functions.
    assert check(qwen3, [asked, Message("assistant", "4")], [asked]) == {
        "field name of user messages, not read by the chat template": 2
    }


@pytest.mark.parametrize("read_as", ["message['name']", "message.name", "message.get('name')"])
def test_each_way_of_looking_at_a_field_is_seen(make_folder, read_as):
    folder = make_folder(template=CHATML.replace("message['role'] +", f"({read_as} or message['role']) +"))
    assert check(folder, [Message("user", "x", extra={"name": "ann"})], [Message("user", "x")]) == {}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message("assistant", "4", extra={"reasoning_content": "2"}), "1 assistant messages have the field reasoning"),
        (Message("assistant", "", tool_calls=(CALL,)), "have the field tool_calls"),
        (Message("user", "2+2?", tools=(TOOL,)), "1 rows have tools"),
    ],
)
def test_what_is_said_and_would_not_be_learned_is_refused(make_folder, message, said):
    with pytest.raises(DataError, match=said):
        check(make_folder(), [message])


TWO_ROLES = CHATML.replace(
    "{{ '<|im_start|>' +", "{% if message.role in ('user', 'assistant') %}{{ '<|im_start|>' +"
).replace("'<|im_end|>\\n' }}", "'<|im_end|>\\n' }}{% endif %}")
LAST_TWO = CHATML.replace("in messages %}", "in messages[-2:] %}")
IGNORES_TOOL_TEXT = CHATML.replace("message['content'] +", "('ok' if message.role == 'tool' else message['content']) +")
SAYS = {
    "system": Message("system", "Be brief."),
    "user": Message("user", "2+2?"),
    "assistant": Message("assistant", "4"),
    "tool": Message("tool", "it is 4"),
}
TALKS = {
    "plain": (CHATML, "system user assistant tool assistant", None),
    "system": (TWO_ROLES, "system user assistant", "1 system"),
    "tool": (TWO_ROLES, "user assistant tool assistant", "1 tool"),
    "earlier turns": (LAST_TWO, "user assistant user assistant", "1 user"),
    "text of a tool": (IGNORES_TOOL_TEXT, "user assistant tool assistant", "1 tool"),
}


@pytest.mark.parametrize("name", TALKS)
def test_a_message_that_the_template_leaves_out_is_refused(make_folder, name):
    template, roles, said = TALKS[name]
    chat, talk = ChatTokenizer(make_folder(template)), tuple(SAYS[role] for role in roles.split())
    conversations = [(SAYS["user"], SAYS["assistant"]), talk]
    if said is None:
        check_contents(chat, conversations, lambda talk: "row 2")
        return
    with pytest.raises(DataError, match=f"text of {said} messages .first: row 2"):
        check_contents(chat, conversations, lambda talk: f"row {conversations.index(talk) + 1}")


def test_a_message_whose_text_the_template_changes_is_there(make_folder):
    folder = make_folder(CHATML.replace("message['content'] +", "message['content'][:3] | upper +"))
    check_contents(ChatTokenizer(folder), [(SAYS["user"], SAYS["assistant"])], str)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_system_prompt_that_the_template_does_not_render_is_refused(make_folder, refuses):
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    folder = make_folder(raising if refuses else TWO_ROLES)
    with pytest.raises(ConfigError, match=r"environment\.system_prompt = 'Be brief\.'"):
        ChatTokenizer(folder, "Be brief.")
    ChatTokenizer(folder)
