"""Kept results of `slipstream eval`: an evaluation in the form of `runlog.evaluations`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slipstream.commands.evaluation_target import Target
from slipstream.config import RunConfig
from slipstream.config.environment import GradedText
from slipstream.config.parse.keys import as_table
from slipstream.errors import ConfigError
from slipstream.orchestrator.evaluate import Evaluation, is_right, vote_of
from slipstream.records import Rollout, SamplingParams, Task
from slipstream.runlog.evaluations import KeptEvaluation, KeptSample, KeptTask, new_place, prompt_digest, refuse_taken
from slipstream.runlog.redaction import hide_userinfo, redact


def place_of(target: Target, out: Path | None) -> Path | None:
    """The file to keep results in: `out`, or a new one in the folder of the weights' run; None if
    there is neither. Raises `ConfigError` if it cannot be made."""
    if out is None and target.run is not None:
        if not os.access(target.run, os.W_OK):
            raise ConfigError(f"{target.run} cannot be written to, and keeps the results: give --out FILE")
        return new_place(target.run)
    if out is not None:
        refuse_taken(out)
    return out


def kept(
    evaluation: Evaluation,
    tasks: Sequence[Task],
    config: RunConfig,
    sampling: SamplingParams,
    model: str,
    *,
    has_tokens: bool = True,
) -> KeptEvaluation:
    """The record of an evaluation. Secrets in the settings and user information in the address are left out.
    `has_tokens`: whether the tokens of its rollouts are the model's."""
    section, given = config.environment, config.evaluation
    assert section is not None
    assert given is not None
    size = evaluation.samples_per_task
    settings: dict[str, Any] = {
        "environment.name": section.name,
        "environment.settings": section.settings,
        "environment.seed": section.seed,
        "environment.system_prompt": section.system_prompt,
        **({"environment.num_examples": section.num_examples} if section.num_examples else {}),
        **({"environment.graded_text": section.graded_text} if section.graded_text != "all" else {}),
        **({"environment.mixture": as_table(section.mixture)} if section.mixture else {}),
        "evaluation.num_tasks": len(tasks),
        "evaluation.samples_per_task": size,
        "evaluation.threshold": given.threshold,
        "evaluation.seed": given.seed,
        **{
            f"sampling.{name}": getattr(sampling, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")
        },
    }
    held = [
        KeptTask(
            task.id,
            task.source,
            prompt_digest(task.prompt),
            task.prompt[-1].content if task.prompt else "",
            task.answer,
            [
                _kept_sample(rollout, task, given.threshold, section.graded_text, has_tokens=has_tokens)
                for rollout in evaluation.rollouts[index * size : (index + 1) * size]
            ],
        )
        for index, task in enumerate(tasks)
    ]
    shown = cast("dict[str, Any]", redact(settings))
    return KeptEvaluation(
        model=hide_userinfo(model), time=time.time(), settings=shown, metrics=evaluation.metrics(), tasks=held
    )


def _kept_sample(
    rollout: Rollout, task: Task, threshold: float, graded_text: GradedText, *, has_tokens: bool
) -> KeptSample:
    has_text = bool(rollout.completion) and task.answer is not None
    return KeptSample(
        rollout.completion,
        rollout.reward,
        is_right(rollout, threshold),
        rollout.outcome,
        rollout.metrics,
        vote_of(rollout.completion, task.answer or "", graded_text) if has_text else None,
        rollout.num_sampled if has_tokens else None,
        hide_userinfo(rollout.error),
    )
