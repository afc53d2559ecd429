"""Reads rows of data files and folders, each with its file and row number.

Formats: JSON lines, perhaps compressed, or a list in a `.json` file; parquet; folders (`files/folders.py`). A name like
`org/name` is a data set on the Hugging Face hub, or in the cache of the library `datasets`.

Files are read in the order of their names, rows in file order; what cannot be read raises a `DataError` that names
file, row and column. pyarrow and `datasets` are imported only when they are needed.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config.python_objects import is_python_object, load
from slipstream.config.sft import is_hub_name
from slipstream.config.user_code import DataRead, FileRead, note, stamp_of
from slipstream.data.files.arrow import arrow_rows, plain_rows, without_nulls
from slipstream.data.files.folders import FORMS, form_of, require_whole, splits_of, wanted_split
from slipstream.data.files.json_lines import SUFFIXES as JSON_SUFFIXES
from slipstream.data.files.json_lines import json_rows
from slipstream.errors import ConfigError, DataError, first_line

_HUB_TIMEOUT_S = 5.0
_HUB_ROWS = 1000
"""Rows of a data set on the hub that are read at once."""


class Row(NamedTuple):
    """One row and its place, as error messages name it."""

    where: str
    values: dict[str, Any]
    folder: Path | None = None
    """That of its file, from which paths in it lead."""
    is_typed: bool = False
    """Whether all rows have the same fields, with null where a row has none, as in arrow: see `files/arrow.py`."""

    def rendered(self, value: Any) -> Any:
        """`value`, a part of this row, as the model is to read it: without the nulls that its format adds."""
        return without_nulls(value) if self.is_typed else value


def read_rows(path: str | Path, split: str = "", setting: str = "data.path", subset: str = "") -> list[Row]:
    """Reads all rows of the file or folder `path`; of a folder with several splits those of `split`, or of `train`.
    `setting` is the setting that error messages name; `subset` the configuration of a data set that has several. Raises
    `DataError`, also if there are no rows."""
    if is_python_object(str(path)):
        given = [Row(f"row {number} of {path}", values) for number, values in enumerate(load(str(path)))]
        note(DataRead(setting, str(path), split, revision=str(path).rpartition("@")[2], num_rows=len(given)))
        return given
    path = Path(path)
    if is_hub_name(str(path)) and not path.exists():
        return _hub_rows(str(path), subset, split, setting)
    if path.is_dir():
        by_split = splits_of(path, setting, subset)
        files = by_split[wanted_split(path, split, by_split)]
        require_whole(files)
    elif split or subset:
        what = f"split {split!r}" if split else f"configuration {subset!r}"
        raise DataError(f"{path} is a file and has no {what}: leave it out, or name the folder")
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
    form = form_of(path)
    if form in JSON_SUFFIXES:
        return (Row(where, values, path.parent) for where, values in json_rows(path, setting))
    if form in (".parquet", ".arrow"):
        found = arrow_rows(path, setting, parquet=form == ".parquet")
        return (Row(where, values, path.parent, is_typed=True) for where, values in found)
    if not path.exists():
        raise DataError(f"{path} cannot be read (No such file or directory): correct {setting}")
    raise DataError(f"{path} is not a JSONL file or any other that is read here: give {FORMS} in {setting}")


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
        wanted = wanted_split(name, split, found.keys())
        place = f"{name} ({wanted})"
        rows: list[Row] = []
        # As arrow tables: otherwise the library decodes images itself, in any format (see `data.images.reading`).
        for batch in found[wanted].with_format("arrow").iter(_HUB_ROWS):
            for values in plain_rows(batch, place, len(rows)):
                rows.append(Row(f"row {len(rows) + 1} of {place}", values, is_typed=True))
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
