# SPDX-License-Identifier: Apache-2.0
import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import fiddle as fdl
import nemo_run as run
import pytest
from nemo.collections import llm
from nemo.lightning import RestoreConfig
from nemo_run.cli.config import ConfigSerializer

from custom_modules.rope.config import RopeScaling
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.nemo2.model import LongContextNemotronConfig
from recipes.nemo2.settings import as_config_node
from recipes.nemo2.strategy import CpuStrategy
from recipes.resolved import yaml_file
from recipes.resolved.check import check, named_parameters, notes, phantom_keys
from recipes.resolved.read import tokens_per_batch, world_size
from recipes.shipped.factories import FACTORIES
from recipes.shipped.table import ROWS
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_word
from tests.recipes.support.chosen_rows import (
    card_ladder_and_layout,
    chosen,
    family_and_layout,
)

YARN = RopeScaling.yarn(base=40_000, factor=4.0, original_length=2048)
EACH_LADDER = pytest.mark.parametrize("name", chosen(card_ladder_and_layout))
EACH_KIND = pytest.mark.parametrize("name", chosen(family_and_layout))


@cache
def built(name: str) -> run.Partial:
    """Return a shipped recipe, which no test may change; not while the tests are collected."""
    return FACTORIES[name]()


@pytest.fixture
def recipe() -> run.Partial:
    """Return a recipe that the test may change."""
    return copy.deepcopy(built("tiny_8k"))


@EACH_KIND
def test_nemo_run_finds_the_recipe_by_its_name(name):
    assert run.cli.resolve_factory(llm.pretrain, name)() == built(name)


@EACH_KIND
def test_a_recipe_passes_its_own_check(name):
    check(built(name))


@EACH_LADDER
def test_a_name_is_card_ladder_and_length(name):
    recipe = built(name)
    card = max((card for card in CARDS.values() if name.startswith(card.name)), key=_by_name)
    name = name.removesuffix(f"_{ROWS[name].variant}")
    said, _, length = name.rpartition("_")
    rest = name.removeprefix(card.name).lstrip("_")
    ladder = LADDERS.get(rest) or LADDERS[said.removeprefix(card.name).lstrip("_") or card.name]
    [stage] = [
        stage
        for stage in ladder.stages
        if length == length_word(stage.target_length if ladder.name == rest else stage.seq_length)
    ]

    assert recipe.data.seq_length == recipe.model.config.seq_length == stage.seq_length
    assert recipe.model.config.num_layers == card.layers
    assert recipe.model.config.vocab_size == card.vocab
    assert tokens_per_batch(recipe) == stage.tokens_per_batch
    assert recipe.trainer.max_steps == stage.steps
    assert recipe.optim.config.lr == stage.lr.peak
    rope = card.native_rope if stage.rope == "native" else stage.rope
    assert run.Config(type(rope), **_fields(rope)) == recipe.model.config.rope
    assert Path(recipe.log.ckpt.dirpath).parent.name == name


def _by_name(card: ModelCard) -> int:
    return len(card.name)


def _fields(rope) -> dict:
    return {name: getattr(rope, name) for name in type(rope).__dataclass_fields__}


@EACH_KIND
def test_a_recipe_on_twice_the_nodes_keeps_its_batch_or_says_that_it_cannot(name):
    row = ROWS[name]
    layout, nodes = row.on(2 * row.nodes), 2 * row.nodes
    if row.stage.sequences_per_batch % (layout.dp * layout.micro_batch):
        with pytest.raises(ValueError, match=f"not divisible by micro-batch .* DP {layout.dp}"):
            FACTORIES[name](nodes=nodes)
        return
    two = FACTORIES[name](nodes=nodes)
    assert two.trainer.num_nodes == nodes
    assert world_size(two) == layout.world_size
    assert two.data.global_batch_size == built(name).data.global_batch_size


def test_ranks_that_nodes_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="2 ranks, which do not divide evenly over 3 nodes"):
        FACTORIES["tiny_8k"](nodes=3)


@EACH_KIND
def test_a_recipe_survives_our_yaml_file(name, tmp_path):
    yaml_file.write(built(name), tmp_path / "recipe.yaml")
    assert yaml_file.read(tmp_path / "recipe.yaml") == built(name)


