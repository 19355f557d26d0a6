# SPDX-License-Identifier: Apache-2.0
"""Wrong words and files of the commands about data: adopt, data inspect, data tokenizers."""

import json
import struct
from collections.abc import Mapping, Sequence

Files = Mapping[str, bytes | None]

_ADOPT = "adopt web --tokenizer t --out s"
WORDS = (
    ("data bogus", "bogus"),
    ("data inspect", "no store is named"),
    ("data inspect nowhere", "no store at nowhere"),
    ("data inspect s --step 1", "--step"),
    ("data inspect s tinny", "tinny"),
    ("data inspect s tiny_8k --stage 8K", "tiny_8k"),
    ("data inspect s tiny --stage 96K", "stage of 96K"),
    ("data inspect nowhere tiny --stage 512", "nowhere"),
    ("data inspect s tiny --stage 512 --step 0", "'--step': 0"),
    ("data inspect s tiny --stage 512 --data-ranks 3", "--data-ranks is 3"),
    ("data inspect s --run r", "--run r"),
    ("data inspect --run nowhere", "nowhere"),
    ("adopt web --out s", "--tokenizer"),
    ("adopt web --tokenizer t", "--out"),
    ("adopt --tokenizer t --out s", "no files are named"),
    (_ADOPT, "no token files at web"),
    (f"{_ADOPT} --heldout-fraction 0", "0.0"),
    (f"{_ADOPT} --heldout-fraction nan", "nan"),
    (f"{_ADOPT} --heldout-documents 0", "--heldout-documents is 0"),
    (f"{_ADOPT} --heldout-documents 3 --heldout-fraction 0.1", "--heldout-fraction"),
    (f"{_ADOPT} --without-eod maybe", "'maybe'"),
    (f"{_ADOPT} --name web", "--name web"),
    (f"{_ADOPT} --name We/b=x", "--name We/b=x"),
    ("adopt web --tokenizer t --out ''", "--out"),
    ("adopt web --tokenizer t --out /proc/s", "/proc/s"),
    ("data tokenizers", "names"),
    ("data tokenizers t --text nowhere", "nowhere"),
    ("data tokenizers t --seq 64X", "64X"),
    ("data tokenizers t --sample-mib 0", "'--sample-mib': 0"),
    ("data tokenizers t --card tinny", "tinny"),
    ("data tokenizers 'a b'", "there is no folder a b"),
)

_EOD = "<eod>"
_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "added_tokens": [{
        "id": 0, "content": _EOD, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }],
    "model": {"type": "WordLevel", "vocab": {_EOD: 0, "a": 1, "b": 2}, "unk_token": "a"},
}  # fmt: skip
_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOD}
TOKENIZER: Files = {
    "t/tokenizer.json": json.dumps(_TOKENIZER).encode(),
    "t/tokenizer_config.json": json.dumps(_CONFIG).encode(),
}
"""A tokenizer of three ids; 0 ends a document."""


def index(lengths: Sequence[int], *, dtype: int = 8, boundaries: Sequence[int] = ()) -> bytes:
    """Return Megatron's index of sequences one after another in a file of 16-bit ids."""
    ends = boundaries or range(len(lengths) + 1)
    starts = [2 * sum(lengths[:at]) for at in range(len(lengths))]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, dtype, len(lengths), len(ends))
    arrays = ((lengths, "i"), (starts, "q"), (ends, "q"))
    return header + b"".join(struct.pack(f"<{len(one)}{kind}", *one) for one, kind in arrays)


def pair(*documents: Sequence[int], name: str = "web", **of_index: object) -> dict[str, bytes]:
    """Return the two files of documents."""
    ids = [token for document in documents for token in document]
    return {
        f"{name}.bin": struct.pack(f"<{len(ids)}H", *ids),
        f"{name}.idx": index([len(one) for one in documents], **of_index),  # type: ignore[arg-type]
    }


