"""The commands that check, train, list, report and export; `--help` shows their docstrings.

Called from Python, they also accept a path as `str`.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from slipstream.cli.node import serve_place, token
from slipstream.cli.output import (
    Json,
    Process,
    ignore_closed_pipe,
    json_error,
    made_view,
    print_error,
    print_json,
    print_json_text,
    tell,
)
from slipstream.errors import ConfigError, SlipstreamError, StartsAgain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.config.schema import RunSection
    from slipstream.launch.run import Restarts
    from slipstream.launch.start import ResumeMode
    from slipstream.plan.derive import Plan

Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        show=True,
        help="--section.key VALUE overrides a setting of the run file; --no-evaluation turns that section off.",
    ),
]
RunFile = Annotated[Path, Parameter(help="The run file, TOML.")]
Plain = Annotated[bool, Parameter(name="--plain", negative="", help="Print plain lines instead of the live view.")]
Resume = Annotated[
    bool | Literal["auto"],
    Parameter(
        name="--resume",
        negative="",
        help="Continue the run in run.folder from its last checkpoint. --resume=auto begins it where there is none, "
        "and prints the result of one that is complete.",
    ),
]
TrustRemoteCode = Annotated[bool, Parameter(negative="", help="Allow the model folder's own Python code to run.")]

MIN_SIGNAL = 0.25
"""A run without a gain whose mean fraction of groups with reward variance is lower gets a hint about it."""
model_app = App(name="model", help="Create a small model to train.")


def train(
    run_file: RunFile, /, *overrides: Overrides, resume: Resume = False, plain: Plain = False, json: Json = False
) -> int:
    """Train a model by SFT or reinforcement learning, as the run file says.

    Writes metrics, events, sampled rollouts and checkpoints to the run folder. Prints that folder, the folder of the
    final weights and, if the run evaluates, the accuracy on held-out tasks. With run.streams = "files" or "redis" this
    is the supervisor of a process that does so, `slipstream trainer`, which it starts again if it is killed. Started
    once on each node by torchrun or srun, rank 0 is the run, and the others are agents of their nodes.
    """
    return _train(run_file, overrides, None, resume=resume, plain=plain, as_json=json, supervises=True)


def trainer(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    resume: Resume = False,
    plain: Plain = False,
    json: Json = False,
    supervised: Annotated[bool, Parameter(show=False)] = False,
) -> int:
    """Do what `train` does without a supervisor: for a run that systemd, Kubernetes or a script starts again.

    Use --resume=auto, so that the same command begins the run and continues it.
    """
    return _train(run_file, overrides, None, resume=resume, plain=plain, as_json=json, supervised=supervised)


def sft(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    data: str | None = None,
    resume: Resume = False,
    plain: Plain = False,
    json: Json = False,
) -> int:
    """Train a model by supervised fine-tuning (SFT).

    The training data are the gold answers of the run file's environment, or the conversations in --data or data.path.
    The run file may leave out algorithm.kind. Writes and prints what `train` does.

    Args:
        data: File or folder of conversations; sets data.path.
    """
    extra = ("--data.path", data) if data else ()
    return _train(run_file, (*overrides, *extra), "sft", resume=resume, plain=plain, as_json=json)


def _train(
    run_file: Path,
    overrides: tuple[str, ...],
    algorithm: str | None,
    *,
    resume: ResumeMode,
    plain: bool,
    as_json: bool,
    supervises: bool = False,
    supervised: bool = False,
) -> int:
    from slipstream.clusters.starts import own_start
    from slipstream.config import load_config
    from slipstream.nodes.places import forget, place_of

    run_file, place = Path(run_file), place_of(os.environ)
    restarts: Restarts = "here"
    loaded = load_config(run_file, overrides, algorithm=algorithm, implied=place.settings if place else {})
    flags = [*(["--plain"] if plain else []), *(["--json"] if as_json else [])]
    if place is not None:
        place.check(loaded.config.cluster.nodes)
        forget(os.environ)
        token()
        if place.node:
            return serve_place(place, loaded.config.cluster)
        restarts = "outside" if place.is_restarted else "nowhere"
        resume = resume or ("auto" if place.attempt else False)
    elif supervises and loaded.config.run.streams != "memory":
        return _supervise(run_file, overrides, loaded.config.run, resume, flags)
    watch = None
    if supervised:
        from slipstream.launch.parts.supervised import SupervisorWatch

        watch = SupervisorWatch()
    if (start := own_start(os.environ)) is not None and (folder := loaded.config.run.folder) is not None:
        warn = partial(tell, file=sys.stderr, flush=True)
        start.follow(folder, warn)
    from slipstream.launch.start import run_training

    try:
        result, summary = run_training(
            loaded,
            run_file.stem,
            resume=resume,
            make_progress=lambda: made_view(plain=plain, as_json=as_json),
            last_words=lambda error: print_error(error, str(error), error.exit_code, as_json=as_json),
            supervisor=watch,
            restarts=restarts,
            owns_process=Process.is_own,
        )
    except StartsAgain as again:
        if supervised or restarts == "outside":
            from slipstream.launch.parts.supervisor import AGAIN

            return AGAIN
        where = () if loaded.config.run.folder is not None else ("--run.folder", str(again.folder))
        command = algorithm or ("train" if supervises else "trainer")
        again.arguments = [command, str(run_file), *overrides, *where, "--resume", *flags]
        raise
    with ignore_closed_pipe():
        if as_json:
            print_json(summary)
            return 0
        tell(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            tell(f"weights:    {result.checkpoint}")
        if result.best is not None:
            tell(f"best:       {result.best}")
        if "eval/accuracy" in summary:
            from slipstream.view.figures import accuracy_line, figure_lines

            for line in (accuracy_line(summary), *figure_lines(summary)):
                tell(line)
            if text := _gain_line(result.folder):
                tell(text)
        if result.held_out_loss:
            tell(_loss_line(result.folder))
    return 0


def _supervise(
    run_file: Path, overrides: tuple[str, ...], section: RunSection, resume: ResumeMode, flags: list[str]
) -> int:
    from slipstream.launch.parts.supervisor import Supervisor
    from slipstream.launch.start import new_run_folder

    folder = section.folder
    if folder is None and not resume:
        folder = new_run_folder(run_file.stem)
        overrides = (*overrides, "--run.folder", str(folder))

    def say(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # the live view of a killed trainer had hidden the cursor
        tell(f"warning: {text}", file=sys.stderr, flush=True)

    arguments = ["trainer", str(run_file), *overrides, *flags]
    supervisor = Supervisor(arguments, folder or Path(), max_restarts=section.max_restarts, say=say)
    code = supervisor.run({False: (), True: ("--resume",), "auto": ("--resume=auto",)}[resume])
    if supervisor.error is not None:
        print_error(supervisor.error, str(supervisor.error), code, as_json="--json" in flags)
    return code


def _gain_line(folder: Path) -> str:
    """Compare the last evaluation with the first, with a hint if the gain is not significant; empty without both."""
    from slipstream.algo.readiness import MORE_SFT, SOLVED
    from slipstream.report.headline import headline
    from slipstream.runlog import read_run

    record = read_run(folder)
    found = headline(record)
    if found.before is None or found.after is None or found.gained is None:
        return ""
    gain, low, high = (100 * value for value in found.gained)
    text = f"gained:     {gain:+.1f} points since step {found.before.step} (95 % interval {low:+.1f} to {high:+.1f})"
    if low > 0:
        return text
    if high < 0:
        remedy = "lower training.learning_rate, and keep the best weights with evaluation.patience"
        return f"{text}: the model got worse; {remedy}"
    if found.after.value >= SOLVED:
        return f"{text}: no sure gain"
    signal = [row["reward/signal_fraction"] for row in record.rows if row.get("reward/signal_fraction") is not None]
    if signal and (mean := sum(signal) / len(signal)) < MIN_SIGNAL:
        return (
            f"{text}: no sure gain; only {100 * mean:.0f} % of the groups had both better and worse answers, so there "
            "was little to learn from: start from a model that is right more often (more SFT), or use easier tasks"
        )
    by_rewards = any("reward/mean" in row for row in record.rows)
    advice = "docs/when-rl-does-not-learn.md says what to change" if by_rewards else MORE_SFT
    return f"{text}: no sure gain; {advice}"


def _loss_line(folder: Path) -> str:
    """The loss of held-out rows, or the share of their pairs in the right order, before and after."""
    from slipstream.runlog import read_metrics, read_settings

    rows = [row for row in read_metrics(folder) if row.get("eval/loss") is not None]
    first, last, pairs = rows[0], rows[-1], "eval/preference_accuracy"
    if pairs in last:
        text, before = f"eval pairs: {last[pairs]:.1%} in the right order", f"{first[pairs]:.1%}"
    else:
        unit = "" if "preferences.loss" in read_settings(folder) else " nats a token"
        text, before = f"eval loss:  {last['eval/loss']:.4f}{unit}", f"{first['eval/loss']:.4f}"
    return f"{text}, {before} at step {first['step']}" if len(rows) > 1 else text


def init(folder: Path, /, *, json: Json = False) -> int:
    """Write a first task and its run files: environment.py, sft.toml and rl.toml.

    The folder must be new or empty. Prints the commands to run next, which take five minutes together on a CPU.

    Args:
        folder: New folder for the files.
    """
    from slipstream.cli.init_files import COMMANDS, FILES, write_files

    path = write_files(Path(folder), FILES)
    if json:
        print_json({"folder": str(path), "files": list(FILES)})
    else:
        tell(f"wrote {', '.join(FILES)}; next:\n\ncd {shlex.quote(str(path))}\n{COMMANDS}", end="")
    return 0


def plan(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    device: str | None = None,
    device_memory: float | None = None,
    gpus: int = 1,
    json: Json = False,
) -> int:
    """Check a run file and print every setting that is derived from it, with the reason.

    Reads the model's configuration, the tokenizer and the training data; starts neither a trainer nor an engine. Prints
    the whole plan also of a run that needs more memory or disk than there is, and then why. With --device it needs no
    GPU, and a model's folder may hold its config.json alone:

        slipstream plan rl.toml --device h100 --gpus 2
        slipstream plan rl.toml --device-memory 24 --lora.rank 16

    Args:
        device: Plan for such a GPU, as h100, which need not be here.
        device_memory: GiB of the GPU to plan for, whatever its name.
        gpus: How many of them.
    """
    from slipstream.config import load_config
    from slipstream.plan.memory.cards import chosen_gpus

    loaded = load_config(Path(run_file), overrides)
    asked = chosen_gpus(device, device_memory, gpus)
    from slipstream.commands.planning import plan_run
    from slipstream.plan.derive import DoesNotFit

    try:
        prepared = plan_run(loaded, asked)
    except DoesNotFit as error:
        _show_plan(error.plan, {}, as_json=json, error=error)
        raise
    _show_plan(prepared.plan, prepared.dropped, as_json=json)
    return 0


def _show_plan(plan: Plan, dropped: Mapping[str, int], *, as_json: bool, error: SlipstreamError | None = None) -> None:
    from slipstream.plan.render import plan_as_json, render_plan

    if as_json:
        failed = {} if error is None else json_error(error, str(error), error.exit_code)
        print_json_text(plan_as_json(plan, failed))
        return
    from rich.console import Console

    Console(emoji=False).print(render_plan(plan))
    for reason, count in dropped.items():
        tell(f"left out: {count} ({reason})")


def runs(
    *folders: Annotated[Path, Parameter(show=True)],
    json: Json = False,
) -> int:
    """List the runs in folders and all folders below them, newest first, with their state and latest metrics.

    Args:
        folders: Runs, or folders with runs at any depth; default: runs, or with SLIPSTREAM_SERVICE the service's.
    """
    from slipstream.cli.service import is_remote, list_queued
    from slipstream.runlog import find_runs
    from slipstream.view import render_runs

    if is_remote() and not folders:
        return list_queued(as_json=json)

    roots = [Path(folder) for folder in folders] or [Path("runs")]
    for root in roots:
        if root.is_file() or (folders and not root.exists()):
            problem = "is a file" if root.is_file() else "does not exist"
            raise ConfigError(f"{root} {problem}: name a folder of run folders")
    found = find_runs(roots)
    if json:
        print_json([dataclasses.asdict(run) for run in found.runs])
    else:
        from rich.console import Console

        Console(emoji=False).print(render_runs(found.runs))
    if not found.runs or found.was_cut:
        more = ", and stopped there: name the folders that have runs" if found.was_cut else ""
        count = "no run" if not found.runs else f"{len(found.runs)} runs"
        where = ", ".join(map(str, roots))
        tell(f"found {count} in {found.num_folders} folders at or below {where}{more}", file=sys.stderr)
    return 0


def export(
    checkpoint: Path,
    out: Path,
    /,
    *,
    merged: Annotated[bool, Parameter(negative="")] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> int:
    """Copy a checkpoint's weights to a new folder, as a model or a LoRA adapter that other tools can load.

    With --merged, merges the adapter into its base and writes a whole model. Prints the new folder.

    Args:
        checkpoint: A checkpoint, or a run: its best checkpoint, or else its latest.
        out: New folder for the weights.
        merged: Merge a LoRA adapter into its base model.
    """
    from slipstream.commands.export import export as write
    from slipstream.commands.export import remarks

    path = write(Path(checkpoint), Path(out), merged=merged, trust_remote_code=trust_remote_code)
    print_json({"folder": str(path)}) if json else tell(f"exported: {path}")
    for text in remarks(Path(checkpoint), merged=merged):
        tell(f"note: {text}", file=sys.stderr)
    return 0


def report(
    *folders: Annotated[Path, Parameter(show=True)],
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Write one HTML file that shows a run, or compares several.

    The file needs no network and no other file. Prints its path.

    Args:
        folders: Run folders; several are compared in one report.
        out: HTML file to write; default: report.html in this folder.
    """
    if not folders:
        raise ConfigError("report needs a run folder: name one or more, as `slipstream runs` lists them")
    from slipstream.report import write_report

    path = write_report([Path(folder) for folder in folders], None if out is None else Path(out))
    print_json({"report": str(path)}) if json else tell(f"report: {path}")
    return 0


