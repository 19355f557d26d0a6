# SPDX-License-Identifier: Apache-2.0
"""The rows of a Parquet file, by row groups; pyarrow is imported when a file is opened."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.formats.records import Record, SourceError, text_of_object

BATCH_BYTES = 16 * 2**20
"""Text read at once, as far as rows of the average size allow; a row may be a whole book."""
MOST_ROWS = 1024


class RowGroups(NamedTuple):
    """Rows and bytes of the text column of each row group."""

    rows: list[int]
    bytes: list[int]


def row_groups(path: Path, text_key: str) -> RowGroups:
    """Return the row groups; raise SourceError for a file without the column, or a damaged one."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            return _row_groups(path, file, text_key)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, 0, error) from error


def parquet_file(
    path: Path, text_key: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the rows of the row groups from `start` to `stop`, to the last if None."""
    import pyarrow as pa
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            groups = _row_groups(path, file, text_key)
            chosen = range(start, len(groups.rows) if stop is None else stop)
            row = sum(groups.rows[:start])
            for group in chosen:
                each = max(1, groups.bytes[group] // max(groups.rows[group], 1))
                size = max(1, min(MOST_ROWS, BATCH_BYTES // each))
                for batch in file.iter_batches(size, row_groups=[group], columns=[text_key]):
                    [column] = batch.schema.names
                    for value in batch.column(0):
                        row += 1
                        text = text_of_object({column: value.as_py()}, text_key)
                        yield Record(f"{path} row {row}", text)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, row, error) from error


def _row_groups(path: Path, file: Any, text_key: str) -> RowGroups:
    paths = [file.schema.column(number).path for number in range(len(file.schema))]
    if not any(_is_of(each, text_key) for each in paths):
        names = ", ".join(each.replace(".list.element", "[]") for each in paths)
        raise SourceError(
            f"{path}: no column {text_key!r}; the file has {names}; name the one of the text with "
            "--text-key"
        )
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    return RowGroups([group.num_rows for group in groups], [_bytes(g, text_key) for g in groups])


def _bytes(group: Any, text_key: str) -> int:
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(
        int(column.total_uncompressed_size)
        for column in columns
        if _is_of(column.path_in_schema, text_key)
    )


def _is_of(path: str, text_key: str) -> bool:
    return path == text_key or path.startswith(f"{text_key}.")


def _unreadable(path: Path, row: int, error: Exception) -> SourceError:
    reason = str(error).splitlines()[0]
    return SourceError(f"{path}: unreadable Parquet after row {row} ({reason})")
