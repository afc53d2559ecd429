"""The bodies of Atropos' API (`atroposlib` 0.4), checked as `run-api` checks them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, field_validator


class Registration(BaseModel):
    """A trainer's."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class RegisterEnv(BaseModel):
    """An environment's."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    """Names an environment."""

    env_id: int


class ScoredData(BaseModel):
    """A group. Lists have one entry for each sequence; inner lists one for each token."""

    tokens: list[list[int]]
    masks: list[list[int]]
    """-100, or the token where it is trained on."""
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    """1.0 where there is none."""
    overrides: list[dict[Any, Any]] | None = None
    group_overrides: dict[Any, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    """The teacher's likeliest tokens at each place."""
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _have_role_and_content(cls, messages: Any) -> Any:
        for each in messages or ():
            for message in each:
                if "role" not in message or "content" not in message:
                    raise ValueError("Message must have 'role' and 'content' fields")
        return messages
