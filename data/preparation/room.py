# SPDX-License-Identifier: Apache-2.0
"""The room that a store needs while it is prepared, measured on a sample before the work begins.

Until the parts are merged and removed, each token is in a part and in the store:

    room = 2 * (bytes of the sources) * (tokens a byte) * (bytes a token)

Tokens a byte are measured with the store's tokenizer on the beginnings of shards at equal
distances: of text files and of lines as they are, fields other than the text included. What is
compressed counts by its compressed bytes, so that more will be written; sources that cannot be read
in part count one token for 8 bytes. The sample may have more tokens than the rest, so `LEAST` of
the result is required. Nothing is required for a source of unknown size, such as one on the hub.
"""

import codecs
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.files.writable import existing, require_folder
from data.formats.jsonl import compression, text_of_line
from data.preparation.plan import Piece, Plan
from data.tokenization.encoder import Encoder

SHARDS = 16
"""Shards that are sampled."""
SAMPLE_BYTES = 2**17
"""Bytes that are read of each."""
LEAST = 0.75
"""Share of the measured room that must be free."""
TOKENS_A_BYTE = 1 / 8
"""Of a source that is not sampled; about half of what tokenizers give."""
COPIES = 2
"""Files that each token is in: one of its part and one of the store."""


def require_room(place: Path, plan: Plan, encoder: Encoder, *, done_bytes: int) -> None:
    """Raise ValueError if the file system of a store has less than the least room that it needs.

    `done_bytes` are of parts that are there already. Nothing is read where every byte may be a
    token.
    """
    width = int(np.dtype(encoder.token_type).itemsize)
    if shutil.disk_usage(existing(place)).free >= COPIES * width * plan.cost:
        return
    tokens = LEAST * plan.cost * tokens_a_byte(plan, encoder)
    why = (
        f"at least {tokens:,.0f} tokens of {width} bytes, measured on a sample, are written twice: "
        "to parts, and to the store before these are removed"
    )
    require_folder(place, "the store", COPIES * width * tokens - done_bytes, why)


def tokens_a_byte(plan: Plan, encoder: Encoder) -> float:
    """Return the tokens of a sample of a plan's sources over its bytes."""
    step = max(1, len(plan.shards) // SHARDS)
    found = [
        _tokens_a_byte(shard.pieces[0], plan.settings.text_key, encoder)
        for shard in plan.shards[::step]
        if shard.cost
    ]
    return sum(found) / max(len(found), 1)


def _tokens_a_byte(piece: Piece, text_key: str, encoder: Encoder) -> float:
    """Return the tokens of the beginning of a piece over its bytes."""
    if piece.kind == "jsonl" and compression(Path(piece.path)) is None:
        read = [*_lines(piece, text_key)]
    elif piece.kind == "text":
        read = [_beginning(piece)]
    else:
        return TOKENS_A_BYTE
    # without halves of characters, which are two escapes of JSON
    texts = [text.encode(errors="ignore").decode() for _, text in read]
    tokens = sum(int(ids.size) for ids in encoder.encode_documents(texts))
    return tokens / max(sum(size for size, _ in read), 1)


def _lines(piece: Piece, text_key: str) -> Iterator[tuple[int, str]]:
    """Yield the bytes and the text of lines; of a broken line, no text."""
    left = SAMPLE_BYTES
    with Path(piece.path).open("rb") as file:
        file.seek(piece.start)
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            is_cut = not left and not line.endswith(b"\n")
            text = _of_cut_line(line, text_key) if is_cut else text_of_line(line, text_key)
            yield len(line), text if isinstance(text, str) else ""


def _of_cut_line(line: bytes, text_key: str) -> str:
    """Return the text of the beginning of a line as far as it goes."""
    last = text_key.rpartition(".")[2]
    key = b"|".join(re.escape(json.dumps(each).encode()) for each in (text_key, last))
    found = re.search(b"(?:%b)" % key + rb'\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)', line)
    content = found[1].decode(errors="ignore") if found else ""
    try:
        text = str(json.loads(f'"{content}"', strict=False))
    except ValueError:
        return ""
    return text


def _beginning(piece: Piece) -> tuple[int, str]:
    """Return bytes and text of the beginning of a text file; no text if it is not UTF-8."""
    with Path(piece.path).open("rb") as file:
        block = file.read(SAMPLE_BYTES)
    try:
        return len(block), codecs.getincrementaldecoder("utf-8-sig")().decode(block)
    except UnicodeDecodeError:
        return len(block), ""
