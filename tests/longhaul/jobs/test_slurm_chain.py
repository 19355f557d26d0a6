# SPDX-License-Identifier: Apache-2.0
"""The jobs of a chain: what they are told of their limits and expect of their machines."""

import copy
from dataclasses import replace
from pathlib import Path

import fiddle as fdl
import pytest
from fiddle import Buildable, daglish
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from longhaul.jobs import ladder_run, records, slurm_chain
from longhaul.jobs.evaluated_training import describe, with_evaluations
from longhaul.jobs.job_times import require_time, save_seconds
from longhaul.jobs.store_source import Documents
from longhaul.jobs.watched_training import train_watched
from recipes.ladders import LADDERS
from recipes.models import TINY
from recipes.nemo2.settings import place
from recipes.notation.layout import layout_from
from recipes.pretrain import pretrain
from recipes.resolved.read import layout_of
from recipes.resolved.stage import ResolvedStage
from recipes.shipped.factories import FACTORIES
from recipes.shipped.table import ROWS
from recipes.spec.layout import Fp8
from slurm import cluster_file
from slurm.cluster_file import ClusterFile, Container, Slurm

NODES = 4
H100 = cluster_file.load("dgx_h100")
DOCUMENTS = Documents(source="/shared/books", tokenizer=None, vocab_size=128_256)


def site(**slurm) -> ClusterFile:
    """Return DGX H100 with an account, without a container."""
    chosen = Slurm(account="me", **{"time": "08:00:00", **slurm})
    return H100.model_copy(update={"slurm": chosen, "container": None, "python": "/shared/venv"})


def jobs(plan, made, file):
    """Return the jobs by their names."""
    export = plan.run.parent / "exported"
    found = slurm_chain.jobs(plan, made, file, documents=DOCUMENTS, export=export)
    return {job.name: job for job in found}


@pytest.mark.parametrize(
    "name", ["llama31_8b_ultralong_1m", "llama3_8b_nemo_64k", "llama31_8b_nemo_128k"]
)
def test_a_layout_is_read_back_from_its_recipe(name):
    assert layout_of(FACTORIES[name]()) == ROWS[name].layout


@pytest.mark.parametrize(
    ("words", "fp8"),
    [
        ("tp4 ulysses2 dp4 kept_attention zero3", Fp8()),
        ("tp4 ulysses2 dp4 full adam-on-host:0.5 mb2", Fp8()),
        ("tp4 ring2 dp4 full", Fp8(recipe="tensorwise", bf16_first=1, bf16_last=2)),
    ],
)
def test_a_layout_with_less_usual_choices_is_read_back_too(words, fp8):
    layout = replace(layout_from(words), fp8=fp8)
    row = ROWS["llama3_8b_nemo_64k"]
    assert layout_of(pretrain(row.card, row.ladder, row.seq_length, layout, nodes=4)) == layout


def test_an_override_counts_in_what_is_planned(plan):
    recipe = FACTORIES["llama3_8b_nemo_64k"]()
    before = ResolvedStage.of(recipe).planned(plan.card, H100.hardware).plan
    recipe.data.global_batch_size *= 2
    after = ResolvedStage.of(recipe).planned(plan.card, H100.hardware).plan
    assert after.time.step > 1.5 * before.time.step


def test_a_stage_is_warned_early_enough_for_its_step(plan, made):
    step = made[0].plan.time.step
    early = save_seconds(site(save_seconds=10), made[0])
    assert early % 60 == 0
    assert 1.5 * step + 60 <= early < 1.5 * step + 120  # the file knows how long writing takes
    assert save_seconds(site(), made[0]) > early
    assert save_seconds(site(save_seconds=7000), made[0]) == 7000
    assert save_seconds(site(save_seconds=33), replace(made[0], plan=None)) == 33
    train = jobs(plan, made, site(save_seconds=10))[made[0].name]
    assert train.executor.signal == f"USR1@{early}"


