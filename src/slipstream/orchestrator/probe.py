"""The engine's half of the probe: every engine samples completions of a few fixed prompts, exactly as for rollouts.

The trainer computes log-probabilities of the same tokens with the same version of the weights. Any difference is
numerics, or an engine with other weights than it reports; the policy is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from slipstream.engine_protocols import Generates
from slipstream.errors import EngineError, IntegrityError
from slipstream.orchestrator.concurrency import all_of, retry_on_restart
from slipstream.orchestrator.rollouts import mismatch_of, seed_of
from slipstream.records import GenerateRequest, Media, SamplingParams
from slipstream.records import Sequence as TokenSequence


class ProbePrompt(NamedTuple):
    """A prompt of the probe."""

    token_ids: list[int]
    media: tuple[Media, ...] = ()
    asked: tuple[list[int], tuple[bytes, ...]] | None = None
    """The engine's request: tokens with one placeholder for each image, and the images; None: the tokens."""


class Probe:
    """Samples completions of fixed prompts with fixed seeds."""

    def __init__(
        self,
        engine: Generates,
        prompts: Sequence[ProbePrompt],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens))
        self._seed = seed
        self._timeout_s = timeout_s
        self._round = 0

    async def sample(self) -> list[TokenSequence]:
        """Return prompt and sampled tokens with the engine's log-probabilities: all sequences of one engine, then of
        the next."""
        found = await all_of(self._sample(engine) for engine in self._engine.each)
        return [sequence for sequences in found for sequence in sequences]

    async def _sample(self, engine: Generates) -> list[TokenSequence]:
        completions = await retry_on_restart(engine, lambda: all_of(map(engine.generate, self._requests())))
        sequences: list[TokenSequence] = []
        for prompt, completion in zip(self._prompts, completions, strict=True):
            if completion.finish_reason == "abort" or completion.logprobs is None:
                raise EngineError(f"the probe got no log-probabilities: {completion.error or 'none were returned'}")
            if not completion.token_ids:
                raise EngineError("the engine sampled no token of the probe: there is nothing to verify it by")
            if prompt.media and completion.prompt_ids != prompt.token_ids:
                raise IntegrityError(f"in the probe {mismatch_of(completion, prompt.token_ids)}")
            num_prompt, num_sampled = len(prompt.token_ids), len(completion.token_ids)
            sequences.append(
                TokenSequence(
                    token_ids=[*prompt.token_ids, *completion.token_ids],
                    mask=[False] * num_prompt + [True] * num_sampled,
                    logprobs=[0.0] * num_prompt + completion.logprobs,
                    versions=completion.versions,
                    media=list(prompt.media),
                    experts=completion.experts,
                )
            )
        return sequences

    def _requests(self) -> list[GenerateRequest]:
        """Requests with new ids: an earlier attempt's may still be running."""
        self._round += 1
        return [
            GenerateRequest(
                id=f"probe.{self._round}.{index}",
                prompt_ids=token_ids,
                sampling=self._sampling,
                seed=seed_of(self._seed, index),
                timeout_s=self._timeout_s,
                is_urgent=True,
                images=images,
            )
            for index, (token_ids, images) in enumerate(each.asked or (each.token_ids, ()) for each in self._prompts)
        ]
