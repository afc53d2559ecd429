"""Folders of data: the files of each split and configuration.

Formats: a folder written by `datasets.save_to_disk` (arrow files, one split or several); a folder of parquet or JSON
lines files as in data set repositories (`data/train-00000-of-00002.parquet`, `train/part.parquet`, `test.jsonl`). Its
card, README.md, may describe configurations. Files of several configurations are never read together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, cast

from slipstream.data.files.json_lines import SUFFIXES
from slipstream.errors import DataError, first_line
from slipstream.regular_files import read_regular

FORMS = "a .jsonl or .parquet file, a folder of them, or a folder of datasets.save_to_disk"
_MARKS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\..+")
"""Names of the files of one split, as the library `datasets` writes them."""


class Configurations(NamedTuple):
    """The configurations of a folder."""

    splits: dict[str, dict[str, list[Path]]]
    """The files of each split, by the configuration's name; a folder without any has one with an empty name."""
    default: str = ""
    """The one that the card makes the default, if any."""


def splits_of(folder: Path, setting: str, subset: str) -> dict[str, list[Path]]:
    """The files of each split of a data folder, in order; files whose name has no split are under the empty name.

    If the folder has several configurations, it reads `subset`, or the card's default. Raises `DataError`, also if
    there is neither.
    """
    saved, by_split = folder / "dataset_dict.json", dict[str, list[Path]]()
    if saved.is_file():
        by_split = {str(name): _saved_files(folder / str(name)) for name in _listed(saved, "splits")}
    elif (folder / "state.json").is_file():
        by_split = {"": _saved_files(folder)}
    if by_split:
        found = Configurations({"": by_split})
    else:
        found = configurations_of(folder)
    if not any(found.splits.values()):
        raise DataError(f"{folder} holds no data file: give {FORMS} in {setting}")
    return found.splits[_wanted_configuration(folder, found, subset, setting)]


def subset_of(path: str, subset: str) -> str:
    """`subset` if the folder `path` has such a configuration; otherwise empty. Held-out rows may be in a folder without
    it."""
    folder = Path(path)
    return subset if subset and folder.is_dir() and subset in configurations_of(folder).splits else ""


def _wanted_configuration(folder: Path, found: Configurations, subset: str, setting: str) -> str:
    names = ", ".join(found.splits)
    if subset and subset not in found.splits:
        there = f"only {names}: name one of these" if names else "it has no configurations: leave it out"
        raise DataError(f"{folder} has no configuration {subset!r}, {there}")
    if subset or len(found.splits) == 1:
        return subset or next(iter(found.splits))
    if found.default:
        return found.default
    raise DataError(
        f"{setting} = {folder} holds several configurations, {names}: choose one with {setting.partition('.')[0]}."
        f"{'settings.' if setting.startswith('environment.') else ''}subset, or give the folder of one"
    )


def held_out_split(folder: Path, but: str = "", setting: str = "data.path", subset: str = "") -> str:
    """The split of a folder that is meant for tests, by its usual names (test, else validation, else eval), other than
    `but`; empty if there is none."""
    names = list(splits_of(folder, setting, subset))
    meant = {_SPLITS.get(name.lower(), name): name for name in names if name != but}
    return next((meant[kind] for kind in ("test", "validation", "eval") if kind in meant and len(names) > 1), "")


def wanted_split(source: str | Path, split: str, there: Collection[str]) -> str:
    """`split`, or without it the only one that is `there`, or `train`. Raises `DataError`, also where files of no split
    would be left out unasked."""
    if not split and len(there) == 1:
        return next(iter(there))
    wanted = split or "train"
    if wanted not in there:
        names = ", ".join(repr(name) if name else "files of no split" for name in there)
        raise DataError(f"{source} has no split {wanted!r}, only {names}: name one of them, or a single file")
    if not split and "" in there:
        raise DataError(
            f"{source} holds files of no split beside those of the split {wanted!r}: name the split, or move the files"
        )
    return wanted


def require_whole(files: Collection[Path]) -> None:
    """Raises `DataError` if a file is missing whose number the names of others count (`-00001-of-00002`)."""
    found = {(file.parent, *shard.groups()) for file in files if (shard := _SHARD.fullmatch(file.name))}
    for folder, split, _, count in sorted(found):
        for number in range(int(count)):
            if (folder, split, f"{number:05}", count) not in found:
                raise DataError(
                    f"{folder} lacks {split}-{number:05}-of-{count}, so rows of the split are missing: download it, or "
                    "rename the files that are there"
                )


def _saved_files(folder: Path) -> list[Path]:
    """The arrow files that `save_to_disk` listed; all of them must exist."""
    state = folder / "state.json"
    files: list[Path] = []
    for entry in _listed(state, "_data_files"):
        name = cast("dict[str, Any]", entry).get("filename") if isinstance(entry, dict) else None
        file = folder / str(name)
        if not file.is_file():
            raise DataError(f"{file} is missing, which {state} lists: save or copy the data set again")
        files.append(file)
    return files


