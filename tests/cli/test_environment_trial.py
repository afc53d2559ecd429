"""`env test --model` on a mixture: what the model made of each part is judged by that part's own gold answers."""

from types import SimpleNamespace

from slipstream.cli import env_commands
from slipstream.commands.environment_check import Checked
from slipstream.envs.check import EnvironmentCheck, KindResult
from slipstream.records import Rollout
from slipstream.view import NullView


def test_each_part_and_source_has_a_verdict_of_its_own(monkeypatch, capsys):
    asked = []

    def sample(prepared, progress, num_tasks, group_size):
        asked.append((num_tasks, group_size))
        rewards = {"easy": (1.0, 1.0), "odd/x": (0.5, 0.4)}
        return [
            Rollout(f"{source}.{group}.{n}", "t", f"{source}.{group}", [], reward, "done", source=source)
            for source, pair in rewards.items()
            for group in range(3)
            for n, reward in enumerate(pair)
        ]

    monkeypatch.setattr("slipstream.launch.prepare.prepare", lambda loaded: loaded)
    monkeypatch.setattr("slipstream.commands.evaluate.sample_groups", sample)
    section = SimpleNamespace(mixture={"easy": None, "odd": None})
    loaded = SimpleNamespace(config=SimpleNamespace(algorithm=None, environment=section))
    golds = [KindResult("gold", [1.0], 1.0, part="easy"), KindResult("gold", [0.1], 1.0, part="odd")]
    checked = Checked(EnvironmentCheck("m", 2, 1.0, golds, []), [], [], 1.0)
    trial = env_commands._try_model(loaded, 3, 2, checked, NullView())
    assert asked == [(6, 2)], "three tasks of each part"
    verdicts = {task: judgement.verdict for task, (_, judgement) in trial.by_task.items()}
    assert verdicts == {"easy": "task too easy", "odd/x": "reward broken"}
    assert trial.judgement.verdict == "reward broken"
    assert trial.judgement.text.startswith("odd/x: ")
    env_commands._print_trial(trial, checked)
    assert "odd/x: reward broken: " in capsys.readouterr().out