@EACH_KIND
def test_nemo_run_writes_the_same_yaml(name):
    assert ConfigSerializer().serialize_yaml(built(name)) == yaml_file.dump(built(name))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not YAML"),
        ("seq_length: 8192\n", "holds no recipe"),
        ("_target_: os.system\n_partial_: true\n", "'os.system' is not from a package"),
        ("_target_: nemoesque.x\n_partial_: true\n", "is not from a package"),
        ("_target_: recipes.nemo2.model.Missing\n_partial_: true\n", "cannot be imported"),
        (
            "_target_: recipes.spec.model_card.ModelCard\n_partial_: true\nlayer: 3\n",
            "layer",
        ),
        ("_target_: nemo.lightning.io.api.load_context\npath: x\n", "is not from a package"),
        (
            "_target_: nemo.collections.common.tokenizers.AutoTokenizer\ntrust_remote_code: true\n",
            "is not from a package",
        ),
        ("_target_: lightning.pytorch.cli.LightningCLI\n", "is not from a package"),
        ("_target_: nemo.collections.llm.api.import_ckpt\n_partial_: true\n", "is a function"),
        ("_target_: data.prepare.prepare\nout: x\n", "'data.prepare.prepare' is a function"),
        ("_target_: nemo.collections.llm.api.import_ckpt\n_call_: false\n", "is a function"),
        (
            "_target_: nemo.collections.llm.api.pretrain\n_partial_: true\ntrainer:\n"
            "  callbacks:\n  - _target_: megatron.core.utils.get_model_config\n"
            "    _call_: false\n",
            r"trainer\.callbacks\[0\]: _target_ 'megatron\.core.*get_model_config' is a function",
        ),
        ("_target_: data.prepare.prepare\n_call_: false\n", "holds no recipe"),
        ("_target_: megatron.core.optimizer.OptimizerConfig\n_call_: false\n", "holds no recipe"),
        ("_target_: recipes.resolved.yaml_file.os.system\n", "cannot be imported"),
        ("_target_: recipes.resolved.yaml_file.importlib\n", "is defined in"),
    ],
    ids=[
        "broken", "no recipe", "foreign", "foreign by prefix", "missing", "misspelled key",
        "context", "tokenizer", "command line", "function", "own function",
        "function as a value", "function as a value inside",
        "own function as a value", "class as a value", "module of a module",
        "module",
    ],
)  # fmt: skip
def test_a_yaml_file_that_is_no_recipe_is_refused(tmp_path, text, words):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        yaml_file.read(tmp_path / "recipe.yaml")


def test_a_yaml_file_may_not_name_what_reads_more_than_weights(recipe, tmp_path):
    recipe.resume.restore_config = run.Config(RestoreConfig, path="x", load_artifacts=True)
    yaml_file.write(recipe, tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match=r"resume\.restore_config may read more than weights"):
        yaml_file.read(tmp_path / "recipe.yaml")


def test_a_misspelled_parallel_size_is_refused_with_the_right_name(recipe):
    recipe.trainer.strategy.context_paralel_size = 2
    with pytest.raises(
        ValueError,
        match=r"trainer\.strategy\.context_paralel_size .* did you mean context_parallel_size\?",
    ):
        check(recipe)


def test_a_misspelled_key_is_refused_after_yaml_too(recipe, tmp_path):
    recipe.trainer.strategy.context_paralel_size = 2
    yaml_file.write(recipe, tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="did you mean context_parallel_size"):
        check(yaml_file.read(tmp_path / "recipe.yaml"))


def test_a_key_near_no_name_is_refused_without_a_guess(recipe):
    recipe.trainer.strategy.zzz = 2
    assert list(phantom_keys(recipe)) == ["trainer.strategy.zzz is not a parameter of CpuStrategy"]


class Open:
    """Takes anything."""

    def __init__(self, known: int = 0, **rest: int) -> None: ...


class Closed(Open):
    """Takes what it names, and nothing of its base."""

    def __init__(self, own: int = 0) -> None: ...


class Through(Open):
    """Takes its own and, through its keywords, its base's."""

    def __init__(self, own: int = 0, **rest: int) -> None: ...


@pytest.mark.parametrize(
    "tree",
    [
        [run.Config(Open, known_=1)],
        (run.Config(Open, known_=1),),
        {"one": run.Config(Open, known_=1)},
        run.Config(Through, own=run.Config(Open, known_=1)),
    ],
    ids=["list", "tuple", "dict", "argument"],
)
def test_a_phantom_key_is_found_wherever_it_lies(tree):
    (sentence,) = phantom_keys(tree)
    assert "known_ is not a parameter of Open; did you mean known?" in sentence


