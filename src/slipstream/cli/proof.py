"""The commands `verify`, `trace`, `ledger` and `replay`, which prove what a run has done."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.output import Json, print_json, print_table, tell

if TYPE_CHECKING:
    from slipstream.commands.replay import Replay
    from slipstream.runlog.trace import Trace


def verify(
    path: Path,
    /,
    *,
    engine: Path | None = None,
    json: Json = False,
) -> int:
    """Check that a run's checkpoints, published versions and live engine hold exactly the weights that were trained.

    A run records the fingerprint of every parameter, computed in the trainer's memory, whenever it publishes a version
    or writes a checkpoint. This command computes the fingerprints again, from the files and, while the run is running,
    in the engine's memory, which pauses generation for the time that the table shows. It prints a table of all that
    was compared. If anything differs, by as little as one bit, it names the parameter and the exit code is 6. It
    changes nothing. Files of the optimizer state it compares with their checksums.

    Args:
        path: A run folder, one of its checkpoints, or a version in its folder weights/.
        engine: Socket of the engine to check; default: that of the run while it is running.
    """
    from slipstream.commands.verify import raise_unless_right
    from slipstream.commands.verify import verify as find

    verdicts = find(Path(path), None if engine is None else Path(engine))
    if json:
        print_json([dataclasses.asdict(verdict) | {"gb_per_s": verdict.gb_per_s} for verdict in verdicts])
    else:
        print_table(
            [
                {
                    "what": verdict.what,
                    "version": verdict.version or None,
                    "digest": verdict.digest or None,
                    "parameters": verdict.num_parameters,
                    "MB": round(verdict.num_bytes / 1e6, 2),
                    "seconds": verdict.seconds,
                    "GB/s": verdict.gb_per_s,
                    "verdict": "differs" if verdict.problems else "not compared" if verdict.note else "the same",
                }
                for verdict in verdicts
            ]
        )
        for verdict in verdicts:
            if verdict.note:
                tell(f"{verdict.what}: {verdict.note}")
    raise_unless_right(verdicts)
    return 0


def trace(
    run: Path,
    sample: str,
    /,
    *,
    token: int | None = None,
    json: Json = False,
) -> int:
    """Show which policy version sampled each token of a rollout, and which version training on it produced.

    The saved rollouts and their ids are in samples.jsonl; run.save_samples sets how many each step saves. Prints the
    rollout's reward and advantage and, for every span of tokens, the version that sampled it (0.38: after 38 steps, in
    a run that was never resumed), that version's digest, whether the engine's fingerprints were verified, and the
    folder that holds it. Reads only the run folder.

    Args:
        run: The run folder.
        sample: Id of a saved rollout: STEP.PLACE.NUMBER, such as 38.0.1, or eval.STEP.PLACE.
        token: Also show this sampled token of the rollout, counted from 0.
    """
    from slipstream.runlog import read_run
    from slipstream.runlog.trace import trace as follow

    found = follow(read_run(Path(run)), sample, token)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        _show_trace(found)
    return 0


def ledger(run: Path, /, *, json: Json = False) -> int:
    """Show where every group of rollouts of a run has ended: trained, dropped or cancelled, with the reason.

    A group is begun once in each attempt of the run, and ends exactly once. Groups that are running, ready or batched
    have not ended: the run is running, or `--resume` goes on with those that are ready. Reads only the run folder.

    Args:
        run: The run folder.
    """
    from slipstream.errors import DataError
    from slipstream.runlog import read_run
    from slipstream.runlog.ledger import balance

    read_run(Path(run))  # refuses a folder that holds no run
    found = balance(Path(run))
    if found is None or not found.num_begun:
        raise DataError(f"{run} has no ledger: name a run of reinforcement learning")
    if json:
        totals = {"num_begun": found.num_begun, "num_open": found.num_open, "ended": found.ended}
        print_json({"entries": [dataclasses.asdict(entry) for entry in found.entries]} | totals)
    else:
        print_table(
            [
                {
                    "state": entry.state,
                    "reason": entry.reason,
                    "groups": entry.num_groups,
                    "sampled tokens": entry.num_tokens,
                }
                for entry in found.entries
            ]
        )
        ended = found.num("trained", "dropped", "cancelled")
        tell(f"{found.num_begun} groups were begun, {ended} have ended and {found.num_open} have not")
        if found.ended:
            tell(f"the last attempt ended {found.ended}")
    return 0


def replay(
    run: Path,
    step: int,
    /,
    *,
    json: Json = False,
) -> int:
    """Train again on a batch that a run has kept, and compare the loss with the one that was recorded.

    For a loss that looks odd: the metrics of step 13 are those of batch 12. A run keeps its last run.keep_batches
    batches, and those that follow the start model and each checkpoint that can be resumed from. The replay loads the
    checkpoint before the batch, or the start model, and trains on all batches from there up to this one, by the run's
    own code: in this process alone, so that a debugger stops in it, and without an engine, rewards or the environment.
    It takes the memory of the trainer.

    Prints the step's training metrics beside the recorded ones. The exit code is 0 where the loss is equal: bit for
    bit on the CPU of the same machine with the same versions, elsewhere to 1e-4 in float32 and 1e-2 in bfloat16,
    relative to the loss or to 1, whichever is larger. A step that ended the run with an error ends the replay with the
    same. It changes nothing in the run folder.

    Args:
        run: The run folder.
        step: The batch, counted from 0: that of the update from version STEP to STEP + 1.
    """
    from slipstream.commands.replay import raise_unless_equal
    from slipstream.commands.replay import replay as train_again

    found = train_again(Path(run), step)
    if json:
        metrics = {each.name: dataclasses.asdict(each) | {"difference": each.difference} for each in found.metrics}
        print_json(dataclasses.asdict(found) | {"metrics": metrics, "is_exact": found.is_exact})
    else:
        _show_replay(found)
    raise_unless_equal(found)
    return 0


def _show_replay(found: Replay) -> None:
    last = found.batches[-1]
    through = f"batch {last}" if len(found.batches) == 1 else f"batches {found.batches[0]} to {last}"
    tell(f"batch {found.step}, the update from version {found.step} to {found.step + 1}")
    tell(f"trained again on {through}, from {found.begins}, by {found.replayed_by}")
    if found.made_by != found.replayed_by:
        tell(f"the run was made by {found.made_by}")
    if found.no_signal:
        tell(f"the batch teaches nothing: {found.no_signal}")
    print_table(
        [
            {
                "metric": each.name,
                "recorded": None if each.recorded is None else repr(each.recorded),
                "replayed": None if each.replayed is None else repr(each.replayed),
                "difference": each.difference,
            }
            for each in found.metrics
        ]
    )
    if found.is_recorded and not found.wrong:
        how = "bit for bit" if found.is_exact else f"to {found.tolerance:g}"
        tell(f"the loss is the recorded one, {how}")


def _show_trace(found: Trace) -> None:
    kind = "batch" if found.split == "train" else "evaluation"
    tell(f"rollout {found.id} of task {found.task}, {kind} of step {found.step}, {found.outcome}")
    facts = [f"reward {found.reward:g}" if found.reward is not None else ""]
    facts.append(f"advantage {found.advantage:+.4g}" if found.advantage is not None else "")
    facts.append("left out of the loss" if found.carries_loss is False else "")
    facts.append(f"trained on: made version {found.update}" if found.update else "")
    facts.append(f"loss of the batch {found.loss:.4g}" if found.loss is not None else "")
    tell("; ".join(filter(None, facts)))
    if found.note:
        tell(found.note)
    if found.spans:
        print_table(
            [
                {
                    "sampled tokens": f"{span.first} to {span.first + span.end - span.start - 1}",
                    "of request": span.request,
                    "of sequence": span.sequence,
                    "positions": f"{span.start} to {span.end - 1}",
                    "version": span.version,
                    "mean log-probability": span.mean_logprob,
                }
                for span in found.spans
            ]
        )
    if found.token is not None:
        token = found.token
        logprob = "unknown" if token.logprob is None else f"{token.logprob:.6g}"
        tell(
            f"token {token.number}: id {token.token_id} at position {token.position} of sequence {token.sequence}, "
            f"request {token.request}, log-probability {logprob}, made by version {token.version}"
        )
    for version in found.versions:
        proof = "proved in the engine" if version.verified else "no proof in the engine was written"
        tell(f"version {version.name}: digest {version.digest or 'unknown'}, {proof}")
        tell(f"  held by {version.held_by}" if version.held_by else f"  {version.note}")
