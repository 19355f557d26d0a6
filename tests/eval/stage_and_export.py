# SPDX-License-Identifier: Apache-2.0
"""A small stage that learned nothing, with its tokenizer and its export, for tests of answers."""

import shutil
from pathlib import Path

from custom_modules.rope.config import RopeScaling
from eval.run_folder import StageRecord, write_json
from tests.recipes.hugging_face.support.models import CONTEXT, folder
from tests.recipes.hugging_face.support.stages import LENGTH, untrained
from tests.recipes.hugging_face.test_parity import imported

YARN = RopeScaling.yarn(base=5_000, factor=8.0, original_length=CONTEXT)


class Models:
    """A stage in a run folder, its tokenizer and its export."""

    def __init__(self, to: Path, store: Path) -> None:
        from recipes.hugging_face.export import export
        from recipes.hugging_face.source_checkpoint import trained

        source = folder(to / "published", num_attention_heads=8, num_key_value_heads=4)
        shutil.copytree(store / "tokenizer", source, dirs_exist_ok=True)
        card = imported(source, to / "imported")
        self.run = to / "run"
        self.stage = untrained(to / "imported", card, YARN, self.run)
        write_json(self.stage / "stage.json", StageRecord(self.stage.name, LENGTH))
        self.export = to / "exported"
        export(trained(self.stage), self.export)
        self.store = store
