"""Metrics besides the loss's and the optimizer's: of rollouts, of the probe, and of held-out sequences."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from torch import Tensor

from slipstream import records
from slipstream.algo.balancing import runs
from slipstream.errors import MismatchError, TrainingError
from slipstream.runlog import ROLLOUT_COUNTS, ROLLOUT_FLAGS
from slipstream.trainer.learner import Scores

_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
_FITS, _GROWS, _JUMPS, _GROWN = 0.1, 3.0, 3.0, 1.5
"""Bounds of `explain_difference`: the most left of it under other parameters, as a fraction; and the least growth over
the first quarter, over the version before and over the first version, as multiples."""
_HIGHEST_EXPONENT = 700.0
"""Beyond it the exponential is no float64."""
_OF_THE_RUN = ("mean", "std", "min", "max", "signal_fraction", "drawn_mean")
"""Metrics of every run below `reward/`; a reward's own number of such a name is below `reward/own/`."""


def any_cut(metrics: Mapping[str, float]) -> bool:
    """Whether importance sampling or clipping zeroed any token's gradient; weights can also underflow in float32."""
    shares = (value for name, value in metrics.items() if name.startswith(("clip_fraction", "importance_capped")))
    return any(share > 0.0 for share in shares) or metrics.get("importance_weight") == 0.0


def rollout_metrics(batch: records.Batch) -> dict[str, float]:
    """Metrics of a batch before training: rewards, lengths in tokens, outcomes."""
    rollouts = [rollout for rollout in batch.rollouts if rollout.outcome in records.TRAINABLE_OUTCOMES]
    dropped = Counter(batch.dropped)
    dropped["no_tokens"] += sum(not rollout.num_sampled for rollout in rollouts)
    metrics = {f"dropped/{reason}": float(count) for reason, count in dropped.items() if count}
    if not rollouts:
        return metrics
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [rollout.num_sampled for rollout in rollouts]
    metrics |= _of_components(rollouts)
    metrics |= {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/length": statistics.fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_fraction": statistics.fmean(r.outcome == "truncated" for r in rollouts),
        "rollout/num": float(len(rollouts)),
        "tokens/trained": float(sum(lengths)),
    }
    stops = Counter(rollout.stop for rollout in rollouts if rollout.stop)
    metrics |= {f"rollout/stop_{stop}_fraction": count / len(rollouts) for stop, count in stops.items()}
    if any(rollout.num_turns > 1 for rollout in rollouts):
        metrics["rollout/turns"] = statistics.fmean(rollout.num_turns for rollout in rollouts)
    if any(thinking := [rollout.num_thinking for rollout in rollouts]):
        metrics["rollout/thinking_length"] = statistics.fmean(thinking)
    return metrics | _by_task(rollouts, batch.metrics, batch.step)


def _of_components(rollouts: Sequence[records.Rollout]) -> dict[str, float]:
    """Numbers of rewards and environments: counts are summed up, others averaged over the rollouts with one. A flag is
    a share of the rollouts seen by the named part of a rubric."""
    counts, values = dict.fromkeys(ROLLOUT_COUNTS, 0.0), dict[str, list[float]]()
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            kind = name.rpartition("/")[2]
            if not math.isfinite(value):
                counts[records.NON_FINITE] += 1
            elif kind in ROLLOUT_COUNTS:
                counts[kind] += value
            else:
                values.setdefault(name, []).append(value)
    found = {f"reward/{kind}": count for kind, count in counts.items() if count}
    for name, own in values.items():
        part, _, kind = name.rpartition("/")
        size = sum(_saw(part, rollout) for rollout in rollouts) if kind in ROLLOUT_FLAGS else len(own)
        found[f"reward/own/{name}" if name in _OF_THE_RUN else f"reward/{name}"] = math.fsum(own) / size
    return found


def _saw(part: str, rollout: records.Rollout) -> bool:
    """Whether a part of a rubric has graded a rollout or abstained; without a name it is the only one."""
    return not part or any(name == part or name.startswith(f"{part}/") for name in rollout.metrics)


def skipped_batch(batch: records.Batch, metrics: Mapping[str, float]) -> dict[str, float]:
    """The changes in a batch's metrics if nothing is trained on it."""
    tokens = metrics.get("tokens/trained")
    if tokens is None:
        return {}
    return {
        "tokens/trained": 0.0,
        "dropped/skipped": metrics["rollout/num"],
        "dropped_groups/skipped": float(len({rollout.group_id for rollout in batch.rollouts})),
        "dropped_tokens/skipped": tokens,
    }