GOOD = pair([1, 2, 0], [2, 0], [1, 1, 1, 0])
_IDX, _BIN = GOOD["web.idx"], GOOD["web.bin"]
FILES: tuple[tuple[str, str, Files], ...] = (
    ("adopt d --tokenizer t --out s", "the folder d has no token files", {"d": None}),
    ("adopt d --tokenizer t --out s", "the folder d has no token files", {"d/a.txt": b"x"}),
    (_ADOPT, "web.idx is missing", {"web.bin": _BIN}),
    ("adopt web.idx --tokenizer t --out s", "web.bin is missing", {"web.idx": _IDX}),
    ("adopt d --tokenizer t --out d --overwrite", "only a store is ever overwritten", {"d": None}),
    (_ADOPT, "web.idx is not an index", {**GOOD, "web.idx": b"PK" + _IDX[2:]}),
    (_ADOPT, "web.idx is not an index", {**GOOD, "web.idx": b""}),
    (_ADOPT, "web.idx has 20 bytes", {**GOOD, "web.idx": _IDX[:20]}),
    (_ADOPT, "web.idx has version 2",
     {**GOOD, "web.idx": _IDX[:9] + struct.pack("<Q", 2) + _IDX[17:]}),
    (_ADOPT, "float32", {**GOOD, "web.idx": index([3, 2, 4], dtype=7)}),
    (_ADOPT, "the code 77", {**GOOD, "web.idx": index([3, 2, 4], dtype=77)}),
    (_ADOPT, "web.idx has 94 bytes", {**GOOD, "web.idx": _IDX[:-8]}),
    (_ADOPT, "web.bin has 16 bytes", {**GOOD, "web.bin": _BIN[:-2]}),
    (_ADOPT, "web.bin has 18 bytes", {**GOOD, "web.idx": index([3, 2, 4], dtype=4)}),
    (_ADOPT, "lists no sequences", {"web.bin": b"", "web.idx": index([])}),
    (_ADOPT, "sequence 1 has",
     {**GOOD, "web.idx": _IDX[:54] + struct.pack("<q", 2**40) + _IDX[62:]}),
    (_ADOPT, "boundaries", {**GOOD, "web.idx": index([3, 2, 4], boundaries=(0, 2, 1, 3))}),
    (_ADOPT, "1 empty documents", pair([1, 0], [], [2, 0])),
    (f"{_ADOPT} --leave-out-empty", "no document that is not empty", pair([], [])),
    (_ADOPT, "--out s already exists", {**GOOD, "s": None}),
    ("adopt a b/a --tokenizer t --out s", "NAME=b/a",
     {**pair([1, 0], [2, 0], name="a"), **pair([1, 0], [2, 0], name="b/a")}),
    (_ADOPT, "t is not a folder here", {**GOOD}),
    ("adopt web --tokenizer web.bin --out s", "web.bin is a file", {**GOOD}),
    (_ADOPT, "the token id 3", {**TOKENIZER, **pair([1, 3, 0], [2, 0])}),
    (_ADOPT, "50.0% of the documents", {**TOKENIZER, **pair([1, 0], [2, 1])}),
    (f"{_ADOPT} --without-eod leave-out", "would leave out all",
     {**TOKENIZER, **pair([1, 2], [2, 1])}),
    (_ADOPT, "each document of web has more than 10%", {**TOKENIZER, **pair([1, 2, 0])}),
    (f"{_ADOPT} --heldout-documents 3", "split of web is empty", {**TOKENIZER, **GOOD}),
    ("data inspect s", "s has no manifest.json", {"s": None}),
    ("data inspect s", "manifest.json", {"s/manifest.json": b"{"}),
    ("data inspect f", "f is a file", {"f": b"x"}),
    ("data tokenizers t --text a.jsonl", "a.jsonl:1", {**TOKENIZER, "a.jsonl": b"[1]\n"}),
    ("data tokenizers a.txt --text a.txt", "a.txt is a file", {"a.txt": b"x"}),
)  # fmt: skip