def test_a_class_names_the_parameters_of_its_bases_where_they_reach_them():
    assert named_parameters(Through) == ["own", "known"]
    assert named_parameters(Closed) == ["own"]
    assert {"context_parallel_size", "timeout"} <= set(named_parameters(CpuStrategy))


def set_seq_length(recipe: run.Partial) -> None:
    recipe.model.config.seq_length = 4096


def set_log_seq_length(recipe: run.Partial) -> None:
    recipe.trainer.callbacks[0].seq_length = 4096


def set_log_tokens(recipe: run.Partial) -> None:
    recipe.trainer.callbacks[0].tokens_per_batch = 4096


def set_average(recipe: run.Partial) -> None:
    recipe.trainer.strategy.ddp.average_in_collective = True


def set_loss(recipe: run.Partial) -> None:
    recipe.model.config.calculate_per_token_loss = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_seq_length, r"model\.config\.seq_length is 4,096 but the data module gives 8,192"),
        (set_log_seq_length, "step log's seq_length is 4,096 but the data module gives 8,192"),
        (set_log_tokens, "step log's tokens_per_batch is 4,096 but the data module gives 8,192"),
        (set_average, "average_in_collective must be False"),
        (set_loss, "calculate_per_token_loss must be True"),
    ],
)
def test_two_places_that_disagree_are_refused(recipe, change: Callable[[run.Partial], None], words):
    change(recipe)
    with pytest.raises(ValueError, match=words):
        check(recipe)


def test_a_length_that_every_place_agrees_on_is_accepted(recipe):
    recipe.model.config.seq_length = recipe.data.seq_length = 4096
    recipe.trainer.callbacks[0].seq_length = 4096
    recipe.trainer.callbacks[0].tokens_per_batch = 4096
    check(recipe)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("trainer.strategy.context_parallel_size", 4, "world size 2 does not match the layout"),
        ("trainer.strategy.tensor_model_parallel_size", 2, "it goes with tensor parallelism"),
        ("model.config.num_attention_heads", 3, "3 heads and 2 KV heads on each TP rank"),
        ("model.config.cp.kind", "hybrid", "hybrid needs ulysses"),
        ("model.config.cp.kind", "spiral", "'spiral' is unknown; choose auto, ring"),
        ("model.config.cp.kind", "a2a", "Transformer Engine's, and this model runs without it"),
        ("model.config.cp.ulysses", 2, "no effect on context parallel kind ulysses"),
        ("model.config.cp_comm_type", "a2a", "set model.config.cp.kind"),
        ("model.config.attention_kernel", "flash", "it is one of auto, cpu_flash"),
        ("model.config.attention_kernel", "cudnn", "does not compute on cpu; take auto"),
        ("model.config.kv_channels", 31, "the head size is 31"),
        ("model.config.rotary_base", 5, "the rotation is model.config.rope"),
        ("model.config.make_vocab_size_divisible_by", 64, "pads a vocabulary that tensor"),
        ("model.config.rotary_interleaved", True, "the rotation is model.config.rope"),
        ("model.config.rope.method", "spiral", "RoPE method 'spiral' is unknown"),
        ("model.config.rope.partial_rotary_factor", 0.03, "0.03, so 0 turn"),
        ("model.config.window_size", [4, 0], r"model\.config\.window_size is \[4, 0\]"),
        ("model.config.attention_dropout", 0.1, r"attention_dropout is 0\.1"),
        ("model.config.recompute_granularity", "full", r"overwritten by model\.config\.recompute;"),
        ("model.config.recompute_modules", ["mlp"], r"overwritten by model\.config\.recompute;"),
        ("model.config.recompute.kind", "some", "recompute 'some' is unknown; choose none, full"),
        ("model.config.recompute.layers", 2, "layers is 2, which has no effect on none"),
        ("model.config.tiling.loss_tile", 0, "loss_tile is 0 tokens; it must be at least 1"),
        ("model.config.offload.tensors", "all", "offload 'all' is unknown; choose none, inputs"),
        (
            "model.config.expert_model_parallel_size",
            2,
            r"overwritten by trainer\.strategy\.expert_model_parallel_size; set that one",
        ),
        (
            "trainer.strategy.account_for_loss_in_pipeline_split",
            True,
            "_pipeline_split is False and account_for_loss_in_pipeline_split True; set both",
        ),
        ("trainer.strategy.num_layers_in_first_pipeline_stage", 1, "not supported; leave it out"),
        ("model.config.num_layers_in_last_pipeline_stage", 1, "not supported; leave it out"),
        ("trainer.strategy.pipeline_model_parallel_layout", "Et|tL", "not supported; leave it out"),
        ("trainer.strategy.expert_model_parallel_size", 1.5, "5; it must be a whole number"),
        ("model.config.cpu_offloading", True, r"set model\.config\.offload"),
        ("model.config.fp8", "hybrid", r"overwritten by trainer\.plugins\.fp8; set that one"),
        ("trainer.plugins.fp8", "hybrid", "fp8 delayed does not compute on cpu"),
        ("trainer.plugins.fp8_dot_product_attention", True, "attention computes in bf16"),
        ("trainer.plugins.fp4", "e2m1", "fp4 is 'e2m1', which is not supported"),
        ("optim.config.use_distributed_optimizer", False, "set both, or neither"),
        ("optim.config.optimizer_offload_fraction", 0.5, "set the layout's optimizer_offload"),
        ("trainer.strategy.fsdp", "pytorch", "it is megatron, with optim_grads or optim_grads_pa"),
        (
            "trainer.strategy.ddp.use_megatron_fsdp",
            True,
            r"no effect without trainer.strategy\.fsdp",
        ),
        ("trainer.strategy.ddp.data_parallel_sharding_strategy", "optim", "set the layout's shard"),
        ("data.documents", "apart", "it must be 'across' or 'within'"),
        ("trainer.devices", 3, "world size 3 does not match"),
        ("trainer.strategy.virtual_pipeline_model_parallel_size", 1, "it is 2 or more, or null"),
        ("trainer.strategy.virtual_pipeline_model_parallel_size", 0, "it is 2 or more, or null"),
        ("trainer.max_steps", 0, "max_steps is 0"),
        ("optim.config.lr", 3.0, "the learning rate is 3"),
    ],
    ids=str,
)
def test_an_override_that_breaks_a_law_is_refused(recipe, path, value, words):
    *parents, name = path.split(".")
    node = recipe
    for parent in parents:
        node = getattr(node, parent)
    setattr(node, name, value)
    with pytest.raises(ValueError, match=words):
        check(recipe)


