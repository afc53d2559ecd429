"""Seconds a step of GRPO: an agent that sends requests to its base URL, beside the same environment as a function.

    python benchmarks/agents.py [--shape 1.5b] [--steps 8] [--tokens 512] [--repeats 2] [--out FOLDER]

Both have the tasks and the reward of `gpu.py`: 32 prompts of about 110 tokens, 8 completions each, one turn. The agent
is a coroutine with the client of `openai`. The cases take turns. Prints a Markdown table: medians and ranges over all
steps but the first two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import ENVIRONMENT, WARM_UP, figures, run_file, small_table, spread
from shapes import shaped_model

AGENT = '''
"""One request to the model for each task."""
from functools import cache

from openai import AsyncOpenAI


@cache
def client(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="-")


async def solve(task, address):
    own = client(address.base_url).with_options(api_key=address.api_key)
    answer = await own.chat.completions.create(
        model=address.model, messages=[{"role": "user", "content": task.prompt[0].content}]
    )
    return answer.choices[0].message.content or ""
'''
SETTINGS = '{ callable = "agent.py:solve", tasks = "environment.py:tasks", reward = "environment.py:reward" }'


def measure(case: str, file: Path, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case, and read its run folder."""
    from slipstream.runlog import read_metrics

    command = [sys.executable, "-m", "slipstream.cli", "train", "--plain", str(file), "--run.folder", str(run)]
    try:
        code = subprocess.run(
            command, stdout=sys.stderr, cwd=file.parent, check=False, timeout=options.timeout
        ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    rows = [row for row in read_metrics(run) if row["step"] > WARM_UP] if run.exists() else []
    if code not in (0, 124) or not rows:  # a slow machine's steps are figures too
        return {"case": case, "code": code}
    return {"case": case, "code": code, "tokens": spread([row["tokens/trained"] for row in rows])} | figures(rows)


def main() -> int:
    """Measure both cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="keep the model and runs here")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / f"model-{options.shape}"
        if not model.exists():
            shaped_model(model, options.shape)
        (folder / "environment.py").write_text(ENVIRONMENT)
        (folder / "agent.py").write_text(AGENT)
        steps, tokens, task = options.steps, options.tokens, folder / "environment.py"
        text = run_file(model, task, lora=False, placement="auto", steps=steps, tokens=tokens, evaluates=False)
        (folder / "function.toml").write_text(text)
        agent = f'name = "agent"\nmax_turns = 1\nsettings = {SETTINGS}'
        (folder / "agent.toml").write_text(text.replace(f'name = "{task}"', agent))
        for repeat in range(options.repeats):
            for case in ("function", "agent"):
                results.append(measure(case, folder / f"{case}.toml", folder / f"{case}-{repeat}", options))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(small_table(results, "tokens a step", lambda result: f"{result['tokens'][0]:,.0f}"))
    return 1 if any("step" not in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
