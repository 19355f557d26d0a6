# SPDX-License-Identifier: Apache-2.0
"""Wrong overrides and recipe files, which are refused once a recipe is built; these need NeMo."""

from benchmarks.reliability.wrong_files import Files

Row = tuple[str, str] | tuple[str, str, Files]
TINY = "pretrain --factory tiny_8k"
SHAPES: tuple[Row, ...] = (
    (f"{TINY} trainer.max_stpes=20", "did you mean trainer.max_steps"),
    (f"{TINY} bogus", "'bogus'"),
    (f"{TINY} trainer.strategy.context_paralel_size=2", "did you mean context_parallel_size"),
    (
        f"{TINY} data.seq_length=8190 model.config.seq_length=8190"
        " trainer.callbacks[0].seq_length=8190 trainer.callbacks[0].tokens_per_batch=8190",
        "not divisible by 2 x CP = 4",
    ),
    (f"{TINY} trainer.strategy.context_parallel_size=8 trainer.devices=8", "heads"),
    (f"{TINY} trainer.devices=3", "world size 3"),
    (
        f"{TINY} model.config.tiling.loss=true model.config.tiling.loss_tile=0",
        "loss_tile is 0 tokens; it must be at least 1",
    ),
    (
        f"{TINY} model.config.recompute.kind=full model.config.offload.tensors=inputs"
        " model.config.offload.cap_gib=0.001",
        "GiB of host memory on a rank",
    ),
    (
        f"{TINY} model.config.recompute.kind=kept_attention model.config.recompute.layers=2",
        "layers is 2, which has no effect on kept_attention",
    ),
    (
        f"{TINY} model.config.recompute.kind=full model.config.recompute_granularity=selective",
        "set that one",
    ),
    (f"{TINY} trainer.plugins.fp8=hybrid", "does not compute on cpu"),
    (f"{TINY} trainer.devices=auto", "trainer.devices is 'auto'"),
    (f"{TINY} trainer.strategy.tensor_model_parallel_size=0", "TP is 0"),
    (f"{TINY} trainer.strategy.sequence_parallel=True", "goes with tensor parallelism"),
    (f"{TINY} model.config.tensor_model_parallel_size=2", "set that one"),
    (f"{TINY} trainer.callbacks=[]", "no StepLog"),
    (f"{TINY} data.seq_length=4X", "data.seq_length cannot be '4X'"),
    (f"{TINY} data.seq_length=4K", "4,096"),
    (f"{TINY} model.config.seq_length=16K", "16,384"),
)
ROTATIONS: tuple[Row, ...] = (
    (f"{TINY} model.config.rope.factor=0.5", "RoPE factor is 0.5"),
    (f"{TINY} model.config.rope.method=yarm", "yarm"),
    (f"{TINY} --rope yarn:factor=0.5", "RoPE factor is 0.5"),
    (f"{TINY} --rope yarn", "yarn has no factor"),
    (f"{TINY} --rope yarn:factor=2,original_length=16K", "above the 8,192 tokens"),
    (f"{TINY} model.config.rope.original_length=16K", "above the 8,192 tokens"),
    (f"{TINY} --rope yarn:factor=2,interleaved=true", "interleaved of the rotation is"),
    (f"{TINY} model.config.rope.partial_rotary_factor=0.5", "a fact of the model"),
    (f"{TINY} --rope nowhere.json", "nowhere.json cannot be read"),
)
VALUES: tuple[Row, ...] = (
    (f"{TINY} optim.lr_scheduler.warmup_ratio=3", "warmup_ratio is 3"),
    (f"{TINY} optim.config.lr=abc", "optim.config.lr cannot be 'abc'"),
    (f"{TINY} optim.config.lr=nan", "optim.config.lr is nan"),
    (f"{TINY} optim.config.lr=inf", "optim.config.lr is inf"),
    (f"{TINY} optim.config.weight_decay=nan", "weight_decay is nan"),
    (f"{TINY} optim.config.weight_decay=-1", "weight_decay is -1"),
    (f"{TINY} optim.config.adam_beta2=1.5", "adam_beta2 is 1.5"),
    (f"{TINY} model.config.cp.ulysses=x", "model.config.cp.ulysses cannot be 'x'"),
    (f"{TINY} model.config.cp.kind=Ring", "it is one of auto, ring, ulysses"),
    (f"{TINY} model.config.attention_kernel=flash", "it is one of auto, cpu_flash"),
    (f"{TINY} data.documents=Within", "it is one of across, within"),
    (f"{TINY} data.num_workers=-1", "data.num_workers is -1"),
    (
        f"{TINY} trainer.max_steps=99999999999999999999999",
        "trainer.max_steps is 99999999999999999999999",
    ),
    (f"{TINY} trainer.max_steps=0", "max_steps is 0"),
    (f"{TINY} trainer.max_time=abc", "trainer.max_time is 'abc'"),
    (f"{TINY} trainer.val_check_interval=0", "trainer.val_check_interval is 0"),
    (f"{TINY} trainer.limit_val_batches=-1", "trainer.limit_val_batches is -1"),
    (f"{TINY} trainer.precision=64", "trainer.precision"),
    (f"{TINY} trainer.plugins.precision=64", "trainer.plugins.precision cannot be '64'"),
    (f"{TINY} log.ckpt.every_n_train_steps=0", "log.ckpt.every_n_train_steps is 0"),
    (
        "pretrain --factory llama32_1b_nemo_16k trainer.plugins.precision=\"'32'\"",
        "no CUDA attention kernel",
    ),
)
PLACES: tuple[Row, ...] = (
    (f"{TINY} data.store=nowhere", "nowhere"),
    (f"{TINY} --dryrun log.ckpt.dirpath=/proc/x", "log.ckpt.dirpath is /proc/x"),
    (
        f"{TINY} --dryrun log.ckpt.dirpath=/proc/x resume.resume_from_directory=/proc/x",
        "log.ckpt.dirpath /proc/x",
    ),
    (f"{TINY} --dryrun log.explicit_log_dir=/proc/logs", "log.explicit_log_dir /proc/logs"),
    (f"{TINY} --dryrun trainer.callbacks[0].path=/proc/m.jsonl", "/proc/m.jsonl"),
    (f"{TINY} --dryrun log.tensorboard.save_dir=f/events", "f/events", {"f": b"x"}),
    (f"{TINY}", "no store at"),
    ("run --ladder tiny --dryrun log.ckpt.dirpath=here", "--out and --store"),
    ("show tiny_8k --to-yaml f/x.yaml", "f/x.yaml", {"f": b"x"}),
)
RECIPE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no recipe"),
    "cut": (b"_partial_: true\n_target_: nemo.collections.llm.api.pretrain\ndata: {", "not YAML"),
    "no trainer": (
        b"_partial_: true\n_target_: nemo.collections.llm.api.pretrain\n",
        "the recipe has no model",
    ),
    "latin1": (b"name: caf\xe9\n", "0xe9"),
    "circle": (b"a: &a [*a]\n", "line 1"),
    "system": (b"_target_: os.system\n_partial_: true\ncommand: 'true'\n", "os.system"),
    "passed on": (
        b"_target_: lightning.pytorch.callbacks.timer.timedelta\n_partial_: true\n",
        "is defined in datetime",
    ),
    "other": (
        b"_target_: nemo.collections.llm.api.validate\n_partial_: true\n", "is a function",
    ),
    "list": (b"[1]\n", "holds no recipe"),
    "large": (b"- 1\n" * 100_000, "262,144 bytes"),
}  # fmt: skip
TABLE: tuple[Row, ...] = (
    *SHAPES,
    *ROTATIONS,
    *VALUES,
    *PLACES,
    *(
        ("pretrain --yaml r.yaml", named, {"r.yaml": content})
        for content, named in RECIPE_FILES.values()
    ),
)
