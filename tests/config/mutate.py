"""Writes run files that are wrong in some way, or odd, and says what `slipstream plan` makes of each.

    python -m tests.config.mutate --cases 400 --seed 7 --folder mutated

Every case follows from seed and number alone. Each is planned in a fork of this process, which has imported
everything, with a deadline and a limit of memory. `--starts` has vLLM and torch take what was accepted; `results.jsonl`
in the folder has a line for each case.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from slipstream.config.parse.dump import toml_value
from slipstream.config.parse.keys import all_keys, optional_sections, sections

DEADLINE_S, MEMORY_BYTES, LONGEST_LINE = 120.0, 8 << 30, 1000
REFUSALS = (2, 3, 4)
"""Exit codes of a file, data or an environment that cannot be used."""

ENVIRONMENT = """
from slipstream.envs import SingleTurn
from slipstream.records import Message, Task

class Letters(SingleTurn):
    def __init__(self, seed=0, size=40):
        super().__init__(seed)
        self.size = size

    def tasks(self, split, num_tasks):
        rows = range(min(num_tasks, self.size))
        return [Task(f"{split}/{n}", (Message("user", f"{split} {n}"),), answer=str(n % 7)) for n in rows]

    def reward(self, task, completion):
        return float(completion == task.answer)
"""
BASE = {
    "model": {"path": "model"},
    "environment": {"name": "letters.py"},
    "algorithm": {"kind": "grpo", "group_size": 4},
    "sampling": {"temperature": 0.9, "top_p": 0.9, "stop": ["\n\n", "###"]},
    "training": {"steps": 3, "prompts_per_batch": 8, "learning_rate": 1e-3, "micro_batch_tokens": 512},
    "inference": {"max_num_seqs": 16, "kv_cache_gib": 0.1},
    "evaluation": {"num_tasks": 8, "every": 2},
    "run": {"seed": 3},
}
VARIANTS = {
    "grpo": {},
    "sft": {"algorithm": {"kind": "sft"}},
    "rows": {"algorithm": {"kind": "sft"}, "environment": None, "evaluation": None, "data": {"path": "rows.jsonl"}},
    "ppo": {"algorithm": {"kind": "ppo"}, "critic": {"warmup_steps": 1}},
    "lora": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
    "problems": {"environment": {"name": "rows", "settings": {"path": "problems.jsonl"}}},
}
INTEGERS = (
    *(0, -1, 1, 2, 3, 7, 100, 1000, 10**5, 10**6, 10**9, 10**12),
    *(2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64, 10**400),
)
FLOATS = (0.0, -0.5, 1e-300, 1e-12, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.5, 2.5, 1e10, 1e30, 1e308, float("inf"), float("nan"))
TEXTS = (
    *("", " ", "auto", "none", "true", "letters.py", "letters.py:Letters", "letters.py:Lettres", "rows", "model", "/"),
    *("nope", "./nope", "../nope", "/dev/null", "/proc/1", "a\0b", "a:b:c.py", "[/red]", "é", "\u2028", "\x85", "🎉"),
    *("x" * 255, "x" * 300, "x/" * 3000, "x" * 100_000),
    *("-1", "1e3", "https://[", "~nobody/x", "%s{}", "reasoning_gym/no"),
)


def make_case(seed, number):
    """What the run file of that number is, and its text."""
    draw = random.Random(f"{seed}/{number}")
    variant = draw.choice(sorted(VARIANTS))
    tree = {name: dict(table) for name, table in BASE.items()}
    for section, table in VARIANTS[variant].items():
        if table is None:
            tree.pop(section, None)
        else:
            tree[section] = dict(table)
    if variant == "rows":
        del tree["sampling"], tree["inference"]
        tree["evaluation"] = False
    kind, what = str(tree["algorithm"]["kind"]), [variant]
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        what.append(draw.choice(_CHANGES)(tree, draw, kind)[:80])
    text = _as_toml(tree)
    if draw.random() < 0.12:
        change, text = draw.choice(_DAMAGES)(text, draw)
        what.append(change)
    return "; ".join(what), text


def _other_value(tree, draw, kind):
    """A key that there is, or could be, with a value of any type."""
    path = draw.choice([key.path for key in all_keys().values() if not key.kinds or kind in key.kinds])
    value = draw.choice((draw.choice(INTEGERS), draw.choice(FLOATS), draw.choice(TEXTS), draw.random() < 0.5))
    if draw.random() < 0.15:
        value = draw.choice(([], [value], [[value]], {}, {"a": value}))
    return _set(tree, path, value)


def _likely_value(tree, draw, kind):
    """A key with a value that it takes by itself."""
    keys = [key for key in all_keys().values() if not key.kinds or kind in key.kinds]
    key = draw.choice([key for key in keys if key.path not in ("algorithm.kind", "run.folder")])
    if key.choices:
        return _set(tree, key.path, draw.choice(key.choices))
    if key.is_flag:
        return _set(tree, key.path, draw.random() < 0.5)
    if "whole number" in key.requirement:
        return _set(tree, key.path, draw.choice((0, 1, 2, 3, 5, 8, 16, 60, 400)))
    return _set(tree, key.path, draw.choice((1e-4, 0.01, 0.2, 0.5, 0.9, 1.0, 2.0, 60.0)))


def _option(tree, draw, kind):
    names = ("block_size", "quantization", "swap_space", "max_logprobs", "load_format", "block_sise", "seed")
    value = {draw.choice(names): draw.choice((0, 16, 32, -5, "many", "fp8", "auto", True, 1e30))}
    return _set(tree, "inference.options", value)


def _setting(tree, draw, kind):
    value = draw.choice((3, "three", 10**12, {"deep": {"er": 1}}, -1))
    return _set(tree, "environment.settings", {draw.choice(("size", "sise", "path", "seed")): value})


def _removal(tree, draw, kind):
    section = draw.choice(sorted(tree))
    if isinstance(tree[section], dict) and tree[section] and draw.random() < 0.7:
        name = draw.choice(sorted(tree[section]))
        del tree[section][name]
        return f"without {section}.{name}"
    del tree[section]
    return f"without {section}"


def _slip(tree, draw, kind):
    """A name that is nearly right, or another trainer's."""
    section = draw.choice([name for name in tree if isinstance(tree[name], dict)])
    name = draw.choice((*tree[section], "lr", "num_train_epochs", "loss_type", "a.b", "é", "x" * 5000))
    place = draw.randrange(max(1, len(name) - 1))
    return _set(tree, f"{section}.{name[:place]}{name[place + 1 :]}", draw.choice((1, "x", True)))


