"""Reads rows of data files and folders, each with its file and row number.

Formats: JSON lines; parquet; a folder written by `datasets.save_to_disk` (arrow files, one split or several); a folder
of parquet or JSON lines files as in data set repositories (`data/train-00000-of-00002.parquet`, `train/part.parquet`,
`test.jsonl`). A name like `org/name` is a data set on the Hugging Face hub, or in the cache of the library `datasets`.

Files are read in the order of their names, rows in file order; what cannot be read raises a `DataError` that names
file, row and column. pyarrow and `datasets` are imported only when they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from slipstream.config.python_objects import is_python_object, load
from slipstream.config.sft import is_hub_name
from slipstream.config.user_code import DataRead, FileRead, note, stamp_of
from slipstream.data.plain_values import kind_of
from slipstream.errors import ConfigError, DataError, first_line
from slipstream.regular_files import lines_of, open_regular, read_regular, require_regular

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".parquet", *JSON_SUFFIXES)
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
_FORMS = "a .jsonl or .parquet file, a folder of them, or a folder of datasets.save_to_disk"
_HUB_TIMEOUT_S = 5.0
_HUB_ROWS = 1000
"""Rows of a data set on the hub that are read at once."""
_MARKS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")


class Row(NamedTuple):
    """One row and its place, as error messages name it."""

    where: str
    values: dict[str, Any]
    folder: Path | None = None
    """That of its file, from which paths in it lead."""


def read_rows(path: str | Path, split: str = "", setting: str = "data.path", subset: str = "") -> list[Row]:
    """Reads all rows of the file or folder `path`; of a folder with several splits those of `split`, or of `train`.
    `setting` is the setting that error messages name; `subset` the configuration of a data set on the hub. Raises
    `DataError`, also if there are no rows."""
    if is_python_object(str(path)):
        given = [Row(f"row {number} of {path}", values) for number, values in enumerate(load(str(path)))]
        note(DataRead(setting, str(path), split, revision=str(path).rpartition("@")[2], num_rows=len(given)))
        return given
    path = Path(path)
    if is_hub_name(str(path)) and not path.exists():
        return _hub_rows(str(path), subset, split, setting)
    if path.is_dir():
        files = _files_of_split(path, split, setting)
    elif split:
        raise DataError(f"{path} is a file and has no split {split!r}: leave the split out, or name the folder")
    else:
        files = [path]
    rows: list[Row] = []
    read: list[FileRead] = []
    for file in files:
        before, stamp = len(rows), stamp_of(file)
        rows += _read_file(file, setting)
        read.append(FileRead(file.resolve(), len(rows) - before, stamp))
    if not rows:
        raise DataError(f"{path} holds no row: give a file with at least one, in {setting}")
    note(DataRead(setting, str(path), split, tuple(read), num_rows=len(rows)))
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Names of all columns that occur in any row."""
    return sorted({name for row in rows for name in row.values})


def _read_file(path: Path, setting: str) -> Iterator[Row]:
    if path.suffix in JSON_SUFFIXES:
        return _json_rows(path, setting)
    if path.suffix == ".parquet":
        return _arrow_rows(path, setting, parquet=True)
    if path.suffix == ".arrow":
        return _arrow_rows(path, setting, parquet=False)
    if not path.exists():
        raise DataError(f"{path} cannot be read (No such file or directory): correct {setting}")
    raise DataError(f"{path} is not a JSONL file or any other that is read here: give {_FORMS} in {setting}")


def _hub_rows(name: str, subset: str, split: str, setting: str) -> list[Row]:
    """The rows of a data set on the hub, as the library `datasets` reads, downloads and caches it."""
    try:
        import datasets  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError(
            f"{setting} = {name} is no file or folder here, and a data set on the hub needs a package that cannot be "
            f"imported ({error}): pip install datasets, or correct the path"
        ) from error
    library: Any = datasets
    problem = _why_unreachable(name)
    try:
        with _offline(library.config) if problem else nullcontext():
            found = library.load_dataset(name, subset or None)
        wanted = _wanted_split(name, split, found.keys())
        # As arrow tables: otherwise the library decodes images itself, in any format (see `data.images.reading`).
        batches = found[wanted].with_format("arrow").iter(_HUB_ROWS)
        plain = (values for batch in batches for values in batch.to_pylist())
        rows = [Row(f"row {number} of {name} ({wanted})", values) for number, values in enumerate(plain, 1)]
    except DataError:
        raise
    except Exception as error:  # the library and those below it raise whatever they have
        raise DataError(
            f"{setting} = {name} is no file or folder here, and no data set that the hub or this machine's cache gives "
            f"({problem or first_line(error)}): correct it, or where there is no network download the data set "
            "elsewhere and give its folder"
        ) from error
    note(DataRead(setting, name, wanted, revision=_hub_revision(found[wanted]), num_rows=len(rows)))
    if not rows:
        raise DataError(f"{name} holds no row in its split {wanted!r}: name another one, in {setting}")
    return rows


def _hub_revision(data: Any) -> str:
    """The commit of a data set, which is the name of the folder that `datasets` caches it in; or its fingerprint."""
    files: list[dict[str, str]] = getattr(data, "cache_files", [])
    folder = Path(files[0]["filename"]).parent.name if files else ""
    return folder if re.fullmatch(r"[0-9a-f]{40,64}", folder) else str(getattr(data, "_fingerprint", ""))


