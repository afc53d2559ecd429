"""Reads rows of parquet and arrow files, and removes from nested values the nulls that arrow adds.

In arrow all structs of a column have the same fields, and a row without one of them has null there: the call of one
tool comes back with the arguments of every other. Messages and tools therefore pass through `without_nulls`. Columns
for rewards keep their nulls, as under verl and TRL. pyarrow is imported only when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from slipstream.errors import ConfigError, DataError, first_line
from slipstream.regular_files import require_regular


def without_nulls(value: Any) -> Any:
    """`value` without the null fields of its dictionaries, at any depth; nulls of lists stay."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {name: without_nulls(field) for name, field in fields.items() if field is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in cast("list[Any]", value)]
    return value


def with_lists(value: Any) -> Any:
    """`value` with lists for NumPy's arrays, as which pandas reads lists of parquet files."""
    if isinstance(value, dict):
        return {name: with_lists(field) for name, field in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list) or hasattr(value, "tolist"):
        listed = value if isinstance(value, list) else value.tolist()
        return [with_lists(item) for item in cast("list[Any]", listed)] if isinstance(listed, list) else listed
    return value


def arrow_rows(path: Path, setting: str, *, parquet: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the values of each row. Raises `DataError`, and `ConfigError` without pyarrow."""
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
            for values in plain_rows(batch, str(path), number):
                number += 1
                yield f"row {number} of {path}", values
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


def plain_rows(batch: Any, path: str, before: int) -> list[dict[str, Any]]:
    """The rows of a record batch or table, the first of them number `before + 1` of `path`."""
    names = batch.schema.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(f"{path} has several columns of the name {twice[0]}: rename or remove all but one")
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a date out of range: find the row
        for place in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[place].as_py()
                except (ValueError, OverflowError) as error:
                    where = f"row {before + place + 1} of {path}, column {name}"
                    raise DataError(f"{where} cannot be read ({first_line(error)}): correct it") from error
        raise
    for name in (field.name for field in batch.schema if "arrow.json" in str(field.type)):
        kind = batch.schema.field(name).type
        for row in rows:
            row[name] = _json_decoded(row[name], kind)
    return rows


def _json_decoded(value: Any, kind: Any) -> Any:
    """A value of an arrow type, with its parts of the type JSON, which come as text, decoded: the library `datasets`
    keeps values of several types in these."""
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_json_decoded(item, kind.value_type) for item in cast("list[Any]", value)]
    if isinstance(value, dict) and hasattr(kind, "fields"):
        return {field.name: _json_decoded(value[field.name], field.type) for field in kind.fields}
    return value