def _by_task(rollouts: list[records.Rollout], counts: Mapping[str, float], step: int) -> dict[str, float]:
    """Metrics of each task with groups counted by the orchestrator: a mixture's parts, data sources."""
    metrics: dict[str, float] = {}
    total = sum(rollout.num_sampled for rollout in rollouts)
    by_task: dict[str, list[records.Rollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.source, []).append(rollout)
    for name, own in by_task.items():
        prefix = f"task/{name}"
        if not (drawn := counts.get(f"{prefix}/drawn_groups")):
            continue
        lengths = [rollout.num_sampled for rollout in own]
        metrics |= {
            f"{prefix}/reward_mean": statistics.fmean(rollout.reward for rollout in own),
            f"{prefix}/signal_fraction": counts[f"{prefix}/signal_groups"] / drawn,
            f"{prefix}/length": statistics.fmean(lengths),
            f"{prefix}/truncated_fraction": statistics.fmean(rollout.outcome == "truncated" for rollout in own),
            f"{prefix}/tokens_fraction": sum(lengths) / max(1, total),
        }
        ages: Counter[int] = Counter()
        for rollout in own:
            for sequence in rollout.sequences:
                ages.update(sequence.ages(step))
        if num_tokens := sum(ages.values()):
            metrics[f"{prefix}/staleness"] = sum(age * count for age, count in ages.items()) / num_tokens
    return metrics


def logprob_differences(sequence: records.Sequence, logprobs_N: Tensor) -> list[float]:
    """Absolute differences, in nats, between the engine's log-probabilities of a sequence's N trainable tokens and the
    trainer's. Raises TrainingError when the engine returned none."""
    if sequence.logprobs is None:
        raise TrainingError("the engine's probe came without log-probabilities: it must return those of sampled tokens")
    return [abs(a - b) for a, b in zip(_trained(sequence), logprobs_N.tolist(), strict=True)]


def refuse_difference(difference: float, where: str) -> None:
    """Raise MismatchError unless engine and trainer are equal, as `run.exact` promises. `where`: a version or step."""
    if difference != 0.0:
        raise MismatchError(
            f"engine and trainer differ by {difference:.3g} in log-probability per token at {where}, and run.exact = "
            "true allows no difference: report it with the run folder, or remove run.exact"
        )


OTHER_BITS = "under model.shared_kernels there should be none: report it with the run folder, or set it to false"
"""Advice on a difference within rounding."""


def explain_difference(
    forward: Callable[[list[records.Sequence], records.SamplingParams], Scores],
    sequences: list[records.Sequence],
    sampling: records.SamplingParams,
    earlier: tuple[float, float] | None,
) -> str:
    """The likely cause of a large difference between engine and trainer, as the end of a sentence: other sampling
    parameters, another embedding of positions, other weights, or rounding. `forward` computes the trainer's
    log-probabilities under given parameters; it is called a dozen times. `earlier`: means of the run's first probe and
    of the last one."""

    def differences(under: records.SamplingParams) -> list[list[float]]:
        ours = forward(sequences, under).logprobs
        return [logprob_differences(sequence, own) for sequence, own in zip(sequences, ours, strict=True)]

    found = differences(sampling)
    mean = _mean(found)
    if math.isnan(mean):
        return "some log-probabilities are no numbers: look at the engine's log"
    for name, under in _other_parameters(sampling):
        if (left := _mean(differences(under))) < _FITS * mean:
            return f"{name} leaves {left:.2g}: the engine draws with other parameters than [sampling] says"
    if math.isinf(mean):
        return "the engine draws tokens that [sampling] leaves out"
    sizes = [max(1, len(values) // 4) for values in found]
    early = _mean([values[:size] for values, size in zip(found, sizes, strict=True)])
    late = _mean([values[-size:] for values, size in zip(found, sizes, strict=True)])
    if late > _GROWS * early:
        return (
            f"it grows with the position, from {early:.2g} in the first quarter of the tokens to {late:.2g} in the "
            "last: the two embed positions differently (rope parameters, inference.max_model_len)"
        )
    first, before = earlier or (None, None)
    if before is not None and mean > _JUMPS * before:
        return (
            f"it was {before:.3g} at the version before: the engine computes with other weights (`slipstream verify`)"
        )
    if first is not None and mean > _GROWN * first:
        return (
            f"it has grown from {first:.3g} at first: rounding counts more as the policy becomes sharper "
            '(model.fp32_head, model.fp32_residual, model.dtype = "float16")'
        )
    since = "" if first is None else " and was from the first version on"
    return f"it is as large everywhere{since}: other weights or another computation (`slipstream verify`), or rounding"


def _mean(values: list[list[float]]) -> float:
    return statistics.fmean(each for part in values for each in part)


def _other_parameters(sampling: records.SamplingParams) -> Iterator[tuple[str, records.SamplingParams]]:
    whole = msgspec.structs.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    if whole != sampling:
        yield "the whole vocabulary, without top_p, top_k and min_p,", whole
    for temperature in _TEMPERATURES:
        if temperature != sampling.temperature:
            yield f"temperature {temperature:g}", msgspec.structs.replace(whole, temperature=temperature)


def _trained(sequence: records.Sequence) -> list[float]:
    """The engine's log-probabilities of the trainable tokens."""
    return [value for value, trained in zip(sequence.logprobs or [], sequence.mask, strict=True) if trained]


def prompt_of(sequence: records.Sequence) -> list[int]:
    """The tokens before the first sampled one."""
    length = sequence.mask.index(True) if True in sequence.mask else len(sequence)
    return sequence.token_ids[:length]


def worst_engine_mean(differences: list[list[float]], num_engines: int) -> float:
    """The largest mean difference of any engine, or NaN if one's is NaN. `differences`: per sequence; each engine has
    equally many sequences, one engine after the other."""
    each = -(-len(differences) // num_engines)
    parts = [differences[start : start + each] for start in range(0, len(differences), each)]
    means = [statistics.fmean(value for values in part for value in values) for part in parts]
    return next((mean for mean in means if math.isnan(mean)), max(means))


def held_out_loss(
    forward: Callable[[list[records.Sequence]], Scores],
    sequences: Iterable[records.Sequence],
    tokens_at_once: int,
    on_measured: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """The mean cross-entropy of all trainable tokens, in nats, as SFT's loss has it for a batch; and its exponential.
    `tokens_at_once` bounds the tokens of the sequences in one call of `forward`; `on_measured` gets their number."""
    total, count = 0.0, 0
    for part in runs(sequences, len, tokens_at_once):
        for logprobs_N in forward(part).logprobs:
            total -= logprobs_N.double().sum().item()
            count += len(logprobs_N)
        on_measured(len(part))
    loss = total / count
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, _HIGHEST_EXPONENT))}
