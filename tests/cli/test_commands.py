"""The commands as a person types them: help, output, exit codes. Those that train are in tests/system."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.cli import commands, proof
from slipstream.cli.init_files import FILES
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch import run as launch_local
from slipstream.records import Rollout, Sequence
from slipstream.runlog import read_events, read_exit

ROOT = Path(__file__).parents[2]
COMMANDS = [
    *("init", "train", "sft", "eval", "compare", "plan", "runs", "report", "env", "env test", "model", "model new"),
    *("env new", "env push", "env pull", "chat", "serve-model", "export", "verify", "trace", "ledger", "replay"),
    *("smoke", "models", "mcp", "node", "submit", "status", "logs", "cancel"),
]
RUN_FILE = """
[model]
path = "{model}"
[environment]
name = "{environment}"
num_train_tasks = 64
[algorithm]
kind = "grpo"
[training]
steps = 2
[evaluation]
num_tasks = 32
"""
SFT = """
[model]
path = "{model}"
[algorithm]
kind = "sft"
[training]
steps = 2
"""
CONSTANT = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}", "answer": str(i)} for i in range(min(num_tasks, 20))]

def reward(task, completion):
    return 1.0
"""
WORDS = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}", "answer": f"word {7919 * i % 997}"} for i in range(min(num_tasks, 64))]

def reward(task, completion):
    return float(completion == task.answer)
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=32, num_layers=1)


