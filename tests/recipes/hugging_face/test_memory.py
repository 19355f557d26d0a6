# SPDX-License-Identifier: Apache-2.0
"""A model is never held: what import and export allocate is that of a layer, not of the model."""

import json
import os
import subprocess
import sys

import pytest

from tests.ranks import TREE

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, FFN, MIB = 16, 512, 2048, 2**20
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
CODE = """
import json, sys, threading, time
from pathlib import Path

from recipes.hugging_face.config import card_of, read_config
from recipes.hugging_face.export import export
from recipes.hugging_face.import_ import write_checkpoint
from recipes.hugging_face.safetensors_files import stored_tensors
from recipes.hugging_face.source_checkpoint import trained

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.ended = 0, False
    def run(self):
        while not self.ended:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.002)

def round_trip(root):
    peaks = []
    source = root / "published"
    for step in ("import", "export"):
        before, peak = anonymous(), Peak()
        peak.start()
        if step == "import":
            card = card_of(read_config(source), "published")
            write_checkpoint(root / "imported", source, card, stored_tensors(source))
        else:
            export(trained(root / "imported"), root / "exported", max_shard_gib=1 / 8)
        peak.ended = True
        peak.join()
        peaks.append(peak.bytes - before)
    return peaks

round_trip(Path(sys.argv[1]))  # what libraries allocate at their first use
print(json.dumps(round_trip(Path(sys.argv[2]))))
"""


def published(root, layers: int) -> None:
    """Write a Llama of that many layers without ever having it whole."""
    import torch

    from recipes.hugging_face.config import card_of
    from recipes.hugging_face.convert import content
    from recipes.hugging_face.safetensors_files import Shards
    from recipes.hugging_face.weight_map import weight_map
    from tests.recipes.hugging_face.support.models import CONFIGS, write_tokenizer

    source = root / "published"
    source.mkdir(parents=True)
    config = CONFIGS["llama"].to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": HIDDEN // 8,
    }
    (source / "config.json").write_text(json.dumps(config))
    write_tokenizer(source)
    shapes = {
        name: ("F32", shape)
        for piece in weight_map(card_of(config, "published"))
        for name, shape in zip(piece.hugging_face, piece.shapes, strict=True)
    }
    shards = Shards(source, shapes, 1 / 8)
    for name, (_, shape) in shapes.items():
        shards.write(name, content(torch.randn(shape)))
    shards.finish()


def test_neither_import_nor_export_holds_more_than_three_layers_of_sixteen(tmp_path):
    published(tmp_path / "small", 1)
    published(tmp_path / "large", LAYERS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, tmp_path / "small", tmp_path / "large"],
        cwd=TREE,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)},  # what is freed is given back
        capture_output=True,
        text=True,
        check=True,
    )
    imported, exported = json.loads(done.stdout.splitlines()[-1])
    assert imported < 3 * LAYER_BYTES
    assert exported < 3 * LAYER_BYTES
    written = sum(f.stat().st_size for f in (tmp_path / "large" / "exported").glob("model*"))
    assert written > LAYERS * LAYER_BYTES
