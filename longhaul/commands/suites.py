# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate --suite`: tasks of lm-evaluation-harness on checkpoints and exports."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from longhaul.options import print_json
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.run_folder.stage_named import require_any_checkpoint, stage_named
from longhaul.terminal.console import busy, loading, output_to
from longhaul.terminal.messages import note
from longhaul.terminal.results import announcing

if TYPE_CHECKING:
    from eval.harness.tasks import SuiteTask


@dataclass(frozen=True)
class SuiteOptions:
    """What `longhaul evaluate --suite` was given besides the run."""

    suite: str
    lengths: Sequence[int]
    limit: int | None
    include: Path | None
    export: Path | None
    stages: Sequence[str]
    store: Path | None
    base: bool
    ranks: int
    tp: int
    cp: int
    device: str | None
    verify: bool
    as_json: bool
    few_shot: int | None = None
    chat_template: bool = False


def evaluate_suites(run: Path, given: SuiteOptions) -> None:
    """Evaluate stages or an export on tasks, and print their scores.

    The data of tasks are loaded here once, so that they are in the cache of ranks, which do not
    download. A result with the same settings is not made again.
    """
    from data.files.writable import require_folder
    from eval.harness.tasks import require_harness
    from eval.run_folder import read_stage, stage_names
    from eval.suite_results import group_metrics, result_at, result_path
    from longhaul.pages.suite_tables import show_suites

    names = stage_names(run)
    named = [stage_named(run, word, names) for word in given.stages or names]
    chosen = [name for name in names if name in named]
    suites = [word.strip() for word in given.suite.split(",")]
    if not all(suites):
        raise ValueError(f"--suite is {given.suite!r}; expected names of tasks such as a,b")
    require_harness()
    require_folder(run / "eval", "the results' folder")
    require_unused(run / "eval")
    records = [read_stage(run, name) for name in names]
    contexts = sorted({record.context for record in records if record is not None})
    if contexts and given.export is None:
        require_any_checkpoint(run, chosen)
    with loading("NeMo, Megatron-Core and lm-evaluation-harness"):
        from eval.harness.tasks import built, find, require_few_shot
        from slurm.experiment import run_in_order

        tasks, groups, manager = find(suites, given.include)
        require_few_shot(tasks, given.few_shot)
        lengths = list(given.lengths) or contexts
        if given.export is None:
            job, models, tokenizer, lengths = _stages(run, chosen, given, suites, tasks, lengths)
        else:
            job, models, tokenizer, lengths = _export(run, names, given, suites, tasks, lengths)
        if given.chat_template:
            from eval.harness.tasks import template_sha256

            template_sha256(tokenizer)
        for task in tasks:
            length = lengths[0] if task.makes_prompts else None
            built(task, manager, tokenizer=tokenizer, length=length, limit=1)
    paths = {
        f"{model} {task.name}" + (f" at {length:,}" if length else ""): result_path(
            run,
            model,
            task.name,
            length,
            given.limit,
            given.few_shot,
            chat_template=given.chat_template,
        )
        for model in models
        for task in tasks
        for length in (lengths if task.makes_prompts else (None,))
    }
    if given.export is not None:
        _require_its_own(paths.values(), given.export)
    said = f"evaluating {', '.join(models)} on {', '.join(suites)}"
    with (
        in_use(run / "eval"),
        output_to(run / "output.log") as console,
        busy(console, said),
        announcing(console, paths, "evaluated"),
    ):
        run_in_order("evaluate-suite", [job], run / "launch")
    results = [found for path in paths.values() if (found := result_at(path)) is not None]
    of_groups = group_metrics(groups, results)
    if given.as_json:
        print_json({"suites": results, "groups": of_groups})
        return
    show_suites(results, of_groups)
    typer.echo(run / "eval" / "suites")


