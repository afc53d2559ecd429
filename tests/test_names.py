import pytest

from slipstream.names import model_name, task_namer


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/home/a/.cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "Qwen/Qwen3-8B"),
        ("../../runs/quickstart/sft/checkpoints/step-000330/weights", "sft step 330"),
        ("/runs/rl/checkpoints/step-000040", "rl step 40"),
        ("runs/rl", "runs/rl"),
        ("/runs/rl", "rl"),
        ("models/after-sft", "models/after-sft"),
        ("/data/my-run/weights", "my-run"),
        ("/data/llama/checkpoint-100", "llama/checkpoint-100"),
        ("/data/llama/merged/", "llama/merged"),
        ("weights", "weights"),
        ("/", "/"),
    ],
)
def test_a_model_has_a_name_that_people_know(path, name):
    assert model_name(path) == name


def test_tasks_of_rows_are_called_after_their_files():
    named = task_namer({"path": ["a/d.jsonl", "e.parquet"], "eval_path": {"other": "x/t.jsonl"}})
    ids = ["path/0/11", "path/1/2", "other/eval_path/3", "path/7/1", "train/4", "x"]
    assert [*map(named, ids)] == ["d.jsonl/11", "e.parquet/2", "t.jsonl/3", "path/7/1", "train/4", "x"]
    assert task_namer({"path": "d.jsonl"})("path/11") == "d.jsonl/11"
