"""Every field of a message reaches the template, as with TRL; one that no template looks at is told."""

import json
from pathlib import Path

import pytest
from tests.data.conftest import CHATML

from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import read_conversations
from slipstream.data.message_fields import check_fields
from slipstream.errors import DataError
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
        (
            Message("assistant", "4", extra={"reasoning_content": "2"}),
            "1 assistant messages have the field reasoning",
        ),
        (Message("assistant", "", tool_calls=(CALL,)), "have the field tool_calls"),
        (Message("user", "2+2?", tools=(TOOL,)), "1 rows have tools"),
    ],
)
def test_what_is_said_and_would_not_be_learned_is_refused(make_folder, message, said):
    with pytest.raises(DataError, match=said):
        check(make_folder(), [message])