def test_a_stage_is_evaluated_while_it_trains_under_the_checks_of_its_training(plan, made):
    chain = {"documents": None, "export": None}
    every_50 = [replace(stage, evaluate_every=50) for stage in made]
    plain, evaluated = (
        slurm_chain.jobs(plan, stages, site(), **chain)[0] for stages in (made, every_50)
    )
    assert fdl.get_callable(plain.task) is fdl.get_callable(evaluated.task) is train_watched
    arguments = fdl.ordered_arguments(evaluated.task)
    assert arguments.pop("every") == 50
    assert arguments == fdl.ordered_arguments(plain.task)
    assert {"config", "expected", "seconds"} == set(arguments)
    alerting = [replace(stage, alert="mail ops") for stage in made]
    [alerted, *_] = slurm_chain.jobs(plan, alerting, site(), **chain)
    assert fdl.ordered_arguments(alerted.task)["alert"] == "mail ops"
    tracking = [replace(stage, track=("wandb",)) for stage in made]
    [tracked, *_] = slurm_chain.jobs(plan, tracking, site(), **chain)
    assert fdl.ordered_arguments(tracked.task) == {"track": ["wandb"], **arguments}
    assert describe(every_50, 50) == [f"{made[0].name} is evaluated every 50 steps while it trains"]
    assert describe(made, "never") == []


def test_a_stage_that_is_debugged_logs_its_communication_and_other_jobs_do_not(plan, made):
    debugged = [replace(stage, debug_comm=True) for stage in made]
    environment = {**H100.environment, "NCCL_DEBUG": "WARN"}
    file = site().model_copy(
        update={"environment": environment, "container": Container(image="/x.sqsh")}
    )
    found = {name: job.executor for name, job in jobs(plan, debugged, file).items()}
    train = found.pop(made[0].name)
    assert train.env_vars["NCCL_DEBUG"] == "WARN"  # as the file says
    assert train.env_vars["NCCL_DEBUG_FILE"].startswith(f"{made[0].folder}/nccl_%h_%p")
    assert {"NCCL_DEBUG_FILE", "TORCH_DISTRIBUTED_DEBUG"} <= set(train.container_env)
    for other in (*found.values(), *(job.executor for job in jobs(plan, made, site()).values())):
        assert "TORCH_DISTRIBUTED_DEBUG" not in other.env_vars


def test_a_stage_in_fp8_is_said_not_to_be_evaluated_while_it_trains(made):
    layout = replace(made[0].layout, fp8=Fp8(recipe="blockwise"))
    [told] = describe([replace(made[0], layout=layout, evaluate_every=0)], 0)
    assert told.startswith(f"{made[0].name} is not evaluated while it trains: it trains in FP8")


def test_a_stage_whose_store_has_no_document_to_evaluate_on_is_said_not_to_be_evaluated(
    made, store_of_lengths
):
    recipe = copy.deepcopy(made[0].recipe)
    recipe.data.store = str(store_of_lengths)
    [told] = describe([replace(made[0], recipe=recipe, evaluate_every=50)], 50)
    assert f"is not evaluated while it trains: {store_of_lengths} has no held-out document" in told


def test_a_command_that_continues_a_stage_evaluates_it_as_it_was_begun(tmp_path, plan, made):
    recipe = copy.deepcopy(made[0].recipe)
    place(recipe, plan.card, plan.ladder, plan.ladder.stages[0], run_to=tmp_path, store=plan.store)
    stage = ResolvedStage.of(recipe)
    assert with_evaluations(stage, None).evaluate_every is None
    records.record(with_evaluations(stage, 50), start="scratch")
    again = with_evaluations(stage, None)
    assert again.evaluate_every == 50
    [told] = describe([again], None)
    assert "every 50 steps" in told
    assert "--eval-every never" in told
    assert with_evaluations(stage, 0).evaluate_every == 0
    records.record(with_evaluations(stage, "never"), start="scratch")
    assert with_evaluations(stage, None).evaluate_every is None
    (stage.folder / "stage.json").write_text('{"name": "x", "seq_length": 1, "evaluate_every": -5}')
    with pytest.raises(ValueError, match="evaluate_every is -5; expected 0 or more steps"):
        with_evaluations(stage, None)


def test_jobs_that_end_by_themselves_are_warned_of_no_limit(plan, made):
    found = jobs(plan, made, site())
    assert [name for name, job in found.items() if job.executor.signal] == [made[0].name]


