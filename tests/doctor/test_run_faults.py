"""Provoked faults of a run: rewards and ports."""

import socket

import pytest

from slipstream.commands.run_checks import check_run
from slipstream.commands.small_models.tiny_qwen3 import new_model

ENVIRONMENT = """
def tasks(split, num_tasks, seed):
    return [{{"prompt": f"{{split}} {{i}}", "answer": f"{{i}}"}} for i in range(num_tasks)]

def reward(task, completion):
    {body}
"""
RUN = """
model.path = "{model}"
environment = {{ name = "{environment}" }}
algorithm = {{ kind = "grpo", group_size = 4 }}
training = {{ steps = 1, prompts_per_batch = 4, learning_rate = 1e-3 }}
sampling.max_tokens = 8
evaluation = false
run.metrics_port = {port}
"""
REWARDS = {
    "nan": ("return float('nan')", "not finite"),
    "exception": ("raise KeyError('apple')", "apple"),
    "equal": ("return 1.0", "whatever the completion"),
    "right": ("return float(completion == task.answer)", ""),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)


def findings(model, folder, body, port=0):
    (folder / "environment.py").write_text(ENVIRONMENT.format(body=body))
    file = folder / "run.toml"
    file.write_text(RUN.format(model=model, environment=folder / "environment.py", port=port))
    return list(check_run(file))


@pytest.mark.real_start
@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_without_sense_is_named(kind, model, tmp_path):
    body, reason = REWARDS[kind]
    found = [each for each in findings(model, tmp_path, body) if each.check == "rewards"]
    if not reason:
        assert [each.verdict for each in found] == ["ok"]
        return
    assert {each.verdict for each in found} == {"fault"}
    assert any(reason in each.reason for each in found), found
    assert all("slipstream env test" in each.remedy for each in found)


def test_a_port_in_use_is_named(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = findings(model, tmp_path, REWARDS["right"][0], port)
    (each,) = (each for each in found if each.check == "ports")
    assert (each.verdict, f"127.0.0.1:{port}" in each.reason, "ss -ltnp" in each.remedy) == ("fault", True, True)
