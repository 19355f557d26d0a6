# SPDX-License-Identifier: Apache-2.0
"""The corpus and the model that the oracles read: made anew, the same on one machine."""

import json
import random
from pathlib import Path

VOCABULARY = (
    "attention batch cache data error field gradient head index join key layer mask norm offset "
    "pack query rotate shard token under value window expert yield zero the of and to in is that"
)
WORDS = VOCABULARY.split()
LENGTHS = (30, 60, 120, 240, 480, 960, 1920, 3840)
"""Words of the documents, one after the other."""


def _texts(seed: int, number: int) -> list[str]:
    draw = random.Random(seed)
    texts = []
    for at in range(number):
        own = draw.sample(WORDS, 12) + [f"{word}{draw.randrange(100)}" for word in WORDS[:6]]
        words = draw.choices(own, k=LENGTHS[at % len(LENGTHS)])
        texts.append(" ".join(word + ("." if draw.random() < 0.1 else "") for word in words))
    return texts


def corpus(folder: Path) -> dict[str, str]:
    """Write four sources into a folder; return each as `prepare` takes it, by its name."""
    import pyarrow as pa
    from pyarrow import parquet

    for number, text in enumerate(_texts(1, 32)):
        place = folder / "text" / f"part_{number % 3}" / f"{number:02}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    lines = [json.dumps({"id": at, "text": text}) for at, text in enumerate(_texts(2, 48))]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    parquet.write_table(
        pa.table({"text": _texts(3, 32)}), folder / "table.parquet", row_group_size=8
    )
    for number, text in enumerate(_texts(4, 24)):
        code = folder / "code" / f"repository_{number % 6}"
        code.mkdir(parents=True, exist_ok=True)
        (code / "pyproject.toml").write_text("[project]\n")
        before = f"from module_{number - 6} import value\n" if number >= 6 else ""
        (code / f"module_{number}.py").write_text(f'{before}\nvalue = """{text}"""\n')
    return {
        "text": str(folder / "text"),
        "lines": str(folder / "lines.jsonl"),
        "table": str(folder / "table.parquet"),
        "code": f"repositories:{folder / 'code'}",
    }


def model(config: Path, tokenizer: Path, folder: Path) -> None:
    """Write the model of a config, with drawn weights and a tokenizer, in Hugging Face's format."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(17)
    LlamaForCausalLM(LlamaConfig.from_dict(json.loads(config.read_text()))).save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
