"""The run folder's records of rollouts and of published versions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.processes.files import disk_errors, write_whole
from slipstream.records import Message, Rollout, Sequence, Ticket
from slipstream.runlog.files import Row, Rows, read_record

TICKETS = "tickets"
_MAX_ERROR = 20_000
"""Characters of an error's end."""
_IF_ANY = {
    *("source", "answer", "metrics", "stop", "error", "turn_rewards", "num_turns", "turns", "turn_spans", "images"),
}
"""Fields of a sample, left out if empty."""
_KEEP_TICKETS = 2
"""A receiver may still hold the version before the latest."""


def sample_of(rollout: Rollout, step: int, version: str, **fields: Any) -> Row:
    """A line of `samples.jsonl`: text to read, and for `slipstream trace` every token with its version."""
    row = {
        "step": step,
        **fields,
        "id": sample_id(rollout.id, step),
        "task": rollout.task_id,
        "source": rollout.source,
        "prompt": rollout.prompt,
        "answer": rollout.answer,
        "completion": rollout.completion,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "outcome": rollout.outcome,
        "stop": rollout.stop,
        "error": rollout.error[-_MAX_ERROR:],
        "turn_rewards": rollout.turn_rewards,
        "num_turns": rollout.num_turns if rollout.num_turns > 1 else None,
        "turns": [_turn_of(message) for message in rollout.turns],
        "images": _images_of(rollout),
        "turn_spans": rollout.turn_spans if len(rollout.turn_spans) > 1 else [],
        "version": version,
        "sequences": [_tokens_of(sequence) for sequence in rollout.sequences],
    }
    return {name: value for name, value in row.items() if value or name not in _IF_ANY}


def _turn_of(message: Message) -> Row:
    calls = {"tool_calls": list(message.tool_calls)} if message.tool_calls else {}
    return {"role": message.role, "content": message.content, **calls}


def _images_of(rollout: Rollout) -> Rows:
    """The images of a rollout, in their order. The bytes of a `data:` URI are left out: every sample would have
    them again."""
    found = {media.sha256: media for sequence in rollout.sequences for media in sequence.media}
    return [
        {
            **({} if media.uri.startswith("data:") else {"uri": media.uri}),
            "sha256": media.sha256,
            "width": media.width,
            "height": media.height,
        }
        for media in found.values()
        if media.kind == "image"
    ]


def sample_id(rollout_id: str, step: int) -> str:
    """Id of a kept rollout: `STEP.PLACE.NUMBER` in a batch; `eval.STEP.PLACE` for a held-out one, whose rollout id is
    `eval.PLACE` in every evaluation; of several samples of a task PLACE ends with `-NUMBER`."""
    kind, _, place = rollout_id.partition(".")
    return f"eval.{step}.{place}" if kind == "eval" and place.replace("-", "", 1).isdigit() else rollout_id


def _tokens_of(sequence: Sequence) -> Row:
    """`sampled` are the ranges [start, end) of sampled tokens; `versions` are the versions with the positions from
    which they sampled; log-probabilities, and advantages where each token has its own, are those of the sampled
    tokens."""
    logprobs = itertools.compress(sequence.logprobs or (), sequence.mask)
    advantages = [round(value, 4) for value in sequence.values("advantages") or ()]
    return {
        "token_ids": sequence.token_ids,
        "sampled": list(_runs(sequence.mask)),
        "versions": [[span.start, span.version] for span in sequence.versions],
        "logprobs": [round(value, 6) for value in logprobs],
        **({"advantages": advantages} if advantages else {}),
    }


def _runs(mask: list[bool]) -> Iterator[tuple[int, int]]:
    start = 0
    for sampled, run in itertools.groupby(mask):
        end = start + sum(1 for _ in run)
        if sampled:
            yield start, end
        start = end


def are_ranges(sampled: Any, num_tokens: int) -> bool:
    """Whether a sample's `sampled` are ranges of so many tokens, in order."""
    at = 0
    for each in cast("list[Any]", sampled):
        if not isinstance(each, list | tuple) or not all(isinstance(end, int) for end in cast("list[Any]", each)):
            return False
        ends = [at, *cast("list[int]", each)]
        if len(ends) != 3 or ends != sorted(ends):
            return False
        at = ends[2]
    return at <= num_tokens


def keep_ticket(folder: Path, ticket: Ticket, held: int | None = None) -> None:
    """Writes the ticket to the run folder atomically and removes old ones, but for that of step `held` of its
    lineage."""
    tickets = folder / TICKETS
    with disk_errors(tickets):
        tickets.mkdir(mode=0o700, exist_ok=True)
    write_whole(tickets / f"{ticket.version.name}.json", msgspec.json.encode(ticket))
    for old in sorted(tickets.glob("*.json"), key=_place)[:-_KEEP_TICKETS]:
        if _place(old) != (ticket.version.lineage, held):
            old.unlink()


def read_tickets(folder: Path) -> list[Ticket]:
    """The tickets in the run's `folder`, oldest first. Raises `DataError` for a damaged one."""
    paths = sorted((folder / TICKETS).glob("*.json"), key=_place)
    # One that is gone was replaced by a newer one meanwhile.
    return [ticket for path in paths if (ticket := read_record(path, Ticket)) is not None]


def _place(path: Path) -> tuple[int, ...]:
    """Lineage and step, from the version's name."""
    return tuple(int(part) for part in path.stem.split(".") if part.isdecimal())
