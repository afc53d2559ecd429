"""Rows from every format that people have, and what is said of broken ones; `datasets` writes, we read."""

import datetime
import json
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.problems import read_problems

from slipstream.data.conversations import Columns, read_conversations, value_at
from slipstream.data.files.folders import held_out_split
from slipstream.data.readers import Row, read_rows
from slipstream.errors import DataError
from slipstream.records import Message

ROWS = [{"prompt": f"q{n}", "completion": f"a{n}", "n": n} for n in range(5)]
SAID = [(Message("user", f"q{n}"), Message("assistant", f"a{n}")) for n in range(5)]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_save_to_disk(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    assert read_conversations(tmp_path / "one") == SAID
    data.select([3, 1]).save_to_disk(tmp_path / "chosen")
    assert read_conversations(tmp_path / "chosen") == [SAID[3], SAID[1]]
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "two")
    assert read_conversations(tmp_path / "two") == SAID
    assert read_conversations(tmp_path / "two", split="test") == SAID[:1]
    with pytest.raises(DataError, match="has no split 'dev', only 'train', 'test'"):
        read_conversations(tmp_path / "two", split="dev")
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow is missing, which .*state.json lists"):
        read_rows(tmp_path / "one")


def test_a_data_set_repository(tmp_path):
    for number, rows in enumerate((ROWS[:2], ROWS[2:])):
        write(tmp_path / "repo" / "data" / f"train-0000{number}-of-00002.parquet", rows)
    write(tmp_path / "repo" / "data" / "validation-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "repo" / "README.md").touch()
    assert read_conversations(tmp_path / "repo") == SAID
    assert len(read_rows(tmp_path / "repo", "validation")) == 1
    write(tmp_path / "folders" / "train" / "0.jsonl", ROWS)
    write(tmp_path / "folders" / "test" / "0.jsonl", ROWS[:1])
    assert len(read_rows(tmp_path / "folders")) == 5
    assert len(read_rows(tmp_path / "folders", "test")) == 1
    write(tmp_path / "plain" / "a.parquet", ROWS)
    assert len(read_rows(tmp_path / "plain")) == 5
    write(tmp_path / "plain" / "b.jsonl", ROWS)
    with pytest.raises(DataError, match="holds both parquet and JSON"):
        read_rows(tmp_path / "plain")


def test_a_missing_file_of_a_split_is_named(tmp_path):
    for number in (0, 2):
        write(tmp_path / f"train-{number:05}-of-00003.parquet", ROWS)
    write(tmp_path / "test-00000-of-00001.parquet", ROWS[:2])
    with pytest.raises(DataError, match="lacks train-00001-of-00003"):
        read_rows(tmp_path)
    assert len(read_rows(tmp_path, "test")) == 2
    write(tmp_path / "train-00001-of-00003.parquet", ROWS)
    assert len(read_rows(tmp_path)) == 3 * len(ROWS)


def test_splits_of_longer_names_are_not_pooled(tmp_path):
    for place, split in enumerate(("train_sft", "train_gen", "test_sft")):
        write(tmp_path / "data" / f"{split}-00000-of-00001.parquet", ROWS[: place + 1])
    with pytest.raises(DataError, match="'train_gen', 'train_sft'"):
        read_rows(tmp_path)
    assert [len(read_rows(tmp_path, name)) for name in ("train_sft", "train_gen", "test_sft")] == [1, 2, 3]


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(DataError, match="git lfs pull"):
        read_rows(path)


def test_columns_of_one_name_are_refused(tmp_path):
    """The last one would win."""
    columns = [pa.array(["q"]), pa.array(["a"]), pa.array(["other"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "completion", "completion"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns of the name completion"):
        read_conversations(tmp_path / "a.parquet")


def test_columns_by_their_usual_names_or_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "q0", "answer": "a0"}])
    assert read_conversations(path) == SAID[:1]
    rows = [{"prompt": "wrong", "deep": {"ask": "q0"}, "say": "a0"}]
    path = write(tmp_path / "named.jsonl", rows)
    assert read_conversations(path, Columns(prompt="deep.ask", answer="say")) == SAID[:1]
    with pytest.raises(DataError, match=r"has no column 'answer': it has ask"):
        read_conversations(path, Columns(prompt="deep.answer", answer="say"))
    with pytest.raises(DataError, match="no row has the column 'tell': there are deep, prompt, say"):
        read_conversations(path, Columns(prompt="prompt", answer="tell"))


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "1 + 1 = 2"},
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("text", [None, json.dumps, repr], ids=["nested", "JSON", "repr"])
def test_verl_rows(tmp_path, name, text):
    row = dict(VERL)
    if text is not None:
        row |= {key: text(row[key]) for key in ("reward_model", "extra_info")}
    (problem,) = read_problems(write(tmp_path / name, [row]), Columns(gold="extra_info.answer"))
    assert problem.prompt == (Message("user", "1 + 1?"),)
    assert (problem.answer, problem.gold, problem.source) == ("2", "1 + 1 = 2", "openai/gsm8k")
    assert problem.extra == VERL["extra_info"]


