# SPDX-License-Identifier: Apache-2.0
"""Parquet files with the columns of openai/mrcr and openai/graphwalks, and a chat template."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|endoftext|>{{ message.role }}\n{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)


def mrcr_row(words: int, needles: int = 2, *, text: str = "") -> dict:
    """Return a row whose prompt grows with `words` and begins with two messages of the user."""
    poems = [f"Tapirs number {at} sleep in the shade." for at in range(needles)]
    messages = [
        {"role": "user", "content": f"Examples of conversations. {text}" + " the" * words},
        {"role": "user", "content": "write a poem about tapirs"},
    ]
    for poem in poems:
        messages.append({"role": "assistant", "content": poem})
        messages.append({"role": "user", "content": "write a poem about tapirs"})
    messages[-1]["content"] = "Prepend aYooSG8CQg to the 2nd (1 indexed) poem about tapirs."
    return {
        "prompt": json.dumps(messages),
        "answer": "aYooSG8CQg" + poems[1],
        "random_string_to_prepend": "aYooSG8CQg",
        "n_needles": needles,
        "desired_msg_index": 4,
        "total_messages": len(messages),
        "n_chars": words,
    }


def graph_row(edges: int, nodes: list[str], kind: str = "bfs") -> dict:
    listed = "\n".join(f"{at:04x} -> {at + 1:04x}" for at in range(edges))
    return {
        "prompt": f"The graph has the following edges:\n{listed}\nOperation:\nPerform a BFS.",
        "answer_nodes": nodes,
        "prompt_chars": len(listed),
        "problem_type": kind,
        "date_added": "2025-04-12",
    }


def write(path: Path, rows: list[dict]) -> Path:
    """Write a parquet file and return its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    types = {"answer_nodes": pa.list_(pa.string())}
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), path)
    return path.parent
