"""The teacher of a distillation run: its engine or server, and warnings if policy and teacher are the same.

Guarantees: an engine of this run serves exactly the weights of `teacher.path`, verified by fingerprints of its files
whenever it starts; it is never updated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from slipstream.config import PlannedConfig, SFTConfig
from slipstream.errors import ConfigError
from slipstream.inference.engine import RunEngine
from slipstream.orchestrator.teacher import EngineSource, ServerSource, Source, score
from slipstream.records import Rollout
from slipstream.runlog import EventLog, RunLog

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.weights.base import NamedWeights

_TEXT = "A teacher reads what was written: 12 + 30.5 = 42.5, äöü, 你好!\n"


class RunTeacher:
    """Starts, uses and stops the teacher: an engine process for `teacher.path`, or the server at `teacher.url`."""

    def __init__(
        self, config: PlannedConfig, engine: RunEngine | None, digest: str, tokenizer: ChatTokenizer, log: EventLog
    ) -> None:
        """`engine`: for `teacher.path`, with the `digest` of its weights; None for a server."""
        assert config.teacher is not None
        self._config, self._teacher, self._tokenizer, self._log = config, config.teacher, tokenizer, log
        self.digest = digest
        self._engine = engine
        self._source: Source | None = None

    def launch(self) -> None:
        """Start its engine, if it has one, without waiting."""
        if self._engine is not None:
            self._engine.launch()

    async def start(self) -> None:
        """Wait until the engine or server answers."""
        self._source = await self._connected()

    async def score(self, rollout: Rollout) -> None:
        """See `orchestrator.teacher.score`."""
        assert self._source is not None, "no rollout is made before everything has started"
        await score(self._source, rollout)

    async def _connected(self) -> Source:
        timeout_s, top_k = self._config.inference.request_timeout_s, self._teacher.top_k or 0
        if self._engine is not None:
            health = await self._engine.wait_ready()
            self._log.event("teacher", digest=self.digest, patches=health.patches, vllm_version=health.vllm_version)
            temperature = self._config.sampling.temperature
            return EngineSource(self._engine, temperature=temperature, timeout_s=timeout_s, top_k=top_k)
        assert self._teacher.url is not None
        key = os.environ.get(self._teacher.key_variable, "") if self._teacher.key_variable else ""
        if self._teacher.key_variable and not key:
            raise ConfigError(
                f'teacher.key_variable = "{self._teacher.key_variable}" is not set in the environment: set it to the '
                "server's API key, or leave it out"
            )
        server = self._source = ServerSource(
            self._teacher.url, self._teacher.name, key, timeout_s=timeout_s, top_k=top_k
        )
        await server.connect(_TEXT, self._tokenizer.plain_tokens(_TEXT))
        self._log.event("teacher", url=self._teacher.url)
        return server

    async def stop(self) -> None:
        """Stop the engine, or close the connection."""
        if isinstance(self._source, ServerSource):
            await self._source.close()
        if self._engine is not None:
            await self._engine.stop()

    def kill(self) -> None:
        """Kill the engine at once, from any thread."""
        if self._engine is not None:
            self._engine.kill()


def refuse_itself(config: PlannedConfig, teacher_digest: str, weights: Callable[[], NamedWeights]) -> None:
    """Raise ConfigError when the policy's initial `weights` equal the teacher's, and there is no reward to learn
    from. `teacher_digest`: empty if a server is the teacher."""
    from slipstream.weights.fingerprint import describe, digest

    algorithm = config.algorithm
    if not teacher_digest or isinstance(algorithm, SFTConfig) or algorithm.advantage != "none":
        return
    assert config.teacher is not None
    if digest(describe(weights())) == teacher_digest:
        raise ConfigError(
            f'teacher.path = "{config.teacher.path}" holds exactly the weights that the run starts from, so '
            "there is nothing to learn: give another teacher"
        )


def agreement_warning(log: RunLog) -> Callable[[int, Mapping[str, float | None]], None]:
    """Return a listener to metrics rows. It warns once, when teacher and policy differ no more than engine and trainer
    do on the same policy."""
    warned = False

    def listener(step: int, row: Mapping[str, float | None]) -> None:
        nonlocal warned
        difference, noise = row.get("teacher/abs_difference"), row.get("probe/abs_logprob_diff")
        if warned or difference is None or noise is None or difference > 2 * noise:
            return
        warned = True
        text = (
            f"teacher and policy differ by {difference:.2g} per token in step {step}, and engine and trainer by "
            f"{noise:.2g} on the same policy: the teacher has nothing more to teach"
        )
        log.warning(text, step=step)

    return listener