def test_an_interleaved_pipeline_keeps_the_outputs_that_it_sends(recipe):
    recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 2
    config = recipe.model.config
    config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    with pytest.raises(ValueError, match="freed while they are being sent"):
        check(recipe)


def test_every_problem_is_told_at_once(recipe):
    recipe.trainer.strategy.context_paralel_size = 2
    recipe.model.config.seq_length = 4096
    with pytest.raises(ValueError, match=r"(?s)did you mean.*; model\.config\.seq_length"):
        check(recipe)


def test_factors_of_another_count_than_the_heads_are_refused(recipe):
    rope = RopeScaling(
        method="longrope", base=40_000, factor=4.0, original_length=2048,
        short_factor=[1.0] * 8, long_factor=[2.0] * 8,
    )  # fmt: skip
    recipe.model.config.rope = as_config_node(rope)
    with pytest.raises(ValueError, match="8 factors and 32 dimensions"):
        check(recipe)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("original_length", 16_384, "original_length is 16,384 and the context 8,192 tokens"),
        ("factor", 2.0, "yarn reaches 4,096 tokens, factor 2 times"),
    ],
)
def test_a_rotation_that_does_not_meet_the_context_is_told(recipe, name, value, words):
    assert notes(recipe) == []
    setattr(recipe.model.config.rope, name, value)
    check(recipe)
    assert [words in note for note in notes(recipe)] == [True]


@pytest.mark.parametrize(("rope", "told"), [(YARN, True), (RopeScaling.base_change(40_000), False)])
def test_a_rotation_that_a_family_cannot_be_exported_with_is_told(recipe, rope, told):
    recipe.model.config.rope = as_config_node(rope)
    assert notes(recipe) == []
    recipe.model.config = run.Config(
        LongContextNemotronConfig, **fdl.ordered_arguments(recipe.model.config)
    )
    assert ["ignores rope_scaling" in note for note in notes(recipe)] == [True] * told
