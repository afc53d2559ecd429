"""The tokens of kept rollouts, to be coloured by log-probability, advantage, loss mask or version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.report.headline import setting
from slipstream.report.markup import Html, h
from slipstream.runlog import RunRecord, checkpoints_of, samples_with_tokens
from slipstream.runlog.files import Row
from slipstream.runlog.samples import are_ranges

MAX_TOKENS = 60_000
"""Most tokens in a report: those of the latest rollouts that fit."""
Key = tuple[int, str]
"""Step and id of a sample."""


def key_of(sample: Row) -> Key:
    """The key of a sample."""
    return sample["step"], str(sample.get("id", ""))


def token_views(record: RunRecord) -> tuple[dict[Key, Html], str]:
    """For each of the latest rollouts its sequences with a span for each sampled token, none for a run that kept no
    tokens; and a note on what is missing, if anything is."""
    folder, samples = Path(record.summary.folder), samples_with_tokens(record)
    texts: _Texts | None = None
    found: dict[Key, Html] = {}
    left = MAX_TOKENS
    for sample in sorted(samples, key=lambda sample: sample["step"], reverse=True):
        sequences = [each for each in sample.get("sequences") or () if _is_whole(each)]
        size = sum(len(each["token_ids"]) for each in sequences)
        if size and size <= left:
            left -= size
            texts = texts or _Texts(_tokenizer_of(record, folder))
            found[key_of(sample)] = h("div.sequences", [_sequence(each, sample, texts) for each in sequences])
    return found, "" if texts is None or texts.are_known else "Tokens have their ids: no tokenizer can be read."


def _is_whole(sequence: Any) -> bool:
    """Whether it is as `runlog.samples` writes it."""
    if not isinstance(sequence, dict) or not all(isinstance(sequence.get(name), list) for name in _FIELDS):
        return False
    if not are_ranges(sequence["sampled"], len(sequence["token_ids"])):
        return False
    sampled = sum(end - start for start, end in sequence["sampled"])
    return len(sequence["logprobs"]) in (0, sampled)


_FIELDS = ("token_ids", "sampled", "logprobs", "versions")


def _sequence(sequence: Row, sample: Row, texts: _Texts) -> Html:
    ids: list[int] = sequence["token_ids"]
    logprobs, own = iter(sequence["logprobs"]), iter(sequence.get("advantages") or ())
    versions = sorted(sequence["versions"], reverse=True)
    parts: list[Html] = []
    at = 0
    for start, end in sequence["sampled"]:
        if at < start:
            parts.append(h("span.given", texts.of_all(ids[at:start])))
        for place in range(start, end):
            version = next((name for first, name in versions if first <= place), None)
            parts.append(
                h("span", texts.of(ids[place]), data_l=next(logprobs, None), data_v=version, data_a=next(own, None))
            )
        at = end
    if at < len(ids):
        parts.append(h("span.given", texts.of_all(ids[at:])))
    advantage = sample.get("advantage")
    whole = round(advantage, 3) if isinstance(advantage, int | float) else None
    return h(
        "pre.tokens",
        parts,
        hidden=True,
        data_a=whole,
        data_trained="" if sample.get("carries_loss", True) else "no",
    )


def _tokenizer_of(record: RunRecord, folder: Path) -> Path | None:
    """The newest checkpoint's tokenizer, or the start model's; None where neither is there any more."""
    places = [path / "weights" / "tokenizer.json" for path in reversed(checkpoints_of(folder))]
    places.append(Path(setting(record, "model.path")) / "tokenizer.json")
    return next((place for place in places if place.is_file()), None)


class _Texts:
    """Texts of tokens; their ids where there is no tokenizer."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}
        if path is not None:
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # noqa: BLE001 (a damaged file: the library raises its own)
                return

    @property
    def are_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def of(self, token: int) -> str:
        """One token, alone."""
        if token not in self._known:
            self._known[token] = "".join(self._spelled(token))
        return self._known[token]

    def of_all(self, tokens: list[int]) -> str:
        """Several, together."""
        if self._tokenizer is None:
            return "".join(map(self.of, tokens))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _spelled(self, token: int) -> Iterator[str]:
        if self._tokenizer is None:
            yield f"\u27e8{token}\u27e9"
            return
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        # Some decoders take the space of a word's beginning away where nothing stands before it.
        if str(self._tokenizer.id_to_token(token)).startswith("\u2581") and not text.startswith(" "):
            yield " "
        yield text
