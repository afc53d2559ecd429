"""`train`, `sft` and `evaluate`: Python arguments become a run file's tables, which a child process carries out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

from slipstream.config import Loaded, load_config, load_settings
from slipstream.config.parse.dump import toml_value
from slipstream.config.python_objects import PythonObject, give
from slipstream.envs.base import Environment
from slipstream.envs.from_python import AnyReward, pack_environment, pack_rows
from slipstream.errors import ConfigError, Interrupted
from slipstream.python.async_session import NewSession
from slipstream.python.protocol import Call
from slipstream.python.run_handle import Job, OnStep, Run, error_of
from slipstream.runlog import refuse_used
from slipstream.runlog.files import refuse_in_use

_NEW_MODEL_S = 600.0
Table = Mapping[str, Any]
"""A section of the run file: its keys and values."""
Tree = dict[str, Any]
"""A run file's tables."""
Rows = Iterable[Mapping[str, Any]]
"""A list of dictionaries, a Hugging Face data set, or a pandas or polars table."""
Tasks = str | Rows | Environment | type[Environment] | Callable[..., Iterable[Any]]
Reward = AnyReward


class Sections(TypedDict, total=False):
    """The run file's other sections, as docs/settings.md lists them; `False` turns an optional one off."""

    training: Table
    environment: Table
    sampling: Table
    inference: Table
    weights: Table
    evaluation: Table | Literal[False]
    lora: Table | Literal[False]
    matching: Table | Literal[False]
    critic: Table | Literal[False]
    teacher: Table | Literal[False]
    run: Table


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy of a model."""

    accuracy: float
    """Part of the tasks solved, from 0 to 1; with several samples a task, of the samples."""
    interval: tuple[float, float]
    """Its 95 % interval: Wilson's; over tasks with `evaluation={"samples_per_task": ...}`."""
    num_tasks: int
    metrics: dict[str, float] = field(repr=False)
    """All numbers, as they stand in `metrics.jsonl`."""
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], repr=False)
    """The completions, as `Run.samples` has them: task, prompt, right answer, completion, reward and outcome. A
    task's completions follow one another."""


def train(
    model: str | Path | Table,
    tasks: Tasks,
    reward: Reward | None = None,
    *,
    eval_tasks: Rows | None = None,
    algorithm: str | Table = "grpo",
    steps: int | None = None,
    epochs: float | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    on_step: OnStep | None = None,
    resume: bool | Literal["auto"] = False,
    progress: bool = True,
    wait: bool = True,
    **sections: Unpack[Sections],
) -> Run:
    """Train `model` by reinforcement learning on `tasks`; returns when the run has ended.

    `model`: a folder, a hub id, or the table `[model]`.
    `tasks`: a function `tasks(split, num_tasks, seed)` that returns dictionaries with `prompt` and perhaps `answer`;
    rows of that form (one in ten is held out, unless `eval_tasks` is given); an `Environment`; or a name as in
    `environment.name`, which has its own reward.
    `reward`: `reward(task, completion)` returns a number, or several by name with the key `reward`; it may be `async`.
    Or "exact" (the completion is the answer) or "number" (its last number is the answer's). It runs in worker
    processes, which get functions, closures and notebook cells pickled.
    `algorithm`: a recipe (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, ppo, distill), or `[algorithm]`.
    `steps` or `epochs`: the batches to train on, or the passes over the training tasks.
    `on_step(step, metrics)` is called in this process after each step.
    `resume`: go on after the last checkpoint in `folder`; "auto": begin where there is no run yet, and return one that
    is complete. `progress=False` prints nothing. `wait=False` returns at once: see `Run.wait` and `Run.stop`.
    `sections`: all other settings, as `training={"learning_rate": 1e-6}`.

    Ctrl-C, or an interrupt of the notebook's cell, ends the run at the next safe place with a checkpoint, and this call
    returns. Raises what ends the run otherwise, a subclass of `slipstream.errors.SlipstreamError`.
    """
    tree = _tree(sections, model, algorithm, steps, folder, seed, epochs)
    objects = _add_environment(tree, tasks, eval_tasks, reward)
    return _run("train", tree, objects, on_step, resume=resume, progress=progress, wait=wait)