def test_nested_columns_whose_types_differ_from_row_to_row(tmp_path):
    rows = [{**VERL, "reward_model": {"ground_truth": truth}} for truth in ("2", {"target": ["a"]}, [1, 2], 3.5)]
    problems = read_problems(write(tmp_path / "rows.jsonl", rows), Columns())
    assert [problem.answer for problem in problems] == ["2", {"target": ["a"]}, [1, 2], 3.5]


def test_an_absent_or_null_extra_info_is_an_empty_one(tmp_path):
    rows = [{**VERL, "extra_info": None}, {key: value for key, value in VERL.items() if key != "extra_info"}]
    assert [p.extra for p in read_problems(write(tmp_path / "rows.jsonl", rows), Columns())] == [{}, {}]


def test_conversations_as_problems(tmp_path):
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    (problem,) = read_problems(write(tmp_path / "rows.jsonl", [{"messages": messages}]), Columns())
    assert ([turn.content for turn in problem.prompt], problem.answer) == (["u", "a", "u"], "a")


def test_what_a_reward_worker_cannot_be_sent_is_named(tmp_path):
    row = {**VERL, "extra_info": {"day": datetime.date(2026, 1, 1)}}
    with pytest.raises(DataError, match=r"row 1 of .*: extra_info.day is a date"):
        read_problems(write(tmp_path / "rows.parquet", [row]), Columns())


def test_a_missing_number_of_pandas_is_named(tmp_path):
    path = write(tmp_path / "rows.parquet", [{"prompt": "q", "answer": 1.0}, {"prompt": "r", "answer": float("nan")}])
    with pytest.raises(DataError, match=r"row 2 of .*: answer is nan"):
        read_problems(path, Columns())


def test_value_at():
    row = Row("row 1", {"a.b": 1, "a": {"b": 2, "c": {"d": 3}}})
    assert [value_at(row, name) for name in ("a.b", "a.c.d")] == [1, 3]


def test_the_split_that_is_meant_for_tests(tmp_path):
    meant = {"train test validation": "test", "train valid": "validation", "train": "", "test": "", "a eval": "eval"}
    for names, found in meant.items():
        folder = tmp_path / names.replace(" ", "_")
        for name in names.split():
            write(folder / name / "0.jsonl", ROWS)
        assert held_out_split(folder) == found
    saved = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": saved, "dev": saved}).save_to_disk(tmp_path / "saved")
    assert held_out_split(tmp_path / "saved") == "dev"
    assert held_out_split(tmp_path / "train_test_validation", but="test") == "validation"


@pytest.fixture
def hub(monkeypatch):
    """What the hub answers, `hub(answer)`: an exception, or that it has the data set."""

    def set_answer(answer):
        def dataset_info(name, timeout):
            if isinstance(answer, Exception):
                raise answer

        monkeypatch.setattr(huggingface_hub, "dataset_info", dataset_info)

    return set_answer


def test_a_data_set_on_the_hub(tmp_path, monkeypatch, hub):
    """The library reads a local repository in the place of the hub's; nothing is downloaded."""
    write(tmp_path / "repo" / "train-0.parquet", ROWS)
    write(tmp_path / "repo" / "test-0.parquet", ROWS[:2])
    asked, load = [], datasets.load_dataset

    def load_dataset(name, subset):
        asked.append((name, subset))
        return load(str(tmp_path / "repo"), cache_dir=str(tmp_path / "cache"))

    hub(None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_conversations("org/name") == SAID
    assert read_conversations("org/name", split="test", subset="main") == SAID[:2]
    assert asked == [("org/name", None), ("org/name", "main")]
    assert read_rows("org/name")[1].where == "row 2 of org/name (train)"
    with pytest.raises(DataError, match="org/name has no split 'dev', only 'train', 'test'"):
        read_rows("org/name", "dev")


def test_without_a_network_the_cache_is_read(tmp_path, monkeypatch, hub):
    write(tmp_path / "repo" / "train-0.parquet", ROWS)
    made = datasets.load_dataset(str(tmp_path / "repo"), cache_dir=str(tmp_path / "made"))
    (file,) = (Path(entry["filename"]) for entry in made["train"].cache_files)
    cached = tmp_path / "cache" / "org___name" / "default" / "0.0.0" / "0123456789abcdef"
    cached.mkdir(parents=True)
    shutil.copy(file, cached / "name-train.arrow")
    info = json.loads((file.parent / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default", "dataset_name": "name"}))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    hub(ConnectionError("no network"))
    assert read_conversations("org/name") == SAID
    assert datasets.config.HF_HUB_OFFLINE is False
    with pytest.raises(DataError) as error:
        read_rows("org/other")
    assert str(error.value) == (
        "data.path = org/other is no file or folder here, and no data set that the hub or this machine's cache gives "
        "(the hub cannot be asked: ConnectionError): correct it, or where there is no network download the data set "
        "elsewhere and give its folder"
    )
