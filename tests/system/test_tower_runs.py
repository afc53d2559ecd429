"""A model that reads images, in runs with real vLLM, trained on text and, tower included, on images: every update
proves decoder and tower."""

import json
import os
import runpy

import pytest
from safetensors.torch import load_file

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.batches import read_batch
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder
from tests.engine.architectures import ARCHITECTURES

from .test_vision_examples import EXAMPLES

pytestmark = pytest.mark.engine


@pytest.fixture
def images(tmp_path, monkeypatch):
    """The folder of such a model, and an environment in which vLLM can load it."""
    architecture = ARCHITECTURES["vision"]
    if missing := architecture.missing():
        pytest.skip(missing)
    path = [*architecture.path(), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return architecture.build(tmp_path / "model", "float32")


@pytest.mark.full
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("bridge", ["disk", "broadcast", "single_copy", "restart"])
def test_a_trained_tower_reaches_the_engine(bridge, delta, command, images, tmp_path):
    """The engine's last fingerprints are those of the checkpoint's files, whose tower has moved."""
    if delta and bridge in ("single_copy", "restart"):
        pytest.skip("there is no delta of these")
    model = new_vision_model(tmp_path / "new", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    runpy.run_path(str(EXAMPLES / "rectangles.py"))["write"](tmp_path / "rows", 40)
    folder = tmp_path / "run"
    where = ("--model.path", model, "--data.path", tmp_path / "rows/rows.jsonl", "--run.folder", folder)
    size = ("--training.steps", "2", "--training.prompts_per_batch", "8", "--training.warmup_steps", "0")
    # In bfloat16 such a step changes few elements, so that a delta is worth sending.
    small = ("--model.dtype", "bfloat16", "--training.learning_rate", "2e-5", "--training.schedule", "constant")
    often = ("--evaluation.num_tasks", "8", "--evaluation.every", "1")
    how = ("--weights.bridge", bridge, *(("--weights.delta", "true") if delta else ()))
    command("sft", EXAMPLES / "sft.toml", *where, *size, *small, *often, *how).ok(400)
    assert read_exit(folder).status == "finished"
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 1, 2]
    applied = [event for event in read_events(folder) if event["kind"] == "apply"]
    assert len({event["digest"] for event in applied}) == 3
    assert (applied[-1]["num_bytes"] < applied[0]["num_bytes"]) == delta
    weights = folder / "checkpoints/step-000002/weights"
    assert applied[-1]["digest"] == digest(describe(read_model_folder(weights)))
    before, after = (load_file(path / "model.safetensors") for path in (model, weights))
    for name, tensor in before.items():
        if tensor.ndim > 1:
            assert not after[name].equal(tensor.bfloat16()), name


COINS = """
import importlib.util

spec = importlib.util.spec_from_file_location("rectangles", {path!r})
rectangles = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rectangles)
tasks = rectangles.tasks


def reward(task, completion):
    return float(sum(map(ord, completion)) % 2)
"""


SMALL = (
    *("--training.steps", "3", "--training.prompts_per_batch", "4", "--algorithm.group_size", "4"),
    *("--environment.num_train_tasks", "12", "--evaluation.num_tasks", "8", "--sampling.max_tokens", "8"),
    *("--training.learning_rate", "1e-2", "--training.warmup_steps", "0"),
)


@pytest.fixture
def drawn(images, tmp_path):
    """Where a run with images is: a new model, drawn questions whose rewards differ, and its folder."""
    model = new_vision_model(tmp_path / "new", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    (tmp_path / "coins.py").write_text(COINS.format(path=str(EXAMPLES / "rectangles.py")))
    return ("--model.path", model, "--environment.name", tmp_path / "coins.py", "--run.folder", tmp_path / "run")


LOOKS = """
import base64

import openai

from slipstream.data.images.reading import bytes_of


async def solve(task, policy):
    image = base64.b64encode(bytes_of(task.prompt[-1].media[0])).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model=policy.model, messages=messages)
            said = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And its colour?"}]
    return said
"""


@pytest.mark.servers
def test_an_agent_looks_at_the_images_of_its_tasks(command, drawn, tmp_path):
    """The trainer's log-probabilities, of a trained tower, are the engine's."""
    (tmp_path / "looks.py").write_text(LOOKS)
    model, folder = drawn[1], drawn[-1]
    settings = {
        "callable": str(tmp_path / "looks.py:solve"),
        "tasks": str(EXAMPLES / "rectangles.py:tasks"),
        "reward": str(tmp_path / "coins.py:reward"),
    }
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    where = ("--model.path", model, "--environment.name", "agent", "--environment.settings", f"{{{table}}}")
    how = ("--run.folder", folder, "--model.train_tower", "true")
    command("train", EXAMPLES / "grpo.toml", *where, *SMALL, *how).ok(400)
    rows = read_metrics(folder)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/abs_logprob_diff"] for row in rows) < 1e-3
    assert all((row["reward/agent_requests"], row["reward/agent_undelivered"]) == (2, 0) for row in rows)
    assert min(row["reward/agent_rows"] for row in rows) < 2, "a turn continues the one before it"
    rollouts = [rollout for step in range(3) for rollout in read_batch(folder, step)[0].rollouts]
    assert {len(sequence.media) for rollout in rollouts for sequence in rollout.sequences} == {1}


@pytest.mark.full
@pytest.mark.parametrize("bridge", ["lora", "disk"])
def test_an_adapter_of_the_tower_reaches_the_engine(bridge, command, drawn, tmp_path):
    """With a KL term, so that the model without the adapter reads the same images too; then evaluated and merged."""
    model, folder = drawn[1], drawn[-1]
    how = ("--lora.rank", "4", "--model.train_tower", "true", "--weights.bridge", bridge, "--algorithm.kl_coef", "0.01")
    command("train", EXAMPLES / "grpo.toml", *drawn, *SMALL, *how).ok(400)
    rows = read_metrics(folder)
    assert all(row["probe/abs_logprob_diff"] < 1e-3 for row in rows if "probe/abs_logprob_diff" in row)
    assert rows[-1]["train/kl_reference"] > 0
    adapter = load_file(folder / "checkpoints/step-000003/weights/adapter_model.safetensors")
    moved = [name for name, tensor in adapter.items() if "visual" in name and "lora_B" in name and tensor.any()]
    assert any("blocks" in name for name in moved)
    assert any("merger" in name for name in moved)
    out = command("eval", folder, "--evaluation.num_tasks", "8").ok(400)
    assert "accuracy" in out
    command("export", folder, tmp_path / "merged", "--merged").ok(400)
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "merged"))
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name].to(tensor.dtype))}
    assert len(changed) == len(adapter) // 2