def sft(
    model: str | Path | Table,
    data: str | Path | Rows | Table | None = None,
    tasks: Tasks | None = None,
    reward: Reward | None = None,
    *,
    eval_data: str | Path | Rows | None = None,
    eval_tasks: Rows | None = None,
    algorithm: Table | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    on_step: OnStep | None = None,
    resume: bool | Literal["auto"] = False,
    progress: bool = True,
    wait: bool = True,
    **sections: Unpack[Sections],
) -> Run:
    """Fine-tune `model` on conversations; returns when the run has ended.

    `data`: a file or folder, a data set on the hub (`org/name`), rows with `messages` or with `prompt` and
    `completion`, or the table `[data]`, whose `path` and `eval_path` may be rows too; without it the right answers of
    `tasks` are imitated. `eval_data`: held-out rows, whose loss is measured. `algorithm`: other settings of that
    section. With `tasks`, held-out accuracy is measured. All else as in `train`.
    """
    tree = _tree(sections, model, {**(algorithm or {}), "kind": "sft"}, steps, folder, seed, epochs)
    objects = _add_data(tree, data, eval_data)
    if not objects and "data" not in tree and tasks is None:
        raise ConfigError("sft has nothing to imitate: give data, or tasks with right answers")
    if tasks is not None:
        if reward is None and not isinstance(tasks, (str, Environment, type)):
            reward = "exact"  # the right answers need none to be imitated; accuracy counts exact answers
        objects += _add_environment(tree, tasks, eval_tasks, reward)
    return _run("sft", tree, objects, on_step, resume=resume, progress=progress, wait=wait)


def evaluate(
    model: str | Path | Table,
    tasks: Tasks,
    reward: Reward | None = None,
    *,
    eval_tasks: Rows | None = None,
    seed: int | None = None,
    progress: bool = True,
    **sections: Unpack[Sections],
) -> Evaluation:
    """Measure held-out accuracy of `model` with a real engine; nothing is trained. Arguments as in `train`."""
    tree = _tree(sections, model, "grpo", 1, None, seed)  # every run file has steps; here none is made
    objects = _add_environment(tree, tasks, eval_tasks, reward)
    job = Job(Call("evaluate", tree, tuple(objects), view=_view(progress)), shown=progress)
    outcome = job.follow()
    if outcome.error == "Interrupted":
        raise Interrupted(outcome.message)
    if outcome.error:
        raise error_of(outcome)
    found: dict[str, float] = outcome.summary
    interval = (found["eval/accuracy_low"], found["eval/accuracy_high"])
    return Evaluation(found["eval/accuracy"], interval, int(found["eval/num_tasks"]), found, outcome.samples)


def session(
    run_file: str | Path | None = None,
    *,
    model: str | Path | Table | None = None,
    tasks: Tasks | None = None,
    reward: Reward | None = None,
    eval_tasks: Rows | None = None,
    algorithm: str | Table | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
    **sections: Unpack[Sections],
) -> NewSession:
    """Open the parts of a run in this process, for an order of steps of your own:

        with slipstream.session("run.toml") as s:
            while s.step < 100:
                s.train(s.rollouts())
                s.sync()
            s.save()

    Settings come from `run_file`, and the other arguments change some; without a file they are the arguments of
    `train`. With `async with` the same calls are coroutines. docs/python.md describes them. Raises ConfigError for
    wrong settings, and later errors are subclasses of `slipstream.errors.SlipstreamError`.
    """
    loaded = _session_settings(
        run_file, sections, model=model, tasks=tasks, reward=reward, eval_tasks=eval_tasks, algorithm=algorithm,
        steps=steps, folder=folder, seed=seed,
    )  # fmt: skip
    from slipstream.view import make_view

    return NewSession(loaded, make_view(_view(progress)))


def _session_settings(
    run_file: str | Path | None,
    sections: Mapping[str, Any],
    *,
    model: str | Path | Table | None,
    tasks: Tasks | None,
    reward: Reward | None,
    eval_tasks: Rows | None,
    algorithm: str | Table | None,
    steps: int | None,
    folder: str | Path | None,
    seed: int | None,
) -> Loaded:
    tree = _tree(sections, model if model is not None else {}, algorithm or "grpo", steps, folder, seed)
    objects: list[PythonObject] = []
    if tasks is not None:
        objects = _add_environment(tree, tasks, eval_tasks, reward)
    elif reward is not None or eval_tasks is not None:
        raise ConfigError("reward and eval_tasks belong to tasks: give tasks, too")
    for item in objects:
        give(item)
    if run_file is None:
        if model is None:
            raise ConfigError("a session needs a model: give a run file, or model=...")
        return load_settings(tree)
    for name, given in (("model", model), ("algorithm", algorithm)):
        if given is None:
            del tree[name]
    return load_config(run_file, list(_as_overrides(tree)))


def _as_overrides(tree: Tree) -> Iterator[str]:
    """The tables as arguments of the command line."""
    for section, content in tree.items():
        if content is False:
            yield f"--no-{section}"
            continue
        for key, value in content.items():
            yield f"--{section}.{key}={value if isinstance(value, str) else toml_value(value)}"