def _require_its_own(paths: Iterable[Path], export: Path) -> None:
    """Raise ValueError if results there are of another folder with the same name."""
    from eval.suite_results import result_at

    for path in paths:
        found = result_at(path)
        if found is not None and Path(found.weights) != export.resolve():
            raise ValueError(
                f"{path} has the result of {found.weights}, a folder with the same name as "
                f"--export {export}; rename one of the two, or remove the result"
            )


def _asked(
    suites: Sequence[str], lengths: Sequence[int], given: SuiteOptions, device: str
) -> dict[str, Any]:
    return {
        "suites": list(suites),
        "lengths": list(lengths),
        "limit": given.limit,
        "few_shot": given.few_shot,
        "chat_template": given.chat_template,
        "include": "" if given.include is None else str(given.include.resolve()),
        "device": device,
    }


def _stages(
    run: Path,
    chosen: list[str],
    given: SuiteOptions,
    suites: Sequence[str],
    tasks: "Sequence[SuiteTask]",
    lengths: list[int],
) -> tuple[Any, list[str], Path, list[int]]:
    """Return the job, the names of models, their tokenizer and the lengths of prompts."""
    from data.store import Manifest
    from eval.base_model import base_models
    from eval.harness.tasks import PREFIX_ROOM
    from eval.run_folder import read_stage
    from longhaul.jobs.evaluation import recipe_of, require_layout, require_trained
    from longhaul.jobs.suites import stages_job
    from recipes.resolved.read import device_of

    records = {name: read_stage(run, name) for name in chosen}
    contexts = [record.context for record in records.values() if record is not None]
    if not contexts:
        raise ValueError(
            f"no stage of {run} has been trained yet: it has no stage.json to evaluate"
        )
    recipe = recipe_of(run, chosen[0])
    manifest = Manifest.load(given.store or Path(recipe.data.store))
    require_trained(run, chosen, manifest)
    device = given.device or device_of(recipe)
    models = base_models(run, chosen) if given.base else []
    made = [length + PREFIX_ROOM for length in lengths if any(task.makes_prompts for task in tasks)]
    pieces = 2 * given.cp * given.tp
    longest = -(-max([*contexts, *made]) // pieces) * pieces
    sizes = {"ranks": given.ranks, "tp": given.tp, "cp": given.cp}
    require_layout(run, chosen, **sizes, length=longest, device=device)
    job = stages_job(
        run,
        chosen,
        ranks=given.ranks,
        tokenizer=str(manifest.tokenizer_path.resolve()),
        tensor_parallel=given.tp,
        context_parallel=given.cp,
        verify=given.verify,
        base=given.base,
        **_asked(suites, lengths, given, device),
    )
    return job, [*(model.name for model in models), *chosen], manifest.tokenizer_path, lengths


def _export(
    run: Path,
    names: Sequence[str],
    given: SuiteOptions,
    suites: Sequence[str],
    tasks: "Sequence[SuiteTask]",
    lengths: list[int],
) -> tuple[Any, list[str], Path, list[int]]:
    """Return the job, the name of the export, its tokenizer and the lengths of prompts."""
    from eval.harness.run import of_export
    from longhaul.jobs.evaluation import recipe_of
    from longhaul.jobs.suites import export_job
    from recipes.hugging_face.checksums import unverified
    from recipes.resolved.read import device_of

    folder = given.export
    assert folder is not None
    device = given.device or device_of(recipe_of(run, names[0]))
    model = of_export(folder, device)
    if why := unverified(folder, verify=given.verify):
        note(f"note: {why}")
    if model.name in names:
        raise ValueError(
            f"{folder} has the name of a stage of {run}, so their results would replace each "
            "other; rename the folder"
        )
    if any(task.makes_prompts for task in tasks):
        if not given.lengths:
            lengths = [length for length in lengths if length <= model.context] or [model.context]
        if max(lengths) > model.context:
            raise ValueError(
                f"--suite-lengths: {folder} reads {model.context:,} tokens by its config.json, "
                f"fewer than {max(lengths):,}; give at most {model.context:,}"
            )
    job = export_job(run, folder, **_asked(suites, lengths, given, device))
    return job, [model.name], folder, lengths
