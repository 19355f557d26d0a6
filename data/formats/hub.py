# SPDX-License-Identifier: Apache-2.0
"""The rows of a data set of the Hugging Face hub, streamed."""

from collections.abc import Iterator

from data.formats.records import Record, SourceError, text_of_object


def hub_rows(source: str, prefix: str, text_key: str) -> Iterator[Record]:
    """Yield the rows of `hf:NAME[:CONFIG][@SPLIT]`."""
    name, _, split = source.removeprefix(prefix).partition("@")
    name, _, config = name.partition(":")
    if not name:
        raise SourceError(
            f"the source {source} does not name a data set; write hf:NAME[:CONFIG][@SPLIT]"
        )
    row = 0
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for record in rows:
            row += 1
            yield Record(f"{source} row {row}", text_of_object(record, text_key))
    except Exception as error:  # the hub's client raises errors of several unrelated libraries
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SourceError(
            f"{source} cannot be read after row {row} ({reason}); on a machine without network"
            " give a local file or folder"
        ) from error