def new_model(
    folder: str | Path, *, hidden_size: int = 128, num_layers: int = 4, context_length: int = 512, seed: int = 0
) -> Path:
    """Make a small model from scratch, with a character tokenizer and a chat template; returns its folder. `slipstream
    model new` has more options. Raises ConfigError where there is one already."""
    options = {"hidden-size": hidden_size, "num-layers": num_layers, "context-length": context_length, "seed": seed}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-P", "-m", "slipstream", "model", "new", str(folder), *flags, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_NEW_MODEL_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{folder}: no model was made within {_NEW_MODEL_S:g} s: is the disk busy or gone?") from None
    if done.returncode:
        raise ConfigError(done.stderr.strip().removeprefix("error: "))
    return Path(folder)


def _run(
    command: Literal["train", "sft"],
    tree: Tree,
    objects: list[PythonObject],
    on_step: OnStep | None,
    *,
    resume: bool | Literal["auto"],
    progress: bool,
    wait: bool,
) -> Run:
    if on_step is not None and not callable(on_step):
        raise ConfigError(f"on_step = {on_step!r:.60} cannot be called: give a function of step and metrics, or None")
    loaded = load_settings(tree, algorithm="sft" if command == "sft" else None)  # what is wrong is raised here
    folder = loaded.config.run.folder
    if folder is None:
        if resume:
            raise ConfigError(f"resume={resume!r} needs the folder of the run to continue: give folder=...")
        kind = loaded.config.algorithm.kind
        folder = (Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
        tree = {**tree, "run": {**tree.get("run", {}), "folder": str(folder)}}
    else:
        refuse_in_use(folder)
        if not resume:
            refuse_used(folder)
    call = Call(command, tree, tuple(objects), resume, _view(progress))
    run = Run(folder, lambda: Job(call, shown=progress), on_step)
    if wait:
        run.follow()
        return run.wait()
    threading.Thread(target=run.follow, name="slipstream-run", daemon=True).start()
    return run


def _tree(
    sections: Mapping[str, Any],
    model: str | Path | Table,
    algorithm: str | Table,
    steps: int | None,
    folder: object,
    seed: int | None,
    epochs: float | None = None,
) -> Tree:
    """The run file's tables."""
    if not isinstance(folder, str | os.PathLike | None):
        raise ConfigError(f"folder = {folder!r} is no path: give a text or a Path")
    tree: Tree = {name: _plain(content) for name, content in sections.items()}
    tree["model"] = _plain(model) if isinstance(model, Mapping) else {"path": str(model)}
    tree["algorithm"] = _plain(algorithm) if isinstance(algorithm, Mapping) else {"kind": algorithm}
    for section, key, value, argument in (
        ("training", "steps", steps, "steps"),
        ("training", "epochs", epochs, "epochs"),
        ("run", "folder", None if folder is None else str(folder), "folder"),
        ("run", "seed", seed, "seed"),
    ):
        if value is not None:
            _put(tree, section, key, value, argument)
    return tree


def _add_data(
    tree: Tree, data: str | Path | Rows | Table | None, eval_data: str | Path | Rows | None
) -> list[PythonObject]:
    """Add [data]; the rows in it, packed."""
    table: Tree = {} if data is None else {"path": data}
    if isinstance(data, Mapping):
        table = dict(cast("Table", data))
    if eval_data is not None:
        if data is None:
            raise ConfigError("eval_data is given without data: give both, or eval_tasks with tasks")
        _put({"data": table}, "data", "eval_path", eval_data, "eval_data")
    objects: list[PythonObject] = []
    for key in ("path", "eval_path"):
        if (rows := table.get(key)) is not None and not isinstance(rows, str | Path):
            if callable(rows) or isinstance(rows, Environment):
                raise ConfigError(
                    f"data is {getattr(rows, '__name__', type(rows).__name__)}, which makes tasks: pass it as tasks=, "
                    "and its reward, if it needs one, as reward="
                )
            objects.append(pack_rows(rows))
            table[key] = objects[-1].name
    if table:
        tree["data"] = _plain(table)
    return objects


def _add_environment(tree: Tree, tasks: Tasks, eval_tasks: Rows | None, reward: Reward | None) -> list[PythonObject]:
    if isinstance(tasks, str):
        if reward is not None or eval_tasks is not None:
            raise ConfigError(f"tasks = {tasks!r} names an environment, which has its own reward: give it alone")
        _put(tree, "environment", "name", tasks, "tasks")
        return []
    packed = pack_environment(tasks, eval_tasks, reward)
    _put(tree, "environment", "name", packed.name, "tasks")
    return [packed]


def _put(tree: Tree, section: str, key: str, value: Any, argument: str) -> None:
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{argument} is given, and {section} is {table!r}: leave one of them out")
    if key in table:
        raise ConfigError(f"{argument} and {section}={{{key!r}: ...}} say the same: give one of them")
    table[key] = value


def _plain(value: Any) -> Any:
    """Values as TOML has them: paths as text, tuples as lists, NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    return item() if callable(item) and not isinstance(value, str | int | float | bool) else value


def _view(progress: bool) -> Literal["auto", "none"]:
    return "auto" if progress else "none"
