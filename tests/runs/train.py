# SPDX-License-Identifier: Apache-2.0
"""One short stage of the tiny model, trained on forked ranks or under torchrun.

torchrun -m tests.runs.train '{"run": ..., "store": ..., "layout": {...}, ...}'
"""

import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SEQ_LENGTH = 512
SEQUENCES = 2
"""Of each batch, unless options say `sequences`."""
BATCH = SEQUENCES * SEQ_LENGTH
STEPS = 20
LAYERS = 4
"""For pipelines of three stages, and of two that take turns; the tiny card has two."""


def recipe(options: dict[str, Any]):
    """Return the recipe: 20 steps of 2 sequences of 512 tokens, saved and validated every 5.

    With `steps` of the options a run has that many, and saves after the last, or after `every`.
    `card` of the options holds in what the model differs from the tiny one, `positions` how those
    of the training samples are drawn, `mix` which documents they are of. With `overlap` gradients
    are reduced and parameters gathered while the model computes, as on GPUs. With `rate` the
    learning rate is the same at every step.
    """
    from custom_modules.memory.config import Offload, Recompute, Tiling
    from custom_modules.rope.config import RopeScaling
    from custom_modules.rope.gene import gene_rotation
    from custom_modules.rope.layers import LayerPattern
    from recipes.models import TINY
    from recipes.nemo2.settings import place
    from recipes.notation import mix
    from recipes.pretrain import pretrain
    from recipes.spec.layout import ContextParallel, Layout
    from recipes.spec.stage import Cosine, Ladder, Linear, Stage
    from recipes.spec.train_short import Positions

    sizes = dict(options["layout"])
    nouns = {"recompute": Recompute, "tiling": Tiling, "offload": Offload}
    sizes |= {name: noun(**sizes[name]) for name, noun in nouns.items() if name in sizes}
    kind = getattr(ContextParallel, sizes.pop("kind", "ulysses"))
    layout = Layout(
        cp=kind(sizes.pop("cp", 1)),
        precision=sizes.pop("precision", "fp32"),
        device="cpu",
        **sizes,
    )
    rate = options.get("rate")
    positions = Positions(**options.get("positions", {}))
    rope = RopeScaling.yarn(base=10_000, factor=4.0, original_length=128)
    if positions.kind == "gene":
        rope = gene_rotation(base=10_000, factor=16.0, original_length=128, head_dim=TINY.head_dim)
    batch = options.get("sequences", SEQUENCES) * SEQ_LENGTH
    stage = Stage(
        seq_length=SEQ_LENGTH,
        rope=rope,
        tokens=STEPS * batch,
        tokens_per_batch=batch,
        lr=Cosine(peak=2e-3) if rate is None else Linear(peak=rate, final_ratio=1, warmup_ratio=0),
        documents=options.get("documents", "across"),
        positions=positions,
        mix=mix.read(options["mix"]) if "mix" in options else None,
        start="scratch",
    )
    ladder = Ladder(name="tiny", source="a test", stages=(stage,))
    other = dict(options.get("card", {}))
    if "pattern" in other:
        other["pattern"] = LayerPattern.from_dict(other["pattern"])
    card = replace(TINY, **{"layers": LAYERS, **other})
    made = pretrain(card, ladder, SEQ_LENGTH, layout)
    place(made, card, ladder, stage, run_to=Path(options["run"]), store=Path(options["store"]))
    made.trainer.max_steps = options.get("steps", STEPS)
    every = options.get("every", options.get("steps", 5))
    made.log.ckpt.every_n_train_steps = made.trainer.val_check_interval = every
    made.resume.start = options.get("start")
    made.resume.optimizer = options.get("optimizer", "new")
    if options.get("overlap"):
        import nemo_run

        from tests.runs.param_gather import RequireParamGather

        made.trainer.strategy.ddp.overlap_grad_reduce = True
        made.trainer.strategy.ddp.overlap_param_gather = True
        made.trainer.callbacks.append(nemo_run.Config(RequireParamGather))
    if options.get("failing_saves"):
        import nemo_run

        from tests.runs.failing_saves import FailingSaves

        made.trainer.callbacks.append(nemo_run.Config(FailingSaves))
        made.trainer.strategy.ckpt_async_save = options["failing_saves"] == "in the background"
    if "evaluate_every" in options:
        import nemo_run

        from eval.while_training import WhileTraining

        made.trainer.callbacks.append(
            nemo_run.Config(
                WhileTraining,
                store=options["store"],
                seq_length=SEQ_LENGTH,
                tokens_per_batch=BATCH,
                every=options["evaluate_every"],
            )
        )
    if "profile" in options:
        import nemo_run

        from custom_modules.callbacks.profile_steps import ProfileSteps

        made.trainer.callbacks.append(nemo_run.Config(ProfileSteps, **options["profile"]))
    return made


def train(options: dict[str, Any]) -> None:
    """Train the recipe, as a rank of torchrun."""
    import fiddle as fdl
    import nemo_run

    if "connections" in options:
        _record_connections(options["connections"])
    made = recipe(options)
    if options.get("uneven"):
        from tests.runs.uneven import SaveGradients, UnevenDataModule

        fdl.update_callable(made.data, UnevenDataModule)
        made.trainer.strategy.ddp.use_distributed_optimizer = False
        made.optim.config.use_distributed_optimizer = False
        made.trainer.callbacks.append(nemo_run.Config(SaveGradients, folder=options["run"]))
    fdl.build(made)()


def _record_connections(path: str) -> None:
    """Append the host of every connection that Python makes from now on to a file."""

    def hook(event: str, words: tuple) -> None:
        if event not in ("socket.connect", "socket.getaddrinfo"):
            return
        host = words[1][0] if event == "socket.connect" else words[0]
        if event == "socket.getaddrinfo" or isinstance(words[1], tuple):  # else a path, of here
            with open(path, "a") as file:
                file.write(f"{host!r}\n")

    sys.addaudithook(hook)


def train_on_forked_rank(options: dict[str, Any], output: str) -> None:
    """Train in the place of torchrun's rank."""
    store = stand_for_torchrun(output)
    train(options)
    del store


def train_file_on_forked_rank(recipe_file: str, output: str) -> None:
    """Train the recipe in a file in the place of torchrun's rank."""
    import fiddle as fdl

    from recipes.resolved import yaml_file

    store = stand_for_torchrun(output)
    fdl.build(yaml_file.read(Path(recipe_file)))()
    del store


def evaluate_on_forked_rank(options: dict[str, Any], output: str) -> None:
    """Evaluate in the place of torchrun's rank."""
    import torch.distributed as dist

    from eval.evaluate import evaluate
    from tests.ranks import join

    rank, size = dist.get_rank(), dist.get_world_size()
    # A rank that ends leaves the group it was in. torch numbers groups from 0 again after the
    # evaluation has left its own, whose addresses are still in the store under that number.
    after = dist.PrefixStore("after", stand_for_torchrun(output))
    evaluate(**options)
    join(after, rank, size)


def stand_for_torchrun(output: str) -> "TCPStore":
    """Make this process what torchrun starts; what is printed goes to a file.

    The group that this rank has joined ends, since NeMo makes its own. Its store is returned and
    has to live as long as the ranks do: the first rank's, on a port that was free when the store
    took it, as torchrun's agent has one.
    """
    import torch.distributed as dist

    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("localhost", 0, is_master=True) if rank == 0 else None
    port = [store and store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("localhost", port[0])
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port[0]),
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return store


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