@pytest.mark.parametrize(
    ("slurm", "prepare"),
    [
        ({"exclusive": False}, None),
        ({"exclusive": False, "mem": "100G"}, "100G"),
        ({"exclusive": False, "ask_for_gpus": "none"}, "0"),  # whole nodes are allocated
        ({}, "0"),
    ],
    ids=str,
)
def test_a_job_without_gpus_leaves_the_memory_of_a_shared_node_to_others(
    plan, made, slurm, prepare
):
    found = jobs(plan, made, site(**slurm))
    assert found["export"].executor.mem == prepare
    assert found[made[0].name].executor.mem == (slurm.get("mem") or "0")  # on all GPUs of its nodes


def test_a_limit_too_short_for_steps_and_saving_is_refused_with_both(plan, made):
    step = made[0].plan.time.step
    early = save_seconds(site(), made[0])
    require_time(made, site(time=str(int(early + 2 * step) // 60 + 1)))
    short = site(time=str(int(early + 2 * step) // 60))
    with pytest.raises(ValueError, match=rf"slurm\.time is .*{early:,} s to save and 2 steps"):
        require_time(made, short)


def test_a_cpu_recipe_is_held_to_the_file_s_own_seconds(plan, tmp_path):
    recipe = FACTORIES["tiny_512"]()
    place(recipe, TINY, LADDERS["tiny"], LADDERS["tiny"][512], run_to=tmp_path, store=tmp_path)
    tiny = [ResolvedStage.of(recipe).planned(TINY, H100.hardware)]
    assert tiny[0].plan is None
    require_time(tiny, site(time="2", save_seconds=15))


def test_the_file_s_own_word_on_the_hub_wins(plan, made):
    def offline(file):
        return jobs(plan, made, file)["prepare"].executor.env_vars["HF_HUB_OFFLINE"]

    assert offline(site()) == "0"
    environment = {**H100.environment, "HF_HUB_OFFLINE": 1}
    assert offline(site().model_copy(update={"environment": environment})) == "1"


def test_the_optimizer_s_part_of_the_host_is_expected(plan):
    row = ROWS["llama3_8b_nemo_64k"]
    layout = replace(row.layout, optimizer_offload=0.5)
    recipe = pretrain(row.card, row.ladder, row.seq_length, layout, nodes=row.nodes)
    stage = ResolvedStage.of(recipe).planned(row.card, H100.hardware)
    expected = jobs(plan, [stage], site())[stage.name].task.expected
    replicas = layout.dp * layout.cp.size
    least = 16 * row.card.parameters / layout.tp / layout.pp / replicas * 0.5
    assert expected.host_bytes_per_rank > 0.9 * least


def test_every_job_looks_at_its_machines_first(plan, made):
    found = jobs(plan, made, site())
    expected = {name: fdl.build(job.task.expected) for name, job in found.items()}
    stage = made[0].name
    assert {name: job.task.seconds for name, job in found.items() if job.task.seconds} == {
        stage: H100.preflight_seconds
    }
    train, evaluate = expected[stage], expected[f"evaluate_{stage}"]
    assert (train.world_size, train.nodes, train.gpus_per_node) == (32, NODES, 8)
    layout = made[0].layout
    assert evaluate.world_size == layout.tp * layout.cp.size
    assert evaluate.nodes * evaluate.ranks_per_node == evaluate.world_size
    assert (evaluate.tp, evaluate.cp) == (layout.tp, layout.cp.size)
    assert evaluate.capability == train.capability
    assert evaluate.host_bytes_per_rank == 0
    for name in ("prepare", "export"):
        one = expected[name]
        assert (one.world_size, one.nodes, one.gpus_per_node) == (1, 1, 0)
        assert one.run_folder == plan.run.resolve()
    assert expected["prepare"].store is None
    assert expected["export"].store == plan.store.resolve()


def test_every_job_is_stated_by_names_as_fiddle_for_python_3_10_needs(plan, made):
    for job in jobs(plan, made, site()).values():
        trees = [value for value, _ in daglish.iterate(job.task) if isinstance(value, Buildable)]
        assert len(trees) > 1
        for tree in trees:
            assert all(isinstance(name, str) for name in fdl.ordered_arguments(tree)), tree
        packed = ZlibJSONSerializer()
        assert packed.deserialize(packed.serialize(job.task)) == job.task


def test_thresholds_of_the_cluster_file_reach_a_stage(plan, made):
    file = site()
    said = file.preflight.model_copy(
        update={"least_driver": "535.104", "free_gib": 700, "slow_failed": 9.0}
    )
    found = jobs(plan, made, file.model_copy(update={"preflight": said}))
    train = fdl.build(found[made[0].name].task.expected)
    assert (train.least_driver, train.free_gib) == ("535.104", 700)
    assert (train.slow_warned, train.slow_failed) == (1.3, 9.0)
    evaluate = fdl.build(found[f"evaluate_{made[0].name}"].task.expected)
    assert (evaluate.least_driver, evaluate.free_gib) == ("535.104", 0)
    assert evaluate.slow_failed == 9.0


def test_an_evaluation_of_odd_ranks_is_spread_evenly(plan, made, monkeypatch):
    sizes = {"tensor_parallel": 2, "context_parallel": 3, "pipeline_parallel": 2}
    layout = {"ranks": 12, **sizes, "device": "cuda"}
    monkeypatch.setattr(slurm_chain.evaluation, "evaluation_layout", lambda *_: dict(layout))
    made_of = jobs(plan, made, site())[f"evaluate_{made[0].name}"].executor
    assert (made_of.nodes, made_of.ntasks_per_node) == (2, 6)


def test_an_evaluation_has_the_layout_that_is_asked_for_and_training_keeps_its_own(plan, made):
    asked = replace(plan, evaluation=ladder_run.EvaluationParallel(tp=2, cp=8, pp=2))
    slurm_chain.require_evaluations(asked, made)
    found, before = jobs(asked, made, site()), jobs(plan, made, site())
    name = f"evaluate_{made[0].name}"
    evaluate = found[name]
    arguments = fdl.ordered_arguments(evaluate.task.task)
    names = ("tensor_parallel", "context_parallel", "pipeline_parallel")
    assert [arguments[name] for name in names] == [2, 8, 2]
    assert (evaluate.executor.nodes, evaluate.executor.ntasks_per_node) == (4, 8)
    expected = fdl.build(evaluate.task.expected)
    assert (expected.world_size, expected.tp, expected.cp, expected.ulysses) == (32, 2, 8, 1)
    assert before[name].task != evaluate.task
    assert all(found[other].task == before[other].task for other in before if other != name)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"tp": 16},
            "32 heads and 8 KV heads are not both divisible by TP 16; TP may be 1, 2, 4 or",
        ),
        ({"cp": 7}, "sequence length 1,048,576 is not divisible by 2 x CP = 14"),
        ({"tp": 8, "cp": 8}, "that takes 64 GPUs, and the stages train on 32"),
        ({"pp": 3}, "32 layers are not divisible by PP 3, nor are 34 with embedding and LM head"),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused(plan, made, asked, said):
    asked = replace(plan, evaluation=ladder_run.EvaluationParallel(**asked))
    with pytest.raises(ValueError, match=said) as error:
        slurm_chain.require_evaluations(asked, made)
    assert str(error.value).startswith(f"{made[0].name} cannot be evaluated under TP ")
    slurm_chain.require_evaluations(plan, made)


def test_the_store_is_made_for_the_longest_stage(plan, made):
    task = jobs(plan, made, site())["prepare"].task.task
    assert task.length == 2**20
    assert task.out == str(Path(plan.store).resolve())


def test_the_store_is_made_also_after_an_array_of_which_a_job_has_failed(plan, made):
    found = slurm_chain.jobs(
        plan, made, site(), documents=replace(DOCUMENTS, jobs=3), export=None, evaluated=False
    )
    after = {job.name: job.executor.dependency_type for job in found}
    assert after.pop("prepare") == "afterany"
    assert {"prepare_plan", "prepare_parts"} < after.keys()
    assert set(after.values()) == {"afterok"}
    (alone, *_) = slurm_chain.jobs(plan, made, site(), documents=DOCUMENTS, export=None)
    assert (alone.name, alone.executor.dependency_type) == ("prepare", "afterok")
