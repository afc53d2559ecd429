"""The way in for groups of Atropos: the run's own API, or the poll of a `run-api`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.atropos.environments import Environments, Holding
from slipstream.atropos.groups import Refused, Terms, rollouts_of
from slipstream.atropos.protocol import Registration, ScoredData
from slipstream.config import PlannedConfig, SFTConfig, needs_engine_logprobs
from slipstream.config.addresses import url_of
from slipstream.config.atropos import AtroposSettings
from slipstream.config.traits import asks_teacher
from slipstream.errors import ConfigError
from slipstream.inference.engine import RunEngine
from slipstream.inference.lending import KEY_VARIABLE, ServerFacts
from slipstream.orchestrator.batches.arrivals import Arrivals
from slipstream.orchestrator.concurrency import task_group
from slipstream.orchestrator.versions import Versions
from slipstream.progress import Progress
from slipstream.records import Rollout
from slipstream.runlog import EventLog

if TYPE_CHECKING:
    from slipstream.http_listener import Listener

_FAREWELL_S = 2.0
_LOOK_S = 1.0
Count = Callable[[str, Sequence[Rollout]], None]


class Entrance:
    """The way in: `open` it with the engine, `run` it during the run, `stop` it at the end."""

    def __init__(
        self,
        config: PlannedConfig,
        settings: AtroposSettings,
        engine: RunEngine,
        versions: Versions,
        log: EventLog,
        progress: Progress,
        *,
        servers: Sequence[ServerFacts],
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        count: Count,
    ) -> None:
        """`servers`: those of the plan. `decode`: the text of tokens. `count` gets the reason and the rollouts of each
        dropped group."""
        assert config.environment is not None
        assert not isinstance(config.algorithm, SFTConfig)
        self._config, self._settings, self._servers = config, settings, servers
        self._engine, self._versions, self._log, self._progress, self._count = engine, versions, log, progress, count
        self._patience_s = config.environment.run_timeout_s
        self._token = token_of(settings)
        self._api: Listener | None = None
        self._told = set[str]()
        self._is_ending = False
        group_size = config.algorithm.group_size
        size = config.training.prompts_per_batch
        self.arrivals = Arrivals(
            lambda: versions.current,
            capacity=(config.training.staleness + 1) * size,
            patience_s=self._patience_s,
            whom=f"from {settings.url}: look at its environments"
            if settings.url
            else "to the run's API: start an environment (`python PROGRAM serve`) with the printed addresses",
            on_drop=self._drop,
        )
        self._terms = Terms(
            max_tokens=config.inference.max_model_len,
            vocab_size=vocab_size,
            temperature=config.sampling.temperature,
            needs_logprobs=needs_engine_logprobs(config.algorithm),
            needs_teacher=config.teacher is not None and not asks_teacher(config),
            decode=decode,
        )
        self._registration = Registration(
            wandb_group=config.run.name or log.folder.name,
            wandb_project="slipstream",
            batch_size=size * group_size,
            max_token_len=config.inference.max_model_len,
            checkpoint_dir=str(log.folder / "atropos"),
            save_checkpoint_interval=-1,
            starting_step=0,
            num_steps=config.training.steps,
        )
        self._environments = Environments(size * group_size, group_size, on_change=self._tell_change)

    async def open(self, model_urls: Sequence[str]) -> None:
        """Listen, unless a `run-api` does, and tell the addresses. Environments wait for `run`."""
        settings, url = self._settings, self._settings.url
        if not url:
            from slipstream.atropos.api import Desk, serve

            self._desk = Desk(
                self._registration, self._environments, take_in=self._take_in, held=self._held, step=self._step
            )
            self._desk.has_registered = True
            self._api = await serve(self._desk, host=settings.host, port=settings.port, token=self._token)
            url = url_of(settings.host, self._api.port)
        command = self._command(url, model_urls)
        self._log.event("atropos", api=url, models=list(model_urls), command=command)
        self._progress.message(f"to start an environment of Atropos: {command}")

    def _command(self, url: str, model_urls: Sequence[str]) -> str:
        """The command for a program, with the first engine."""
        model, variable = self._config.model.path, self._settings.token_variable
        if variable and not self._settings.url:
            url = url.replace("://", f"://:${variable}@")
        names = model
        if servers := self._servers:
            names, variable = servers[0].model, KEY_VARIABLE if servers[0].needs_key else ""
            names += f" --openai.tokenizer_name {model}"  # by default it is the model's name
        return (
            f"python PROGRAM serve --env.rollout_server_url {url} --env.tokenizer_name {model} "
            f"--env.total_steps {self._config.training.steps} --openai.server_type vllm --openai.model_name {names} "
            f"--openai.api_key {f'${variable}' if variable else 'none'} --openai.base_url {model_urls[0]}/v1"
        )

    async def run(self, first: int) -> None:
        """Let environments in, from step `first` on, until cancelled."""
        await self._versions.wait_for(first)
        if self._api is not None:
            self._desk.has_started = True
        async with task_group() as tasks:
            tasks.create_task(self._keep_engines())
            if self._api is None:
                tasks.create_task(self._poll(first))
            await asyncio.Event().wait()

    async def _keep_engines(self) -> None:
        """Find dead engines and lost servers, as the run itself asks them nothing. Without them no group can come."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._engine.is_up:
                continue
            revival = asyncio.create_task(self._engine.revive())
            try:
                while not (await asyncio.wait([revival], timeout=_LOOK_S))[0]:
                    self.arrivals.wait_anew()
            finally:
                revival.cancel()
            await revival
            self.arrivals.wait_anew()

    async def _poll(self, first: int) -> None:
        from slipstream.atropos.run_api import RunApi

        await RunApi(
            self._settings.url,
            self._registration.model_copy(update={"starting_step": first}),
            token=self._token,
            patience_s=self._patience_s,
            is_wanted=lambda: self.arrivals.num_wanted > 0,
            take_in=self._take_in,
            warn=self._log.warning,
        ).run()

    async def stop(self) -> None:
        """Let nobody in any more. Environments have a moment to see the last step."""
        if self._api is None:
            return
        self._is_ending, began = True, time.monotonic()
        while time.monotonic() < began + _FAREWELL_S and not self._environments.have_asked_since(began):
            await asyncio.sleep(0.05)
        await self._api.close()

    def _take_in(self, data: ScoredData, name: str) -> None:
        """A group has come. Raises `Refused`."""
        try:
            if self.arrivals.is_full:
                raise Refused("full", "too many groups wait to be trained on: send less")
            rollouts = rollouts_of(data, self._terms, name)
        except Refused as refused:
            self._count(refused.reason, ())
            self._warn_once(refused.reason, f"a group of {name or 'Atropos'} is not trained on: {refused}")
            raise
        self.arrivals.offer(rollouts, data.env_id)

    def _drop(self, reason: str, rollouts: Sequence[Rollout]) -> None:
        staleness = self._config.training.staleness
        self._count(reason, rollouts)
        self._warn_once(
            reason,
            f"a group came for an earlier version than training.staleness = {staleness} allows and is not trained on: "
            f"give environments --env.max_batches_offpolicy {staleness + 1}, or raise it",
        )

    def _warn_once(self, reason: str, text: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._log.warning(f"{text} (later ones are counted as dropped_groups/{reason})")

    def _held(self) -> tuple[list[Holding], int]:
        held = [(each.maker, len(each.rollouts)) for each in self.arrivals.held]
        return held, self.arrivals.num_held - len(held)

    def _step(self) -> int:
        """Environments end beyond their last step: they see one more after the run's."""
        step = max(0, self._versions.released)
        return step + (self._is_ending and step >= self._registration.num_steps)

    def _tell_change(self, name: str, change: str) -> None:
        self._log.event("atropos_environment", name=name, change=change)


def token_of(settings: AtroposSettings) -> str:
    """Raises `ConfigError` for a variable without a value."""
    if not settings.token_variable:
        return ""
    if not (token := os.environ.get(settings.token_variable, "")):
        raise ConfigError(
            f"environment.settings.token_variable: {settings.token_variable} is not set: put the token into it"
        )
    return token
