"""What people get wrong, one case a line: each is one sentence with the value, the reason and a remedy, and leaves
nothing behind. The commands run in this process, up to where an engine would be started."""

from __future__ import annotations

import json
import re
import shutil

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.cli import main
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.runlog import RunLog

ROWS = [{"prompt": f"say {n}", "completion": f"{n}"} for n in range(40)]
FILES = {
    "good.py": "def tasks(split, num_tasks, seed):\n"
    "    return [{'prompt': f'{split} {n}', 'answer': str(n)} for n in range(min(num_tasks, 9))]\n"
    "def reward(task, completion):\n    return 1.0\n",
    "score.py": "def compute_score(solution):\n    return 1.0\n",
}
TASKS = {
    "none": "return None",
    "raises": "raise KeyError('lost')",
    "long": "return [{'prompt': split + 'x' * 999, 'answer': '5'}]",
}
FILES |= {
    f"tasks_{name}.py": f"def tasks(split, num_tasks, seed):\n    {body}\ndef reward(task, completion): return 1\n"
    for name, body in TASKS.items()
}
DATA = {
    "question_only.jsonl": b'{"messages": [{"role": "user", "content": "x"}]}\n',
    "long.jsonl": b'{"prompt": "%s", "completion": "x"}\n' % (b"x" * 9999),
}
MODEL, ONE_SFT = '[model]\npath = "model"\n', '[algorithm]\nkind = "sft"\n[training]\nsteps = 2\n'
FROM_FILE = f'{MODEL}[data]\npath = "rows.jsonl"\n'
RUN_FILES = {
    "sft.toml": FROM_FILE + ONE_SFT,
    "grpo.toml": f'{MODEL}[environment]\nname = "good.py"\n{ONE_SFT.replace("sft", "grpo")}',
    "rows.toml": f'{MODEL}[environment]\nname = "rows"\nsettings = {{ path = "rows.jsonl" }}\n'
    + ONE_SFT.replace("sft", "grpo"),
    "syntax.toml": "[model\n",
    "no_source.toml": MODEL + ONE_SFT,
}

