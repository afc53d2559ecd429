"""Batches of rollout matching: by the step's channel, written answers or rollouts with what they missed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from slipstream.errors import TrainingError
from slipstream.plugins import Material, SFTReader
from slipstream.records import TRAINABLE_OUTCOMES, Batch, Rollout, Version
from slipstream_matching.coordinates import AnswerTokens
from slipstream_matching.figures import DetectionCounts
from slipstream_matching.schedule import rollout_seed
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import Matched, matched

_WATCHED = 10
"""Steps of channel B over which invalid rollouts are counted."""


class MatchingReader:
    """See the module and the loop's `Reader`; batches depend on the step, and on the weights where those roll out."""

    def __init__(self, config: MatchingConfig, tokens: AnswerTokens, material: Material) -> None:
        self._config, self._tokens, self._material = config, tokens, material
        self._written = SFTReader(material.examples, material.items_of_step)
        self._invalid: deque[tuple[DetectionCounts, list[str]]] = deque(maxlen=_WATCHED)

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`. Raises `TrainingError` beyond `matching.max_invalid`."""
        if self._config.channel_of(step) == "A":
            batch = self._written.take(step)
            batch.metrics |= {"stage2/channel_a": 1.0, "stage2/channel_b": 0.0}
            return batch
        material = self._material
        assert material.roll_out is not None, "channel B has an engine"
        items, seed = material.items_of_step(step), rollout_seed(material.config.run.seed, step)
        begun = time.monotonic()
        rollouts = material.roll_out(step, items, seed=seed, temperature=self._config.temperature)
        generated_s = time.monotonic() - begun
        if len(rollouts) != len(items):
            raise TrainingError(f"{len(rollouts)} rollouts of {len(items)} tasks came at step {step}: report this")
        material.on_rollouts(step, rollouts)
        usable = [place for place, rollout in enumerate(rollouts) if rollout.outcome in TRAINABLE_OUTCOMES]
        begun = time.monotonic()
        found = matched(
            [rollouts[place] for place in usable],
            [material.tasks[items[place]] for place in usable],
            self._tokens,
            self._config,
            material.context_length,
        )
        self._watch(step, found)
        metrics = self._metrics(found, rollouts, seed, generated_s)
        metrics["time/rollout_parse_match_s"] = time.monotonic() - begun
        dropped = Counter(rollout.outcome for rollout in rollouts if rollout.outcome not in TRAINABLE_OUTCOMES)
        metrics |= {f"dropped/{outcome}": float(count) for outcome, count in dropped.items()}
        return Batch(step, Version(0, step), found.rollouts, dropped={**dropped}, metrics=metrics)

    def _metrics(self, found: Matched, rollouts: Sequence[Rollout], seed: int, generated_s: float) -> dict[str, float]:
        temperature, num_tokens = self._config.temperature, sum(rollout.num_sampled for rollout in rollouts)
        return {
            "stage2/channel_a": 0.0,
            "stage2/channel_b": 1.0,
            **found.metrics(),
            "rollout/seed_base": float(seed),
            "rollout/backend_vllm": 1.0,
            "rollout/decode_mode_greedy": float(temperature == 0.0),
            "rollout/do_sample": float(temperature > 0.0),
            "rollout/temperature": temperature,
            "rollout/max_new_tokens": float(self._material.config.sampling.max_tokens),
            "rollout/gen_new_tokens_mean": num_tokens / len(rollouts),
            "rollout/gen_tokens_per_s": num_tokens / max(generated_s, 1e-9),
            "time/rollout_generate_s": generated_s,
        }

    def _watch(self, step: int, found: Matched) -> None:
        """End the run where too many of the last rollouts were invalid."""
        self._invalid.append((found.counts, found.invalid))
        limit = self._config.max_invalid
        if len(self._invalid) < _WATCHED:
            return
        invalid = sum(counts.invalid for counts, _ in self._invalid)
        samples = sum(counts.samples for counts, _ in self._invalid)
        if invalid > limit * samples:
            shown = [text for _, texts in self._invalid for text in texts][-3:]
            raise TrainingError(
                f"{invalid} of the {samples} rollouts of the last {_WATCHED} steps of channel B hold nothing that can "
                f"be kept, more than matching.max_invalid = {limit:g} allows at step {step}: train with channel A "
                f"first, or raise sampling.max_tokens; the last ones: {', '.join(map(repr, shown))}"
            )