def _why_unreachable(name: str) -> str:
    """Why the hub does not give the data set `name`; empty if it does. It is asked once: the library itself asks an
    unreachable hub again for half a minute."""
    from huggingface_hub import dataset_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        dataset_info(name, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return ""  # loading it raises an error that says what to do
    except RepositoryNotFoundError:
        return "the hub has no such data set"
    except Exception as error:  # noqa: BLE001 - whatever the network's library raises
        return f"the hub cannot be asked: {type(error).__name__}"
    return ""


@contextmanager
def _offline(config: Any) -> Generator[None]:
    """Inside, the library `datasets` with this `config` reads its cache only."""
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _json_rows(path: Path, setting: str) -> Iterator[Row]:
    decoder = msgspec.json.Decoder()
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines_of(file, path), start=1):
                if not line.strip():
                    continue
                where = f"row {number} of {path}"
                try:
                    values = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if number == 1 and line.lstrip().startswith(b"["):
                        raise DataError(f"{path} is one JSON list: {_ONE_A_LINE}") from error
                    raise DataError(f"{where} is not JSON ({error}): correct or remove it") from error
                except RecursionError:
                    raise DataError(f"{where} nests lists or objects too deeply: correct or remove it") from None
                if not isinstance(values, dict):
                    raise DataError(f"{where} is {kind_of(values)}: {_ONE_A_LINE}")
                yield Row(where, cast("dict[str, Any]", values), path.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct {setting}") from error


_ONE_A_LINE = "write one JSON object a line, with the columns as its keys"


def _arrow_rows(path: Path, setting: str, *, parquet: bool) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"{setting} = {path} needs a package that cannot be imported ({error}): pip install 'slipstream[data]'"
        ) from error
    number = 0
    try:
        require_regular(path.stat(), path)
        batches = pq.ParquetFile(path).iter_batches() if parquet else _arrow_batches(pa, path)
        for batch in batches:
            for values in _plain_rows(batch, path, number):
                number += 1
                yield Row(f"row {number} of {path}", values, path.parent)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"{path} cannot be read ({reason}): correct {setting}, or save the file again") from error
    except pa.ArrowException as error:
        kind = "parquet" if parquet else "arrow"
        problem = f"{path} is not a whole {kind} file ({first_line(error)})"
        raise DataError(f"{problem}: save or download it again, or correct {setting}") from error


def _arrow_batches(pa: Any, path: Path) -> Iterator[Any]:
    """Record batches of an arrow file: `datasets` writes the stream format, other programs the file format."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if not is_file:
            yield from pa.ipc.open_stream(source)
            return
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _plain_rows(batch: Any, path: Path, before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a date out of range: find the row
        for place in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[place].as_py()
                except (ValueError, OverflowError) as error:
                    where = f"row {before + place + 1} of {path}, column {name}"
                    raise DataError(f"{where} cannot be read ({first_line(error)}): correct it") from error
        raise


def splits_of(folder: Path, setting: str = "data.path") -> dict[str, list[Path]]:
    """The files of each split of a data folder, in order; files whose name has no split are under the empty name."""
    by_split: dict[str, list[Path]] = {}
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        for name in _listed(saved, "splits"):
            by_split[str(name)] = _saved_files(folder / str(name))
    elif (folder / "state.json").is_file():
        by_split[""] = _saved_files(folder)
    else:
        for file in _data_files(folder):
            by_split.setdefault(_split_of_file(file.relative_to(folder)), []).append(file)
    if not by_split:
        raise DataError(f"{folder} holds no data file: give {_FORMS} in {setting}")
    return by_split


def held_out_split(folder: Path, but: str = "", setting: str = "data.path") -> str:
    """The split of a folder that is meant for tests, by its usual names (test, else validation, else eval), other than
    `but`; empty if there is none."""
    names = list(splits_of(folder, setting))
    meant = {_SPLITS.get(name.lower(), name): name for name in names if name != but}
    return next((meant[kind] for kind in ("test", "validation", "eval") if kind in meant and len(names) > 1), "")


def _files_of_split(folder: Path, split: str, setting: str) -> list[Path]:
    """The folder's files in order: those of `split`, if file names distinguish splits."""
    by_split = splits_of(folder, setting)
    return by_split[_wanted_split(folder, split, by_split)]


def _wanted_split(source: str | Path, split: str, there: Collection[str]) -> str:
    """`split`, or without it the only one that is `there`, or `train`."""
    if not split and len(there) == 1:
        return next(iter(there))
    wanted = split or "train"
    if wanted not in there:
        names = ", ".join(repr(name) if name else "files of no split" for name in there)
        raise DataError(f"{source} has no split {wanted!r}, only {names}: name one of them, or a single file")
    return wanted


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


def _data_files(folder: Path) -> list[Path]:
    """Parquet files, otherwise JSON lines files, of the folder and its subfolders, without hidden files and
    descriptions."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix in SUFFIXES
        and path.name not in _MARKS
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]
    kinds = {path.suffix == ".parquet" for path in found}
    if len(kinds) > 1:
        raise DataError(f"{folder} holds both parquet and JSON files: give one of them, or a folder with one kind")
    return found


def _split_of_file(path: Path) -> str:
    """The split in a file's name or folder: `train-00000-of-00002.parquet`, `test/0.parquet`; empty if none."""
    for part in (path.name, *reversed(path.parent.parts)):
        for word in re.split(r"[-_.]", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""
