"""Where `rows` and Python callers take rows from: several files, tasks by name, verl's columns, data sets of
`datasets`."""

import json

import datasets
import pytest
from test_rows import verl

from slipstream.config import load_config
from slipstream.config.python_objects import give
from slipstream.envs.from_python import load_python_environment, pack_environment
from slipstream.envs.rows import Rows
from slipstream.errors import ConfigError, DataError


@pytest.fixture
def write(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def made(tasks, **more):
    packed = pack_environment(tasks, **more)
    give(packed)
    return load_python_environment(packed.name, 0, {})


def test_a_list_of_files_is_read_in_order(write):
    paths = [write("a.jsonl", [verl(1)]), write("b.jsonl", [{"question": "Why?", "answer": "so"}])]
    environment = Rows(0, {"path": paths, "eval_path": [write("c.jsonl", [verl(7)])]})
    found = environment.tasks("train", 9)
    assert [(task.id, task.answer) for task in found] == [("path/0/0", "2"), ("path/1/0", "so")]
    assert [task.id for task in environment.tasks("eval", 9)] == ["eval_path/0/0"]
    assert environment.eval_source.endswith("c.jsonl")
    assert "task" not in found[0].info


def test_a_table_of_files_names_tasks(write):
    paths = {"math": write("a.jsonl", [verl(n) for n in range(60)]), "trivia": write("b.jsonl", [verl(99)])}
    environment = Rows(0, {"path": paths})
    found = environment.tasks("train", 99)
    assert {task.id.split("/")[0] for task in found} == {"math", "trivia"}
    assert {task.info["task"] for task in found} == {"math", "trivia"}
    assert len({task.id for task in found}) == len(found)
    assert environment.eval_source == f"one question in ten of {paths['math']}, {paths['trivia']}, by its text"
    held_out = Rows(0, {"path": paths["math"], "eval_path": {"other": paths["trivia"]}}).tasks("eval", 9)
    assert [(task.id, task.info["task"]) for task in held_out] == [("other/eval_path/0", "other")]


def test_a_folder_in_a_list_holds_out_its_test_split(write, tmp_path):
    for split, n in (("train", 1), ("test", 5)):
        write(f"data/{split}.jsonl", [verl(n)])
    other = write("b.jsonl", [verl(9)])
    environment = Rows(0, {"path": [str(tmp_path / "data"), other], "eval_path": [str(tmp_path / "data")]})
    assert [task.answer for task in environment.tasks("train", 9)] == ["2", "10"]
    assert [task.answer for task in environment.tasks("eval", 9)] == ["6"]
    assert environment.eval_source == f"split 'test' of {tmp_path / 'data'}"


@pytest.mark.parametrize("path", [[], {}, [3], {"a": ""}, 7, [""]])
def test_what_is_no_path(path):
    with pytest.raises(ConfigError, match=r"environment.settings.path = .* is no path: give a text, a list of texts"):
        Rows(0, {"path": path})


def test_a_file_that_is_missing_is_named_with_its_place(write, tmp_path):
    paths = {"math": write("a.jsonl", [verl(1)]), "code": str(tmp_path / "no.jsonl")}
    with pytest.raises(DataError, match=r"no.jsonl cannot be read .*: correct environment.settings.path.code"):
        Rows(0, {"path": paths}).tasks("train", 1)


def test_paths_are_found_beside_the_run_file(write, tmp_path):
    write("sub/a.jsonl", [verl(1)])
    write("sub/b.jsonl", [verl(2)])
    (tmp_path / "sub" / "f.py").write_text(
        "def style(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    text = """
        [model]
        path = "m"
        [environment]
        name = "rows"
        [environment.settings]
        path = { one = "a.jsonl", two = "b.jsonl" }
        eval_path = ["b.jsonl"]
        rubric = [{ reward = "f.py:style", name = "f.py" }, { reward = "trl:f.py:style" }, "number"]
        [algorithm]
        kind = "grpo"
        [training]
        steps = 1
    """
    (tmp_path / "sub" / "run.toml").write_text(text)
    settings = load_config(tmp_path / "sub" / "run.toml").config.environment.settings
    here = tmp_path / "sub"
    assert settings["path"] == {"one": str(here / "a.jsonl"), "two": str(here / "b.jsonl")}
    assert settings["eval_path"] == [str(here / "b.jsonl")]
    assert [part["reward"] for part in settings["rubric"]] == [f"{here}/f.py:style", f"trl:{here}/f.py:style", "number"]
    assert settings["rubric"][0]["name"] == "f.py"


def test_columns_of_verl_as_text_and_with_types_that_differ(write):
    rows = [
        verl(1, reward_model=json.dumps({"style": "rule", "ground_truth": "2"}), extra_info=json.dumps({"index": 1})),
        verl(
            2, reward_model=repr({"style": "rule", "ground_truth": "3"}), extra_info=repr({"index": None, "x": (1, 2)})
        ),
        verl(3, extra_info=None),
        verl(4, reward_model={"style": "rule", "ground_truth": ["5", "five"]}, extra_info={"index": "four"}),
        verl(5, reward_model={"style": "rule", "ground_truth": 6}),
    ]
    found = Rows(0, {"path": write("a.jsonl", rows), "eval_path": write("b.jsonl", rows)}).tasks("train", 9)
    assert [task.info["ground_truth"] for task in found] == ["2", "3", "4", ["5", "five"], 6]
    assert [task.info["extra_info"] for task in found][:3] == [{"index": 1}, {"index": None, "x": (1, 2)}, {}]
    assert [task.answer for task in found] == ["2", "3", "4", "5", "6"]


def test_an_unknown_source_is_named_in_each_file_held_out_ones_too(write):
    known, unknown = write("a.jsonl", [verl(1)]), write("b.jsonl", [verl(2), verl(3, "lighteval/MATH")])
    environment = Rows(0, {"path": [known], "eval_path": {"new": unknown}, "reward": {"openai": "number"}})
    assert len(environment.tasks("train", 9)) == 1
    with pytest.raises(DataError, match=r"row 2 of .*b.jsonl: data_source = 'lighteval/MATH' has no reward"):
        environment.tasks("eval", 1)


def test_rewards_that_give_numbers_and_dictionaries_in_one_run(write, tmp_path):
    (tmp_path / "f.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return right if extra_info['index'] % 2 else {'score': right, 'acc': bool(right), 'pred': solution_str}\n"
    )
    rows = [verl(n) for n in range(40)]
    environment = Rows(0, {"path": write("a.jsonl", rows), "reward": f"{tmp_path / 'f.py'}"})
    scores = [environment.score(task, task.answer) for task in environment.tasks("train", 40)]
    assert {score.reward for score in scores} == {1.0}
    assert [score.metrics for score in scores[:4]] == [
        {"acc": 1.0} if index % 2 == 0 else {}
        for index in (task.info["extra_info"]["index"] for task in environment.tasks("train", 4))
    ]


def test_data_sets_of_a_python_caller():
    plain = datasets.Dataset.from_list([{"question": f"{n}?", "answer": str(n), "level": n % 3} for n in range(40)])
    environment = made(plain, reward="number")
    found = environment.tasks("train", 99) + environment.tasks("eval", 99)
    assert len(found) == 40
    assert found[0].info == {"level": int(found[0].answer) % 3}
    splits = datasets.DatasetDict({"train": plain.select(range(9)), "validation": plain.select(range(9, 12))})
    environment = made(splits, reward="number")
    assert (len(environment.tasks("train", 99)), len(environment.tasks("eval", 99))) == (9, 3)
    with pytest.raises(ConfigError, match="tasks has the splits a, b and no train"):
        made(datasets.DatasetDict({"a": plain, "b": plain}), reward="number")


def test_rows_of_verl_from_a_python_caller(tmp_path):
    (tmp_path / "f.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': right, 'index': extra_info['index'], 'n': len(data_source)}\n"
    )
    rows = datasets.Dataset.from_list([verl(n) for n in range(20)])
    environment = made(rows, reward=f"{tmp_path / 'f.py'}:compute_score")
    task = environment.tasks("train", 1)[0]
    index = task.info["extra_info"]["index"]
    assert environment.score(task, str(index + 1)).metrics == {"index": index, "n": 12.0}
    assert environment.score(task, str(index + 1)).reward == 1.0
    bad = [verl(1), verl(2, reward_model="broken")]
    with pytest.raises(DataError, match="train task 1 of tasks: reward_model = 'broken' is not a dictionary"):
        pack_environment(bad, reward="number")
