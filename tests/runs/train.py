# SPDX-License-Identifier: Apache-2.0
"""One short stage of the tiny model, started under torchrun by the tests of this folder.

torchrun -m tests.runs.train '{"run": ..., "store": ..., "layout": {...}, ...}'
"""

import json
import sys
from pathlib import Path
from typing import Any

SEQ_LENGTH = 512
BATCH = 2048
STEPS = 20


def recipe(options: dict[str, Any]):
    """Return the recipe: 20 steps of 4 sequences of 512 tokens, checkpoints every 5."""
    from custom_modules.rope_scaling import RopeScaling
    from recipes.layout import ContextParallel, Layout
    from recipes.models import TINY
    from recipes.pretrain import place, pretrain
    from recipes.stages import Cosine, Ladder, Stage

    sizes = dict(options["layout"])
    kind = getattr(ContextParallel, sizes.pop("kind", "ulysses"))
    layout = Layout(
        cp=kind(sizes.pop("cp", 1)),
        precision=sizes.pop("precision", "fp32"),
        device="cpu",
        **sizes,
    )
    stage = Stage(
        seq_length=SEQ_LENGTH,
        rope=RopeScaling.yarn(base=10_000, factor=4.0, original_length=128),
        tokens=STEPS * BATCH,
        tokens_per_batch=BATCH,
        lr=Cosine(peak=2e-3),
        documents=options.get("documents", "across"),
        start="scratch",
    )
    ladder = Ladder(name="tiny", source="a test", stages=(stage,))
    made = pretrain(TINY, ladder, SEQ_LENGTH, layout)
    place(made, TINY, ladder, stage, run_to=Path(options["run"]), store=Path(options["store"]))
    made.log.ckpt.every_n_train_steps = 5
    made.trainer.max_steps = options.get("steps", STEPS)
    made.trainer.val_check_interval = 5
    made.resume.start = options.get("start")
    return made


def main() -> None:
    import fiddle as fdl
    import nemo_run

    options = json.loads(sys.argv[1])
    made = recipe(options)
    if options.get("uneven"):
        from tests.runs.uneven import SaveGradients, UnevenDataModule

        fdl.update_callable(made.data, UnevenDataModule)
        made.trainer.strategy.ddp.use_distributed_optimizer = False
        made.optim.config.use_distributed_optimizer = False
        made.trainer.callbacks.append(nemo_run.Config(SaveGradients, folder=options["run"]))
    fdl.build(made)()


if __name__ == "__main__":
    main()