CONFIG = [
    ("plan syntax.toml", 2, "syntax.toml is not valid TOML: .*line 1"),
    ("plan no_source.toml", 2, "nothing to train on: set environment.name or data.path"),
    ("plan grpo.toml --algorithm.loss clipp", 2, r"algorithm.loss = 'clipp' is neither built in nor .*: did you mean"),
    ("plan grpo.toml --algorithm.loss none.py:f", 2, r"algorithm.loss: there is no file .*none.py"),
    ("plan grpo.toml --inference.max_model_len 99999", 2, "above the model's context of 512 tokens: use at most 512"),
    ("plan grpo.toml --inference.options.block_sise 16", 2, r"did you mean block_size\?"),
    ("plan grpo.toml --inference.options.logprobs_mode x", 2, "is set by Slipstream .*: remove it"),
    ("plan grpo.toml --evaluation.patience 3", 2, "patience = 3 has no effect .*: set evaluation.every"),
    ("plan grpo.toml --evaluation.stop_at 50 --evaluation.every 1", 2, "stop_at = 50 must be at most 1"),
    ("sft grpo.toml", 2, "algorithm.kind = .*run `slipstream train` with this run file"),
]
COMMAND_LINE = [
    ("trian sft.toml", 2, "(?i)unknown command .*did you mean"),
    ("train", 2, "(?i)requires an argument"),
    ("train sft.toml other.toml", 2, "'other.toml' is not a setting: write --section.key VALUE after the run file"),
    ("train sft.toml --resume", 2, "--resume needs the folder of the run to continue: add --run.folder FOLDER"),
    ("train sft.toml --resume --run.folder none", 2, "none holds no run to resume: name a run's folder"),
    ("train sft.toml --resume --run.folder empty", 2, "empty holds no run to resume: name a run's folder"),
    ("train sft.toml --run.folder finished", 2, "before its first checkpoint: begin it again with --resume"),
    ("train sft.toml --resume --run.folder locked", 2, "locked is in use by process .*: wait until it ends"),
    ("train sft.toml --run.folder rows.jsonl", 2, "rows.jsonl is a file: name another folder"),
    ("train sft.toml --run.folder rows.jsonl/run", 2, "cannot be made .*: name another folder"),
    ("train sft.toml --run.folder /proc/run", 2, "/proc/run cannot be made .*: name another folder"),
    ("env test sft.toml", 2, "names no environment to test: add"),
    ("eval sft.toml", 2, "evaluation needs .environment."),
    ("runs rows.jsonl", 2, "rows.jsonl is a file"),
    ("model new finished", 2, "finished"),
    ("model new new --num-heads 3", 2, "3"),
    ("model new new --tokenizer word", 2, "word"),
    ("runs --jsn", 2, "--jsn"),
    ("env tset grpo.toml", 2, "(?i)unknown command"),
    ("env test grpo.toml --num-tasks few", 2, "few"),
    ("eval grpo.toml --model ./none", 2, "none"),
    ("train grpo.toml --run.folder model", 2, "model"),
    ("verify none", 2, "none does not exist: name the folder of a run or of one of its checkpoints"),
    ("verify rows.jsonl", 2, "rows.jsonl is a file: name the folder of a run"),
    ("verify model", 2, "model holds no fingerprints to compare with: name the folder of a run"),
    ("verify finished", 2, "no checkpoint and no published version yet: wait for its first if it still runs"),
    ("verify model --engine x.sock", 2, "model is no run, and --engine needs its run's tickets: name the run's"),
    ("verify finished --engine x.sock", 5, "x.sock is no socket of an engine: is the run still going on"),
    ("trace none 0:0", 2, "none holds no run: name a folder that `slipstream train` wrote"),
    ("trace finished 0:0", 2, "finished kept no sample: name a run of reinforcement learning"),
    ("trace finished", 2, "(?i)requires an argument"),
    ("ledger none", 2, "none holds no run: name a folder that `slipstream train` wrote"),
    ("ledger finished", 3, "finished has no ledger: name a run of reinforcement learning"),
    ("replay none 0", 2, "none holds no run: name a folder that `slipstream train` wrote"),
    ("replay finished 0", 2, "finished has no resolved.toml, .*: name another run"),
    ("replay finished", 2, "(?i)requires an argument"),
]
DATA_CASES = [
    ("sft sft.toml --data none.jsonl", 3, "none.jsonl cannot be read .*: correct data.path"),
    ("sft sft.toml --data question_only.jsonl", 3, "row 1 of .* has no assistant message.*: add"),
    ("sft sft.toml --data long.jsonl", 3, "longer than the model's context of 512 tokens: use shorter ones"),
    ("sft sft.toml --data not_utf8.parquet", 3, "row 2 of .*, column completion cannot be read .*: correct it"),
    ("sft sft.toml --data empty", 3, "empty holds no data file: give"),
    ("sft sft.toml --data.split test", 3, "rows.jsonl is a file and has no split 'test': leave it out"),
]
ROWS_CASES = [
    ("path none", 3, "none cannot be read .*: correct environment.settings.path"),
    ("reward none.py", 2, "there is no file .*none.py .*: correct the path"),
    ("reward score.py:grade", 2, r"no function 'grade': use one of compute_score"),
]
ENVIRONMENTS = [
    ("none.py", 2, "there is no file .*none.py .*: correct the path"),
    ("tasks_none.py", 3, r"tasks\(\) of tasks_none returned nothing: return a list of tasks"),
    ("tasks_raises.py", 4, r"of tasks_raises raised KeyError: 'lost' \(line 2 of .*\): correct it"),
    ("tasks_long.py", 3, "leaves no room for a completion .*: use shorter prompts"),
]
MODELS = [
    ("./none", 'none" does not exist: give the folder of a model'),
    ("rows.jsonl", "is a file: give the folder of a model"),
    ("empty", "has no config.json: give a folder in Hugging Face format"),
    ("finished", "finished has no whole checkpoint yet: wait for its first if it still runs, or name a model"),
    ("no_runs/sft/checkpoints/step-000061/weights", "is no folder here, and no name of a model on the hub: correct"),
    ("config_text", "config.json cannot be read .*: save or download the model again"),
    ("config_deep", "config.json cannot be read .*: save or download the model again"),
    ("config_list", "config.json is not a JSON object: save the model again"),
    ("unknown", "holds no usable configuration .*martian.*: use another model"),
    ("encoder", "BertForMaskedLM, not a causal language model: give one that generates text"),
    ("no_weights", r"has no weights \(\*.safetensors\): save or download"),
    ("pickled", "only pytorch_model.bin: save it with save_pretrained"),
    ("truncated", "model.safetensors is not a whole file of weights .*: save or download it again"),
    ("shard_missing", "lacks model-00002-of-00002.safetensors, which its index names"),
    ("no_tokenizer", ". has no tokenizer .*: copy the files"),
    ("tokenizer_text", "no tokenizer can be loaded .*: "),
    ("tokenizer_deep", "no tokenizer can be loaded .*: "),
    ("no_template", "the tokenizer has no chat template: use a chat model"),
    ("template_syntax", "chat template cannot render a question .*: use"),
]
CASES = [*CONFIG, *COMMAND_LINE, *DATA_CASES]
CASES += [(f"train grpo.toml --environment.name {name}", code, said) for name, code, said in ENVIRONMENTS]
CASES += [(f"train rows.toml --environment.settings.{name}", code, said) for name, code, said in ROWS_CASES]
CASES += [(f"train sft.toml --model.path {name}", 2, said) for name, said in MODELS]