@model_app.command(name="new")
def model_new(
    folder: Path,
    /,
    *,
    tokenizer: Literal["byte", "char"] = "char",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int | None = None,
    context_length: int = 512,
    rope_theta: float | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    vision: bool = False,
    coordinates: bool = False,
    json: Json = False,
) -> int:
    """Create a small Qwen3 with random weights, a byte- or character-level tokenizer and a chat template.

    The folder must be new or empty. Prints it.

    Args:
        folder: New folder for the model.
        tokenizer: One token for each byte (any text) or character (printable ASCII).
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        num_kv_heads: Key-value heads; must divide --num-heads.
        head_dim: Dimension of a head, a multiple of 32.
        intermediate_size: Width of the MLP; default: three times the hidden size.
        context_length: Maximum tokens of prompt and completion together.
        rope_theta: Base of the rotary embeddings; default: derived from --context-length.
        seed: The same seed gives the same weights.
        dtype: Data type of the weights.
        vision: A Qwen2-VL, which reads images too; without --head-dim.
        coordinates: With --vision: 1000 coordinate tokens, for a detector (docs/detection.md).
    """
    from slipstream.plan.preflight.torch_builds import check_torch_builds

    check_torch_builds()
    from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
    from slipstream.commands.small_models.tiny_qwen3 import new_model
    from slipstream_matching.coordinates import LITERALS

    if coordinates and not vision:
        raise ConfigError("--coordinates has no effect without --vision: add it, or leave --coordinates out")
    make = partial(new_model, head_dim=head_dim)
    if vision:
        make = partial(new_vision_model, added_tokens=LITERALS if coordinates else ())
    path = make(
        Path(folder),
        tokenizer=tokenizer,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        context_length=context_length,
        rope_theta=rope_theta,
        seed=seed,
        dtype=dtype,
    )
    print_json({"folder": str(path)}) if json else tell(f"new model: {path}")
    return 0
