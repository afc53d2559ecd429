"""The same tools and calls give the same tokens, whatever form and format their rows have, under every kind of
template."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.problems import read_problems

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import give
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import Columns, read_conversations
from slipstream.data.files.arrow import without_nulls
from slipstream.envs.from_python import pack_environment, pack_rows
from slipstream.envs.registry import load_environment
from slipstream.envs.single_turn import as_task
from slipstream.errors import DataError

CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(ARGUMENTS){% endfor %}"
BODY = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {
    "tojson": "{{ c.function.arguments | tojson }}",
    "items": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "either": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
    "text": "{{ c.function.arguments }}",
    "joined text": "{{ '`' + c.function.arguments + '`' }}",
}
"""How templates write a call's arguments: Qwen 2.5's, Qwen 3 Coder's, Qwen 3's, Mistral's, DeepSeek's."""


def template(form):
    return BODY.replace("ARGUMENTS", FORMS[form])


def tool(name, properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def row(name, arguments, content=""):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    kinds = {int: "integer", str: "string"}
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    properties = {key: {"type": kinds.get(type(value), "object")} for key, value in given.items()}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": f"use {name}"}, said], "tools": [tool(name, properties)]}


def test_tools_of_other_forms_become_openais(tmp_path):
    """A function alone (OpenAI's `functions`) and Anthropic's: a template would leave out their parameters."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    alone = {"name": "weather", "description": "It."}
    server = {"type": "web_search_20250305", "name": "web_search"}
    given = [alone | {"parameters": schema}, {"type": "custom", **alone, "input_schema": schema}, server]
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk, "tools": given}))
    one = {"type": "function", "function": alone | {"parameters": schema}}
    assert read_conversations(path)[0][0].tools == (one, one, server)


ROWS = [row("weather", {"city": "Bern"}), row("add", {"a": 1, "b": 2})]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", ["", None, "left out"])
def test_arguments_as_text_give_the_tokens_of_an_object(make_folder, tmp_path, form, content):
    chat = ChatTokenizer(make_folder(template(form)))
    as_text = row("weather", '{"city": "Bern"}', content)
    if content == "left out":
        del as_text["messages"][1]["content"]
    first, second = read_conversations(jsonl(tmp_path / "rows.jsonl", [ROWS[0], as_text]))
    made = chat.training_tokens(second)
    assert made == chat.training_tokens(first)
    target = chat.decode([token for token, trained in zip(made.token_ids, made.mask, strict=True) if trained])
    assert {"items": "city=Bern;", "joined text": '`{"city": "Bern"}`'}.get(form, '{"city": "Bern"}') in target