def make_models(root):
    """The folder of a good model, and of everything that can be wrong with one."""
    good = new_model(root / "model", hidden_size=32, num_layers=1)

    def variant(name, without=(), **files):
        folder = shutil.copytree(good, root / name)
        for file in without:
            (folder / file).unlink()
        for file, text in files.items():
            (folder / file.replace("_json", ".json")).write_text(text)
        return folder

    config = json.loads((good / "config.json").read_text())
    variant("config_text", config_json="model_type: qwen3")
    variant("config_deep", config_json="[" * 100_000)
    variant("config_list", config_json="[]")
    variant("unknown", config_json=json.dumps({**config, "model_type": "martian"}))
    variant("encoder", config_json=json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    variant("no_weights", ["model.safetensors"])
    (variant("pickled", ["model.safetensors"]) / "pytorch_model.bin").write_bytes(b"x")
    weights = variant("truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (variant("shard_missing") / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer = [file.name for file in good.iterdir() if "token" in file.name or file.suffix == ".jinja"]
    variant("no_tokenizer", tokenizer)
    variant("tokenizer_text", tokenizer_json="not a tokenizer")
    variant("tokenizer_deep", tokenizer_json="[" * 100_000 + "]" * 100_000)
    settings = json.loads((good / "tokenizer_config.json").read_text())
    for name, template in (("no_template", None), ("template_syntax", "{% for %}")):
        folder = variant(name, [file for file in tokenizer if file.endswith(".jinja")])
        changed = {key: value for key, value in settings.items() if key != "chat_template"}
        changed |= {"chat_template": template} if template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder with everything that the cases name; no case changes it."""
    root = tmp_path_factory.mktemp("broken")
    for name, text in (FILES | RUN_FILES).items():
        (root / name).write_text(text)
    for name, data in DATA.items():
        (root / name).write_bytes(data)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "empty").mkdir()
    with RunLog.create(root / "finished"):
        pass
    raw = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    text = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": text}), root / "not_utf8.parquet")
    make_models(root)
    with RunLog.create(root / "locked"):
        yield root


def contents(root):
    """Every file with its size and time of change, and every folder."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


@pytest.mark.parametrize(("arguments", "code", "said"), CASES, ids=[case[0] for case in CASES])
def test_it_is_one_sentence_and_nothing_is_left(arguments, code, said, broken, capsys, monkeypatch):
    monkeypatch.chdir(broken)
    before, children = contents(broken), psutil.Process().children(recursive=True)
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, ""), err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(said, err), err
    assert len(err) < 700, "too long to be read"
    assert contents(broken) == before
    assert psutil.Process().children(recursive=True) == children
