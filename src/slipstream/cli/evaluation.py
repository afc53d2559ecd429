"""The commands that measure models: `eval` and `compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, Plain
from slipstream.cli.output import Json, made_view, print_json, tell
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.commands.evaluation_target import Target
    from slipstream.progress import Progress
    from slipstream.runlog.evaluations import KeptEvaluation

Results = Annotated[
    Path, Parameter(help="A file that `slipstream eval` wrote, or a run: its newest kept evaluation.", show=True)
]


def evaluate(
    run: Path,
    /,
    *overrides: Overrides,
    model: str | None = None,
    served_name: str = "",
    key_variable: str = "",
    out: Path | None = None,
    plain: Plain = False,
    json: Json = False,
) -> int:
    """Measure a model's accuracy on held-out tasks, with its 95 % confidence interval.

    Starts vLLM with the run file's model, or with --model; an address is asked as it is. Needs [environment];
    [evaluation] sets the number of tasks, of completions of each (samples_per_task) and the temperature. Every sample
    is kept in the results, which `slipstream compare` reads; an existing file is not overwritten.

    Args:
        run: The run file, a run or a checkpoint of one: whose tasks, and whose model.
        model: What to evaluate instead: a run, a checkpoint, the folder of a model or adapter, a hub id, or the address
            of an OpenAI-compatible server, up to /v1.
        served_name: The model's name at the address; default: the only one there.
        key_variable: Environment variable that holds the address's key.
        out: New file for the results; default: in evaluations/ of the run that the weights come from.
    """
    from slipstream.commands.evaluation_target import find_target
    from slipstream.commands.results import place_of

    target = find_target(Path(run), model, overrides)
    if not target.address and (served_name or key_variable):
        flag = "--served-name" if served_name else "--key-variable"
        raise ConfigError(f"{flag} is for the model at an address: give --model http://..., or leave it out")
    place = place_of(target, None if out is None else Path(out))
    view = made_view(plain=plain, as_json=json)
    found = _at_address(target, served_name, key_variable, view) if target.address else _by_engine(target, view)
    if place is not None:
        from slipstream.runlog.evaluations import keep_evaluation

        keep_evaluation(place, found)
    _print(found.metrics, place, as_json=json)
    return 0


def _by_engine(target: Target, view: Progress) -> KeptEvaluation:
    from slipstream.commands.evaluate import evaluate_model
    from slipstream.commands.results import kept
    from slipstream.launch.prepare import prepare

    prepared = prepare(target.loaded)
    evaluation = evaluate_model(prepared, view)
    given = prepared.config.evaluation
    assert given is not None
    return kept(evaluation, prepared.eval_tasks, prepared.config, prepared.sampling(given.temperature), target.name)


def _at_address(target: Target, served_name: str, key_variable: str, view: Progress) -> KeptEvaluation:
    from slipstream.commands.evaluate_address import evaluate_address, key_of
    from slipstream.commands.results import kept

    key, config = key_of(key_variable), target.loaded.config
    evaluation, tasks, sampling, name = evaluate_address(config, target.address, view, model=served_name, key=key)
    return kept(evaluation, tasks, config, sampling, f"{name} at {target.address}", has_tokens=False)


def _print(metrics: Mapping[str, Any], place: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json({**metrics, **({} if place is None else {"results": str(place)})})
        return
    from slipstream.view.figures import accuracy_line, figure_lines

    for line in (accuracy_line(metrics), *figure_lines(metrics)):
        tell(line)
    tell(f"results:    {place}" if place is not None else "results:    not kept, as there is no run to keep them in: "
          "--out FILE keeps them")  # fmt: skip


def compare(a: Results, b: Results, /, *, json: Json = False) -> int:
    """Compare two evaluations of the same tasks: is B better than A?

    Takes the tasks in pairs, by their id. Prints one sentence with the difference, its 95 % interval, and how large a
    difference such a comparison finds in four of five cases.
    """
    from slipstream.commands.compare import compare as compare_results

    found = compare_results(Path(a), Path(b))
    if json:
        print_json(found.as_json())
        return 0
    for name, path, accuracy, samples in (
        ("A", found.before, found.accuracy_before, found.samples[0]),
        ("B", found.after, found.accuracy_after, found.samples[1]),
    ):
        each = f", {samples} samples a task" if samples > 1 else ""
        tell(f"{name}: {100 * accuracy:.1f} %  {path}{each}")
    tell(found.verdict)
    for source, part in found.by_source.items():
        interval = f"{100 * part.low:+.1f} to {100 * part.high:+.1f}"
        tell(f"  {source}: {100 * part.value:+.1f} points ({interval}, {part.num_tasks} tasks)")
    for note in found.notes:
        tell(f"note: {note}")
    return 0