@pytest.mark.parametrize("arguments", ["Bern", '["Bern"]', "{'city': 'Bern'}", ["Bern"], 3])
def test_arguments_that_are_no_object_are_refused(tmp_path, arguments):
    broken = json.loads(json.dumps(ROWS[0]))
    broken["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    path = jsonl(tmp_path / "rows.jsonl", [ROWS[0], broken])
    with pytest.raises(DataError, match=r"row 2 of .*rows\.jsonl: messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        read_conversations(path)
    with pytest.raises(DataError, match=r"task 3: tool_calls\[0\]\.function\.arguments"):
        as_task({"prompt": broken["messages"]}, "3", "task 3")


def test_calls_in_prompts_of_reinforcement_learning(tmp_path):
    """From files, and from rows of a Python program."""
    asked = [*row("weather", '{"city": "Bern"}', None)["messages"], {"role": "tool", "content": "sunny"}]
    (problem,) = read_problems(jsonl(tmp_path / "rows.jsonl", [{"prompt": asked, "answer": "sunny"}]), Columns())
    task = as_task({"prompt": asked}, "3", "task 3")
    for prompt in (problem.prompt, task.prompt):
        assert prompt[1].content == ""
        assert prompt[1].as_chat()["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


WRITERS = {
    "parquet by pyarrow": lambda folder, rows: parquet(folder / "rows.parquet", rows),
    "parquet by datasets": lambda folder, rows: (
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet") and folder / "rows.parquet"
    ),
    "save_to_disk": lambda folder, rows: (
        datasets.Dataset.from_list(rows).save_to_disk(folder / "disk") or folder / "disk"
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_nulls_of_arrow_are_no_arguments(tmp_path, writer):
    datasets.disable_progress_bars()
    assert read_conversations(WRITERS[writer](tmp_path, ROWS)) == read_conversations(jsonl(tmp_path / "r.jsonl", ROWS))


def test_values_of_several_types_that_datasets_keeps_as_json(tmp_path):
    datasets.disable_progress_bars()
    rows = [row("f", {"x": 1}), row("f", {"x": "one"}), row("f", {"x": {"deep": [1, None]}})]
    data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    data.to_parquet(tmp_path / "rows.parquet")
    assert read_conversations(tmp_path / "rows.parquet") == read_conversations(jsonl(tmp_path / "r.jsonl", rows))


def test_a_null_of_json_lines_was_written_on_purpose(tmp_path):
    (talk,) = read_conversations(jsonl(tmp_path / "rows.jsonl", [row("f", {"x": None, "y": {"z": None}})]))
    assert talk[1].tool_calls[0]["function"]["arguments"] == {"x": None, "y": {"z": None}}


def test_rows_of_a_table_in_python_have_no_nulls_of_it():
    asked = [{"prompt": each["messages"], "answer": "1"} for each in ROWS]
    for prompt in asked:
        prompt["prompt"].append({"role": "tool", "content": "x"})
    packed = pack_environment(datasets.Dataset.from_list(asked), reward="exact")
    give(packed)
    environment = load_environment(EnvironmentConfig(name=packed.name))
    calls = [
        message.tool_calls[0]["function"]["arguments"]
        for split in ("train", "eval")
        for task in environment.tasks(split, 9)
        for message in task.prompt
        if message.tool_calls
    ]
    assert sorted(calls, key=len) == [{"city": "Bern"}, {"a": 1, "b": 2}]


def test_a_reward_reads_what_arrow_gives(tmp_path):
    """As under verl: a column has all of its fields in each row."""
    asked = [{"role": "user", "content": "q"}]
    rows = [
        {"data_source": "s", "prompt": asked, "reward_model": {"ground_truth": "1"}, "extra_info": {name: "x"}}
        for name in ("a", "b")
    ]
    first, _ = read_problems(parquet(tmp_path / "rows.parquet", rows), Columns())
    assert first.extra == {"a": "x", "b": None}


# One type for each name, as arrow demands of a column.
TYPES = {
    "n": st.integers(-5, 5),
    "s": st.text("ab", max_size=3),
    "many": st.lists(st.integers(0, 9), max_size=3),
    "deep": st.fixed_dictionaries({}, optional={"x": st.booleans(), "y": st.text("xy", max_size=2)}),
    "list_of_deep": st.lists(
        st.fixed_dictionaries({"k": st.integers(0, 9)}, optional={"l": st.booleans()}), max_size=2
    ),
}
ARGUMENTS = st.fixed_dictionaries({"always": st.integers(0, 9)}, optional=TYPES)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(ARGUMENTS, min_size=1, max_size=4))
def test_json_lines_and_parquet_give_the_same_conversations(tmp_path, calls):
    # A struct without any field cannot be written as parquet.
    rows = [
        row(f"f{number}", {**each, "deep": {"x": True, **each.get("deep", {})}}) for number, each in enumerate(calls)
    ]
    expected = read_conversations(jsonl(tmp_path / "rows.jsonl", rows))
    assert read_conversations(parquet(tmp_path / "rows.parquet", rows)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_null_fields_go_and_nulls_of_lists_stay(value):
    def check(before, after):
        if isinstance(before, dict):
            assert list(after) == [name for name, field in before.items() if field is not None]
            for name, field in after.items():
                check(before[name], field)
        elif isinstance(before, list):
            assert len(before) == len(after)
            for one, other in zip(before, after, strict=True):
                check(one, other)
        else:
            assert after == before

    check(value, without_nulls(value))


def test_a_table_of_pandas_has_lists(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet(parquet(tmp_path / "rows.parquet", ROWS))
    packed = pack_rows(table)
    give(packed)
    assert read_conversations(packed.name) == read_conversations(jsonl(tmp_path / "rows.jsonl", ROWS))