@pytest.fixture
def run_file(model, tmp_path):
    path = tmp_path / "run.toml"
    (tmp_path / "words.py").write_text(WORDS)
    path.write_text(RUN_FILE.format(model=model, environment="words.py"))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help(slipstream, command):
    code, out, err = slipstream(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"slipstream {command}" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_a_shell(slipstream, tmp_path, monkeypatch, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = slipstream("--install-completion", "--shell", shell, "--output", tmp_path / "script")
    assert (code, err) == (0, "")
    assert "installed" in out
    script = (tmp_path / "script").read_text()
    assert all(command.split()[0] in script for command in COMMANDS)
    assert "intermediate-size" in script
    if shell == "bash":
        program = (
            "source ./script; COMP_WORDS=(slipstream model new --tok) COMP_CWORD=3; _slipstream; echo ${COMPREPLY[@]}"
        )
        result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert result.stdout.strip() == "--tokenizer"
        assert "script" in (tmp_path / ".bashrc").read_text()


def test_the_real_command_answers_without_heavy_imports():
    program = "import sys; sys.argv[1:] = ['--help']; from slipstream.cli import main; main()"
    report = "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; {report}; {program}"],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert result.stderr.strip() == "False"
    assert all(f"{command.split()[0]}" in result.stdout for command in COMMANDS)


def test_plan(slipstream, run_file):
    code, out, _ = slipstream("plan", run_file, "--json")
    plan = json.loads(out)
    assert code == 0
    assert "sampling.max_tokens" in json.dumps(plan)
    code, out, _ = slipstream("plan", run_file)
    assert code == 0
    assert "sampling.max_tokens" in out


def test_plan_says_what_was_left_out(slipstream, run_file):
    tight = ("--inference.max_model_len", "80", "--sampling.max_tokens", "8", "--evaluation", "false")
    code, out, _ = slipstream("plan", run_file, "--environment.name", "reasoning_gym/spell_backward", *tight)
    assert code == 0
    assert "(train_prompt_too_long)" in out


def test_plan_says_which_split_of_the_rows_is_held_out(slipstream, run_file, tmp_path):
    for split, rows in (("train", "abcdefgh"), ("test", "xyz")):
        (tmp_path / "data" / split).mkdir(parents=True)
        lines = (json.dumps({"question": f"{row}?", "answer": row}) + "\n" for row in rows)
        (tmp_path / "data" / split / "0.jsonl").write_text("".join(lines))
    settings = '{path = "data", eval_path = "data"}'
    common = ("--environment.name", "rows", "--environment.settings", settings)
    code, out, err = slipstream("plan", run_file, *common, "--evaluation.num_tasks", "3", "--json")
    assert code == 0, err
    notes = {note["name"]: note for note in json.loads(out)["notes"]}
    assert notes["held-out tasks"]["value"] == 3
    assert notes["held-out tasks"]["how"].startswith("split 'test' of ")
    code, out, _ = slipstream("plan", run_file, *common)
    assert "split 'test' of" in " ".join(out.split())
    assert "left out" not in out


def test_runs_lists_none(slipstream):
    assert slipstream("runs", "--json")[:2] == (0, "[]\n")
    assert slipstream("runs")[0] == 0


def test_report_needs_runs(slipstream, tmp_path):
    for arguments, message in (([], "needs a run folder"), ([str(tmp_path)], "holds no run")):
        code, _, err = slipstream("report", *arguments)
        assert code == 2
        assert message in err


def test_sft_on_a_file_of_conversations_then_runs(slipstream, model, run_file, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{letter}?"}, {"role": "assistant", "content": "!"}]}
        for letter in "ab"
    ]
    (tmp_path / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file.write_text(SFT.format(model=model))
    common = ("--no-evaluation", "--run.threads", "1", "--training.prompts_per_batch", "2", "--json")
    code, out, err = slipstream("sft", run_file, "--data", "messages.jsonl", "--run.folder", "runs/one", *common)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["steps"] == 2
    assert os.path.isfile(os.path.join(summary["weights"], "model.safetensors"))
    assert read_exit("runs/one").status == "finished"
    code, out, _ = slipstream("report", "runs/one", "--out", "one.html", "--json")
    assert (code, json.loads(out)) == (0, {"report": "one.html"})
    assert "</html>" in (tmp_path / "one.html").read_text(encoding="utf-8")
    code, out, _ = slipstream("runs", "--json")
    (listed,) = json.loads(out)
    assert (code, listed["name"], listed["status"], listed["step"]) == (0, "one", "finished", 2)
    code, out, _ = slipstream("runs")
    assert "finished" in out
    code, out, _ = slipstream("train", run_file, "--run.folder", "runs/one", "--resume", *common)
    assert code == 2
    assert read_exit("runs/one").status == "finished", "a refused resume leaves the record as it was"


def test_env_test_passes_on_a_reasoning_gym_task(slipstream, run_file):
    code, out, _ = slipstream(
        "env", "test", run_file, "--environment.name", "reasoning_gym/spell_backward", "--json", "--num-tasks", "16"
    )
    result = json.loads(out)
    assert code == 0
    assert {"gold"} <= {row["kind"] for row in result["results"]}
    assert result["failures"] == []


def test_env_test_needs_no_number_of_steps(slipstream, run_file):
    lines = [line for line in run_file.read_text().split("\n") if not line.startswith("steps")]
    run_file.write_text("\n".join(lines))
    assert slipstream("env", "test", run_file, "--num-tasks", "4")[0] == 0
    code, _, err = slipstream("plan", run_file)
    assert (code, err.startswith("error: training.steps is missing")) == (2, True)


def test_env_test_fails_on_an_environment_that_cannot_tell_right_from_wrong(slipstream, run_file, tmp_path):
    (tmp_path / "constant.py").write_text(CONSTANT)
    name = ("--environment.name", tmp_path / "constant.py")
    code, out, err = slipstream("env", "test", run_file, *name, "--num-tasks", "16", "--json")
    assert code == 4
    assert json.loads(out)["failures"]
    assert err.startswith("error: environment constant cannot be trained on: ")


def test_env_test_plays_gold_answers_of_several_turns(slipstream, run_file):
    name = ROOT / "examples/environments/calculator.py"
    command = ("env", "test", run_file, "--environment.name", name, "--num-tasks", "8", "--evaluation.threshold", "0.1")
    code, out, err = slipstream(*command, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["failures"], [note for note in result["notes"] if "tokenizer.json" not in note]) == ([], [])
    assert result["results"][0]["mean_reward"] == 1.0


def test_env_test_says_how_long_a_batch_of_slow_rewards_takes(slipstream, run_file, tmp_path):
    slow = CONSTANT.replace("return 1.0", "__import__('time').sleep(0.02); return float(completion == task.answer)")
    (tmp_path / "slow.py").write_text(slow)
    command = ("env", "test", run_file, "--environment.name", tmp_path / "slow.py", "--num-tasks", "4", "--json")
    many = ("--training.prompts-per-batch", "1000", "--environment.reward-workers")
    (alone,), (by_two,) = (json.loads(slipstream(*command, *many, str(n))[1])["notes"] for n in (1, 2))
    assert "environment.reward_workers = 1: a batch of 8000 takes" in alone
    assert "environment.reward_workers = 2" in by_two
    few = ("--training.prompts-per-batch", "2")  # however long the machine takes for it
    assert json.loads(slipstream(*command, *few)[1])["notes"] == []


def test_env_test_shows_no_number_for_what_was_not_graded(slipstream, run_file, tmp_path):
    """Answers of one character have no other order."""
    source = CONSTANT.replace("str(i)}", "'ab'[i % 2]}").replace("return 1.0", "return completion == task.answer")
    (tmp_path / "choice.py").write_text(source)
    command = ("env", "test", run_file, "--environment.name", tmp_path / "choice.py", "--num-tasks", "8")
    code, out, _ = slipstream(*command, "--json")
    shuffled = next(row for row in json.loads(out)["results"] if row["kind"] == "shuffled")
    assert (code, shuffled["num_scored"], shuffled["mean_reward"], shuffled["accuracy"]) == (0, 0, None, None)
    code, out, _ = slipstream(*command)
    row = next(line for line in out.splitlines() if line.startswith("shuffled"))
    assert (code, row.split()[1:]) == (0, ["-", "-", "0"])


ROW = '{"prompt": "%d", "completion": "%d"}\n'


@pytest.fixture
def sft_file(model, tmp_path):
    """Two steps of SFT on sixteen rows beside it."""
    (tmp_path / "rows.jsonl").write_text("".join(ROW % (i, i + 1) for i in range(16)))
    path = tmp_path / "sft.toml"
    path.write_text(SFT.format(model=model) + 'prompts_per_batch = 4\n[data]\npath = "rows.jsonl"\n')
    return path


def test_one_command_begins_continues_and_shows_a_run(slipstream, sft_file, tmp_path):
    command = ("sft", "sft.toml", "--run.folder", "runs/one", "--resume=auto", "--json")
    code, out, _ = slipstream(*command)
    first = json.loads(out)
    assert (code, first["steps"]) == (0, 2)
    events = tmp_path / "runs" / "one" / "events.jsonl"
    before = events.read_bytes()
    code, out, err = slipstream(*command)
    assert (code, json.loads(out)) == (0, {name: value for name, value in first.items() if name != "startup"})
    assert (err, events.read_bytes()) == ("", before), "nothing was started"
    code, out, _ = slipstream(*command, "--training.steps", "3")
    assert (code, json.loads(out)["steps"]) == (0, 3)
    code, out, _ = slipstream(*command[:-1], "--training.steps", "3")
    assert code == 0
    assert "step-000003" in out
    code, out, _ = slipstream(*command[:-2], "--resume", "--training.steps", "3")
    assert code == 2, "without auto a complete run is an error"
    code, _, err = slipstream("sft", "sft.toml", "--resume=auto")
    assert code == 2
    assert "--resume=auto needs the folder" in err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    code, _, err = slipstream("sft", "sft.toml", "--run.folder", "other", "--resume=auto")
    assert code == 2
    assert "is not empty" in err


def test_a_run_that_ended_early_is_complete_until_its_limits_change(slipstream, sft_file, tmp_path):
    sft_file.write_text(sft_file.read_text().replace("steps = 2", "epochs = 500"))
    command = ("sft", "sft.toml", "--run.folder", "runs/one", "--resume=auto", "--json", "--training.max_seconds")
    steps = [json.loads(slipstream(*command, seconds)[1])["steps"] for seconds in ("0.01", "0.01", "0.02")]
    assert 1 <= steps[0] < 2000
    assert steps[1] == steps[0] < steps[2] < 2000
    (tmp_path / "runs" / "one" / "exit.json").unlink()
    code, out, _ = slipstream(*command, "0.02")
    assert (code, json.loads(out)["steps"]) == (0, steps[2]), "it was killed before it could say so"


@pytest.mark.parametrize(
    ("gone", "is_made_again"),
    [
        (["exit.json"], False),
        pytest.param(["exit.json", "metrics.jsonl"], False, marks=pytest.mark.full),
        pytest.param(["exit.json", "checkpoints/step-000002"], True, marks=pytest.mark.full),
        pytest.param(["exit.json", "checkpoints/step-000002/manifest.json"], True, marks=pytest.mark.full),
        pytest.param(
            ["exit.json", *(f"checkpoints/step-00000{step}" for step in (1, 2))], True, marks=pytest.mark.full
        ),
    ],
)
def test_a_run_that_is_killed_at_its_end_ends_with_its_resume(slipstream, two_steps, tmp_path, gone, is_made_again):
    folder = tmp_path / "runs" / "two"
    for name in gone:
        (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name)
    before = len(read_events(folder))
    code, out, err = slipstream(*two_steps)
    assert (code, json.loads(out)["weights"]) == (0, str(folder / "checkpoints" / "step-000002" / "weights")), err
    report = read_exit(folder)
    assert (report.status, report.step) == ("finished", 2)
    assert is_made_again == ("start" in {event["kind"] for event in read_events(folder)[before:]})
    assert slipstream(*two_steps)[0] == 0


@pytest.fixture
def two_steps(slipstream, sft_file, tmp_path):
    """The command of a run that has made its two steps."""
    more = ("--run.checkpoint_every", "1", "--run.keep_checkpoints", "2")
    command = ("sft", "sft.toml", "--run.folder", str(tmp_path / "runs" / "two"), "--resume=auto", "--json", *more)
    assert slipstream(*command)[0] == 0
    return command


def played(rewards, *, group=4):
    """Rollouts of groups whose completions earn these rewards, in turn."""

    def sample(prepared, progress, num_tasks, group_size):
        assert (num_tasks, group_size) == (8, group)
        sequence = Sequence([1, 2, 3], [False, True, True])
        return [
            Rollout(f"{g}.{i}", f"t{g}", f"g{g}", [sequence], reward, "done", completion=f"{g} {i}")
            for g in range(num_tasks)
            for i, reward in enumerate(rewards)
        ]

    return sample


@pytest.fixture
def try_model(slipstream, run_file, monkeypatch):
    """`env test --model` on completions that earn these rewards."""
    command = ("env", "test", run_file, "--num-tasks", "8", "--model", "--samples", "4")

    def run(rewards, *options):
        monkeypatch.setattr("slipstream.commands.evaluate.sample_groups", played(rewards))
        return slipstream(*command, *options)

    return run


def test_env_test_with_the_model_says_whether_it_can_learn(try_model):
    code, out, _ = try_model((1.0, 0.0, 0.0, 0.0))
    assert code == 0
    assert "passed: the rewards of" in out
    assert re.search(r"pass@1 +25\.0 % \(95 % interval 25\.0 to 25\.0\)", out)
    assert "mean reward         0.25 (gold answers 1, junk 0" in out
    assert out.splitlines()[-1].startswith("ready for RL: pass@1 25 %, pass@4 100 %")
    code, out, _ = try_model((0.0,) * 4, "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["passed"]) == (0, "more SFT first", True)
    assert (found["model"]["pass_at_1"], found["model"]["group_size"]) == (0.0, 4)
    code, out, err = try_model((2.0, 0.0, 2.0, 2.0), "--json")
    assert (code, json.loads(out)["verdict"]) == (4, "reward broken")
    assert "more than the gold answers' 1" in err


def test_env_test_with_the_model_needs_no_gold_answers(try_model, tmp_path):
    source = CONSTANT.replace(', "answer": str(i)', "").replace("return 1.0", "return len(completion) / 9")
    (tmp_path / "poems.py").write_text(source)
    code, out, _ = try_model((1.0, 0.5, 0.0, 0.0), "--environment.name", tmp_path / "poems.py")
    assert code == 0
    assert "8 of 8 tasks have no gold answer" in out
    assert "ready for RL" in out


def test_env_test_does_not_try_the_model_on_a_broken_reward(slipstream, run_file, tmp_path):
    (tmp_path / "constant.py").write_text(CONSTANT)
    command = ("env", "test", run_file, "--environment.name", tmp_path / "constant.py", "--num-tasks", "8")
    code, out, _ = slipstream(*command, "--model", "--json")
    assert (code, json.loads(out)["verdict"]) == (4, "reward broken")
    assert "model" not in json.loads(out)


@pytest.mark.parametrize(
    ("options", "says"), [(("--samples", "4"), "needs --model"), (("--model", "--samples", "1"), "is less than 2")]
)
def test_env_test_refuses_samples_that_make_no_groups(slipstream, run_file, options, says):
    code, _, err = slipstream("env", "test", run_file, *options)
    assert code == 2
    assert says in err


def test_model_new(slipstream, tmp_path):
    shape = ("--hidden-size", "32", "--num-layers", "1", "--tokenizer", "byte")
    code, out, _ = slipstream("model", "new", "model", *shape, "--json")
    assert (code, json.loads(out)) == (0, {"folder": "model"})
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(("redirected", "code"), [(">/dev/full", 120), (">&-", 0), ("<&- >&- 2>&-", 0)])
def test_output_that_is_lost_is_no_success_and_none_at_all_is_no_failure(redirected, code):
    program = "from slipstream.processes.exits import leave; print('said'); leave(0)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {redirected}"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    how = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    ended = subprocess.run(["sh", "-c", command], env=buffered, **how)
    assert ended.returncode == code, ended.stderr
    assert ("error: the output cannot be written" in ended.stderr) == bool(code)
    assert "Traceback" not in ended.stderr


UMLAUTS = """
def tasks(split, num_tasks, seed, answers="ü", questions="Say {i}"):
    rows = [{"prompt": f"{split} " + questions.format(i=i), "answer": f"{answers}{i}"} for i in range(20)]
    return rows[:num_tasks]

def reward(task, completion):
    return float(completion == task.answer)
"""


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_characters_without_a_token_are_said_before_anything_is_trained_on_them(slipstream, run_file, tmp_path, kind):
    (tmp_path / "umlauts.py").write_text(UMLAUTS)
    common = (run_file, "--environment.name", tmp_path / "umlauts.py", "--algorithm.kind", kind)
    code, out, err = slipstream("plan", *common)
    assert code == 3
    assert "'ü' (U+00FC); first: task train/0)" in err
    assert f"{20 if kind == 'sft' else 40} of" in err
    code, out, err = slipstream("env", "test", *common, "--num-tasks", "8")
    assert code == 4
    assert "8 of 8" in err
    assert "'ü' (U+00FC)" in err
    prompts = ("--environment.settings.answers", "u", "--environment.settings.questions", "Säg {i}")
    code, out, err = slipstream("plan", *common, *prompts, "--json")
    assert code == 0, err
    (warning,) = (text for text in json.loads(out)["warnings"] if "tokenizer" in text)
    assert "of 40 prompts" in warning
    assert "'ä' (U+00E4)" in warning
    code, out, err = slipstream("env", "test", *common, *prompts, "--num-tasks", "8")
    assert code == 0, err
    assert "warning: 8 of 8 prompts" in out


def test_sft_on_rows_with_characters_without_a_token_names_the_row(slipstream, model, run_file, tmp_path):
    rows = [{"prompt": f"{i}?", "completion": "é" if i == 2 else "e"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    run_file.write_text(SFT.format(model=model))
    code, _, err = slipstream("sft", run_file, "--data", "rows.jsonl", "--no-evaluation", "--run.folder", "runs/one")
    assert code == 3
    assert "1 of 4 answers" in err
    assert "row 4 of" in err
    assert not (tmp_path / "runs").exists()


def test_env_test_says_when_there_is_no_model_to_look_into_yet(slipstream, run_file):
    code, out, err = slipstream("env", "test", run_file, "--model.path", "models/later", "--num-tasks", "8")
    assert code == 0, err
    assert "models/later has no tokenizer.json" in out


def test_init_writes_a_first_run_that_can_be_planned(slipstream, model, tmp_path, monkeypatch):
    code, out, err = slipstream("init", "first")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["environment.py", "rl.toml", "sft.toml"]
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("slipstream ")]
    assert ["slipstream", "sft", "sft.toml", "--run.folder", "runs/sft"] in commands
    monkeypatch.chdir(tmp_path / "first")
    for name in ("sft.toml", "rl.toml"):
        code, out, err = slipstream("plan", name, "--model.path", model, "--environment.num_train_tasks", "64")
        assert code == 0, err
    code, out, err = slipstream("env", "test", "sft.toml", "--num-tasks", "16")
    assert code == 0, err
    assert "passed: the rewards of environment tell" in out
    monkeypatch.chdir(tmp_path)
    code, _, err = slipstream("init", "first")
    assert code == 2
    assert "give a new one" in err
    assert slipstream("init", "second", "--json")[0] == 0


def test_the_first_run_is_the_tutorials():
    """So that the figures that its files promise are those that the tutorial's test sees."""
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^# (\S+)\n(.*?)^```$", tutorial, re.DOTALL | re.MULTILINE))
    for name in ("sft.toml", "rl.toml"):
        assert tomllib.loads(FILES[name]) == tomllib.loads(blocks[name])

    def made(text):
        names = {}
        exec(text, names)  # ours
        return names["tasks"]("eval", 50, 3), names["reward"](SimpleNamespace(answer="123"), "132")

    assert made(FILES["environment.py"]) == made(blocks["environment.py"])


def test_help_names_commands_that_there_are(slipstream):
    _, out, _ = slipstream("--help")
    shown = [line.split()[1] for line in out.replace("│", " ").splitlines() if line.split()[:1] == ["slipstream"]]
    assert {"init", "model", "env", "plan", "sft", "export", "train", "report", "chat"} <= set(shown)


def test_the_package_is_the_command_as_well():
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "--version"], capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()


def test_commands_take_text_for_paths(model, run_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a?", "completion": "a!"}) + "\n")
    run_file.write_text(SFT.format(model=model))
    settings = ("--no-evaluation", "--data.path", "rows.jsonl", "--training.prompts_per_batch", "1")
    run = ("--run.threads", "1", "--run.folder", "runs/one")
    assert commands.plan("run.toml", *settings) == 0
    assert commands.train("run.toml", *settings, *run, json=True) == 0
    assert commands.runs("runs") == 0
    assert commands.report("runs/one", out="one.html") == 0
    assert commands.export("runs/one", "exported") == 0
    assert commands.model_new("made", hidden_size=32, num_layers=1) == 0
    assert commands.init("first") == 0
    assert proof.verify("runs/one") == 0
    with pytest.raises(ConfigError, match="kept no sample"):
        proof.trace("runs/one", "0.0.0")


def test_a_wished_stop_is_no_error(slipstream, monkeypatch, run_file):
    def stop(*_, **__):
        raise Interrupted("stopped at step 9 of 16: continue with --resume")

    monkeypatch.setattr(launch_local, "train", stop)
    code, _, err = slipstream("train", run_file)
    assert code == 130
    assert err.startswith("stopped at step 9 of 16")


def test_only_cross_entropy_is_in_nats_a_token(tmp_path):
    rows = [{"time": 0.0, "lineage": 0, "step": step, "eval/loss": loss} for step, loss in ((0, 0.5), (2, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert commands._loss_line(tmp_path) == "eval loss:  0.4000 nats a token, 0.5000 at step 0"
    (tmp_path / "resolved.toml").write_text('[preferences]\nloss = "kto"\n')
    assert commands._loss_line(tmp_path) == "eval loss:  0.4000, 0.5000 at step 0"