def _section_for_value(tree, draw, kind):
    section = draw.choice((*sections(), *optional_sections(), "trainin"))
    tree[section] = draw.choice((False, True, 5, "text", [], {}, [{"a": 1}]))
    return f"{section} = {tree[section]}"


def _set(tree, path, value):
    section, _, name = path.partition(".")
    if not isinstance(tree.get(section), dict):
        tree[section] = {}
    tree[section][name] = value
    return f"{path} = {str(value)[:40] if not isinstance(value, int) or value < 10**20 else hex(value)[:20]!r}"


_CHANGES = (*(_other_value,) * 4, *(_likely_value,) * 10, _option, _setting, _removal, _slip, _section_for_value)


def _as_toml(tree):
    lines = [f"{name} = {toml_value(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines.append(f"\n[{name}]")
            for key, value in table.items():
                is_bare = key.replace("_", "").isalnum() and key.isascii()
                lines.append(f"{key if is_bare else json.dumps(key)} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def _cut(text, draw):
    place = draw.randrange(len(text))
    return f"cut at {place}", text[:place]


ODD = ("\0", "\u2028", "\x85", '"', "'''", "[", "]]", "{", "=", "\r", "\ufeff", "\x1b", "# \u2029\n", "🎉")


def _insert(text, draw):
    place, what = draw.randrange(len(text)), draw.choice(ODD)
    return f"{what!r} at {place}", text[:place] + what + text[place:]


def _twice(text, draw):
    line = draw.choice(text.split("\n"))
    return f"twice {line[:40]!r}", f"{text}\n{line}\n"


def _nest(text, draw):
    depth = draw.choice((30, 40, 300, 3000))
    lists, tables = f"x = {'[' * depth}{']' * depth}", f"x = {'{a=' * depth}1{'}' * depth}"
    body = draw.choice((lists, tables, f"{'x.' * depth}y = 1"))
    return f"nested {depth}", f"{text}\n[environment.settings]\n{body}\n"


def _long(text, draw):
    lines = draw.choice((500, 20_000))
    return f"{lines} lines", text.replace("stop = [", "stop = [\n" + '  "s",\n' * lines)


def _comment(text, draw):
    return "comment", f"# \u2028 \x85 {'x' * draw.choice((1, 100_000))}\n{text}"


_DAMAGES = (_cut, _insert, _insert, _twice, _nest, _long, _comment)


def make_folder(folder):
    """What the run files name: a model, an environment, rows."""
    from slipstream.commands.small_models.tiny_qwen3 import new_model

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        new_model(folder / "model", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=256)
    (folder / "letters.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"question": f"what is {n}?", "answer": str(n)} for n in range(30)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))


def run_case(seed, number, folder):
    """Plan it in a fork of this process; what became of it. `verdict`: `accepted`, `refused`, or what is wrong."""
    what, text = make_case(seed, number)
    path = folder / f"case{number:04}.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    outputs = [path.with_suffix(".out"), path.with_suffix(".err")]
    begin = time.monotonic()
    code = forked(lambda: _plan(path), folder, outputs)
    out, err = (output.read_text(encoding="utf-8", errors="replace") for output in outputs)
    found = {"number": number, "what": what, "verdict": judge(code, out, err), "code": code, "said": err[-600:]}
    return found | {"seconds": round(time.monotonic() - begin, 2)}


def judge(code, out, err):
    """In a word what became of a plan with that exit code, None where it was killed, and these outputs."""
    if code is None:
        return "hang"
    if "Traceback (most recent call last)" in err or code < 0:
        return "traceback"
    if code == 0:
        json.loads(out)
        return "accepted" if not err else "wordy"
    if not err.startswith("error: ") or code not in REFUSALS:
        return "unsaid"
    return "wordy" if max(len(line) for line in err.split("\n")) > LONGEST_LINE else "refused"


def _plan(path):
    from slipstream.cli.app import main
    from slipstream.launch import prepare

    prepare.try_options = _try_options  # in this fork, which has imported vLLM
    main(["plan", str(path), "--json"])


def _try_options(settings):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from slipstream.errors import ConfigError
    from slipstream.inference.plugin.arguments import engine_arguments

    try:
        AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()
    except Exception as error:
        raise ConfigError(f"inference.options: {type(error).__name__}") from error


def forked(work, folder, outputs, deadline_s=DEADLINE_S):
    """The exit code of a fork that does `work` in `folder`, negative for a signal; None when it had to be killed."""
    if (pid := os.fork()) == 0:
        _in_child(work, folder, outputs)
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _in_child(work, folder, outputs):
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        for descriptor, output in enumerate(outputs, start=1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.chdir(folder)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - whatever a case raises is its result
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def check_starts(path):
    """Have vLLM take the engine's arguments and the requests' parameters, and torch the seed, of an accepted file."""
    import torch

    from slipstream.config import load_config
    from slipstream.inference.plugin.arguments import engine_arguments, sampling_arguments
    from slipstream.launch.build import build_optimizer
    from slipstream.launch.engines import engine_plan
    from slipstream.launch.prepare import prepare
    from slipstream.records import GenerateRequest

    prepared = prepare(load_config(path))
    config = prepared.config
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(min(config.run.threads, 256))  # MEMORY_BYTES has no room for the stacks of 1024
    torch.ones(64, 64) @ torch.ones(64, 64)
    build_optimizer(config, torch.nn.Linear(4, 4))
    if not prepared.uses_engine:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = engine_plan(config, config.model.path, on_cpu=True).settings
    AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()
    evaluation = config.evaluation
    for temperature in (None, *([float(evaluation.temperature)] if evaluation is not None else [])):
        sampling_arguments(GenerateRequest("a", [1, 2], prepared.sampling(temperature), seed=1))


def warm_up():
    """Import what every fork needs."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "slipstream"}
    import vllm.engine.arg_utils  # noqa: F401 (what it says while it is imported is said once)

    import slipstream.cli.app
    import slipstream.launch.prepare  # noqa: F401

    logging.getLogger("vllm").setLevel(logging.ERROR)  # also where this is a fork, which was told before


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="of so many, try whether they start")
    options = parser.parse_args()
    folder = options.folder.absolute()
    warm_up()
    forked(lambda: make_folder(folder), folder.parent, [Path(os.devnull)])
    results = [run_case(options.seed, number, folder) for number in range(options.cases)]
    for result in [each for each in results if each["verdict"] == "accepted"][: options.starts]:
        path = folder / f"case{result['number']:04}.toml"
        outputs = [path.with_suffix(".out"), path.with_suffix(".start")]
        code = forked(lambda path=path: check_starts(path), folder, outputs)
        said = outputs[1].read_text(errors="replace")[-1500:]
        results.append(result | {"verdict": "starts" if code == 0 else "does not start", "code": code, "said": said})
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