def _listed(file: Path, key: str) -> list[Any]:
    try:
        values = json.loads(read_regular(file))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is no description of a data set ({error}): save the data set again") from error
    return values if isinstance(values, list) else []


def data_files(folder: Path) -> list[Path]:
    """Parquet files, otherwise JSON lines files, of the folder and its subfolders, without hidden files and
    descriptions."""
    try:
        found = [
            path
            for path in sorted(folder.rglob("*"))
            if form_of(path) in (".parquet", *SUFFIXES)
            and path.name not in _MARKS
            and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
            and path.is_file()
        ]
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({first_line(error)}): give a folder of data files alone") from error
    kinds = {form_of(path) == ".parquet" for path in found}
    if len(kinds) > 1:
        raise DataError(f"{folder} holds both parquet and JSON files: give one of them, or a folder with one kind")
    return found


def form_of(path: Path) -> str:
    """The suffix that tells a file's format, below that of its compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def split_of_file(path: Path) -> str:
    """The split in a file's name or folder: `train-00000-of-00002.parquet`, `test/0.parquet`; empty if none. Splits of
    data sets on the hub may have names such as `train_sft` and `train_gen`, which are not one split."""
    if (shard := _SHARD.fullmatch(path.name)) and shard["split"].partition("_")[0].lower() in _SPLITS:
        return _SPLITS.get(shard["split"].lower(), shard["split"])
    for part in (path.name, *reversed(path.parent.parts)):
        for word in re.split(r"[-_.]", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def configurations_of(folder: Path) -> Configurations:
    """The configurations in the folder's card; without these, the folders that have files of the same split."""
    files = data_files(folder)
    if (described := _described(folder, files)) is not None:
        return described
    by_folder: dict[str, dict[str, list[Path]]] = {}
    pooled: dict[str, list[Path]] = {}
    for file in files:
        inner = file.relative_to(folder)
        split = split_of_file(inner)
        name = "/".join(part for part in inner.parent.parts if part != "data" and not split_of_file(Path(part)))
        by_folder.setdefault(name or ".", {}).setdefault(split, []).append(file)
        pooled.setdefault(split, []).append(file)
    named = [split for found in by_folder.values() for split in found if split]
    return Configurations(by_folder if len(named) > len(set(named)) else {"": pooled})


def _described(folder: Path, files: list[Path]) -> Configurations | None:
    """The configurations in the card's front matter, as the library `datasets` reads them; None without any."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    from huggingface_hub.repocard import metadata_load

    try:
        listed = cast("dict[str, Any]", metadata_load(card) or {}).get("configs")
    except Exception as error:  # the library raises those of YAML and its own
        raise DataError(f"{card} is no card of a data set ({first_line(error)}): correct or remove it") from error
    entries = [cast("dict[str, Any]", each) for each in cast("list[Any]", listed or ()) if isinstance(each, dict)]
    found: dict[str, dict[str, list[Path]]] = {}
    default = ""
    for entry in entries:
        name = str(entry.get("config_name", "default"))
        base = folder / str(entry.get("data_dir") or "")
        found[name] = {}
        for split, patterns in _patterns(entry.get("data_files")):
            for file in _matching(base, patterns, files):
                found[name].setdefault(split or split_of_file(file.relative_to(folder)), []).append(file)
        default = name if entry.get("default") is True or (name == "default" and not default) else default
    found = {name: splits for name, splits in found.items() if splits}
    return Configurations(found, default if default in found else "") if found else None


def _patterns(given: Any) -> list[tuple[str, list[str]]]:
    """Split and patterns of a card's `data_files`: a pattern, a list of them, or these by split."""
    if isinstance(given, dict):
        return [(str(split), _texts(value)) for split, value in cast("dict[Any, Any]", given).items()]
    if isinstance(given, list) and all(isinstance(each, dict) for each in cast("list[Any]", given)):
        named = cast("list[dict[str, Any]]", given)
        return [(str(each.get("split", "")), _texts(each.get("path"))) for each in named]
    return [("", _texts(given) or ["**"])]


def _texts(given: Any) -> list[str]:
    return [str(each) for each in cast("list[Any]", given if isinstance(given, list) else [given] if given else [])]


def _matching(base: Path, patterns: list[str], files: list[Path]) -> list[Path]:
    """Of `files` those that a pattern below `base` matches; a pattern may name a folder."""
    wanted = {path for pattern in patterns for path in (base.glob(pattern) if not Path(pattern).is_absolute() else ())}
    return [file for file in files if file in wanted or not wanted.isdisjoint(file.parents)]
