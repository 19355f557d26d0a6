# SPDX-License-Identifier: Apache-2.0
"""The jobs of a chain that score a model: public suites, and RULER's samples of a gate."""

from dataclasses import replace

import fiddle as fdl
import pytest
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from data.tokenization.tokenizer import load
from eval.ruler.samples import make, suite_folder
from eval.ruler.sources import Sources
from eval.ruler.tasks import TASKS
from eval.ruler.tokens import Tokens
from longhaul.jobs import chain_ruler, ladder_run, slurm_chain
from longhaul.jobs.chain_suites import jobs_left, suites_of
from recipes.spec.gate import RulerThresholds, SuiteThreshold
from recipes.spec.suites import SuiteRun
from tests.eval.ruler.support import byte_level, with_marks
from tests.longhaul.jobs.test_slurm_chain import DOCUMENTS, site


def test_suites_run_on_the_base_model_first_and_on_a_stage_after_its_evaluation(plan, made):
    suites = (SuiteRun(tasks=("hellaswag",)), SuiteRun(tasks=("niah_single_1",), lengths=(8192,)))
    threshold = SuiteThreshold(task="hellaswag", drop=0.02)
    gate = replace(plan.ladder.stages[0].gate, suites=(threshold,))
    [stage], name = plan.ladder.stages, made[0].name
    ladder = replace(plan.ladder, suites=suites, stages=(replace(stage, gate=gate),))
    asked = replace(plan, ladder=ladder, evaluation=ladder_run.EvaluationParallel(tp=2, cp=16))
    left = jobs_left(asked, made)
    cache = {"HF_HOME": "/shared/hf", "HF_HUB_OFFLINE": "1"}
    file = site().model_copy(update={"environment": {"HF_HOME": "/shared/other"}})
    found = slurm_chain.jobs(
        asked, made, file, documents=DOCUMENTS, export=None, scored=left, cache=cache
    )
    by_name = {job.name: job for job in found}
    assert list(by_name) == ["prepare", "suites_base", name, f"evaluate_{name}", f"suites_{name}"]
    for model in ("base", name):
        job = by_name[f"suites_{model}"]
        told = fdl.ordered_arguments(job.task.task)
        assert (told["model"], told["first"], told["verify"]) == (model, name, True)
        assert (told["tensor_parallel"], told["context_parallel"]) == (2, 16)
        assert [fdl.build(each) for each in told["suites"]] == list(suites_of(ladder))
        evaluate = by_name[f"evaluate_{name}"]
        assert job.task.expected == evaluate.task.expected
        assert (job.executor.nodes, job.executor.ntasks_per_node) == (4, 8)
        assert job.executor.env_vars["HF_HOME"] == "/shared/other"  # the file's own word
        assert job.executor.dependency_type == "afterok"
        packed = ZlibJSONSerializer()
        assert packed.deserialize(packed.serialize(job.task)) == job.task
    assert by_name["suites_base"].task.task.thresholds == []
    [judged] = by_name[f"suites_{name}"].task.task.thresholds
    assert (fdl.build(judged), by_name[f"suites_{name}"].task.task.before) == (threshold, "base")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return a folder of samples at 1,024 tokens, and the tokenizer that they were made with."""
    folder, tokenizer = tmp_path_factory.mktemp("ruler"), byte_level()
    tokenizer.hugging_face.save_pretrained(folder / "tokenizer")
    tokens, sources = Tokens(load(str(folder / "tokenizer"))), Sources(None)
    place = suite_folder(folder, sources, tokens)
    made = {"length": 1024, "samples": 1, "seed": 0, "tokens": tokens, "sources": sources}
    for task in ("niah_single_1", "niah_multikey_2"):
        make(place, TASKS[task], **made)
    return place, folder / "tokenizer"


def with_ruler(plan, folder, **stated):
    """Return the plan with thresholds of RULER in the gate of its only stage."""
    [stage] = plan.ladder.stages
    ruler = RulerThresholds(**{"samples": str(folder), "least": {"mean": 0.8}, **stated})
    stage = replace(stage, gate=replace(stage.gate, ruler=ruler))
    return replace(plan, ladder=replace(plan.ladder, stages=(stage,)))


def test_a_stage_answers_the_samples_of_its_gate_after_its_evaluation(plan, made, samples):
    place, tokenizer = samples
    asked = with_ruler(plan, place, length=1024, least={"niah_multikey_2": 0.9}, limit=3)
    chain_ruler.require_samples(asked, made, str(tokenizer))
    left, name = chain_ruler.jobs_left(asked, made), made[0].name
    found = slurm_chain.jobs(asked, made, site(), documents=None, export=None, scored=left)
    assert [job.name for job in found] == [name, f"evaluate_{name}", f"ruler_{name}"]
    told = fdl.ordered_arguments(found[2].task.task)
    assert told["files"] == [str(place / "niah_multikey_2-1024-seed0.jsonl")]
    assert (told["least"], told["limit"], told["stage"]) == ({"niah_multikey_2": 0.9}, 3, name)
    assert (told["tensor_parallel"], told["context_parallel"]) == (
        made[0].layout.tp, made[0].layout.cp.size
    )  # fmt: skip
    assert found[2].task.expected == found[1].task.expected
    packed = ZlibJSONSerializer()
    assert packed.deserialize(packed.serialize(found[2].task)) == found[2].task
    both = chain_ruler.model_jobs(with_ruler(plan, place, length=1024), made)
    assert len(both[0].task.files) == 2  # the mean is over all tasks
    assert chain_ruler.model_jobs(plan, made) == []


def test_samples_that_could_not_be_answered_are_refused(plan, made, samples, tmp_path):
    place, tokenizer = samples
    with_marks().hugging_face.save_pretrained(tmp_path / "other")
    for stated, of, said in (
        ({}, tokenizer, "has no samples at 1M tokens; make them: longhaul ruler make --lengths 1M"),
        ({"length": 1024, "least": {"cwe": 1}}, tokenizer, "has no samples of cwe at 1K tokens"),
        ({"length": 1024}, None, "are of a tokenizer that the chain would train first"),
        ({"length": 1024}, tmp_path / "other", "was made with another tokenizer than the store"),
        ({"samples": str(tmp_path / "lost")}, tokenizer, "lost has no samples at 1M tokens"),
    ):
        asked = with_ruler(plan, place, **stated)
        with pytest.raises(ValueError, match=f"^the gate of {made[0].name}: ruler: ") as told:
            chain_ruler.require_samples(asked, made, None if of is None else str(of))
        assert said in str(told.value)


def test_pipeline_stages_of_evaluations_are_refused_where_a_model_is_scored(plan, samples):
    suites = replace(plan.ladder, suites=(SuiteRun(tasks=("hellaswag",)),))
    by_two = ladder_run.EvaluationParallel(pp=2)
    for scored, said in (
        (replace(plan, ladder=suites), "runs suites, .* expected --eval-pp 1"),
        (with_ruler(plan, samples[0]), "has gates on RULER's samples, .* expected --eval-pp 1"),
    ):
        ladder_run.require_no_pipeline(scored)
        with pytest.raises(ValueError, match=f"--eval-pp is 2, and ladder .* {said}"):
            ladder_run.require_no_pipeline(replace(scored, evaluation=by_two))
    ladder_run.require_no_pipeline(replace(plan, evaluation=by_two))
