# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate`: evaluate the checkpoints of a run, and the model that it started from."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longhaul.commands.suites import SuiteOptions, evaluate_suites
from longhaul.options import (
    K_IS,
    ContextParallel,
    Device,
    Json,
    PipelineParallel,
    Ranks,
    RunArgument,
    RunOption,
    TensorParallel,
    Verify,
    length_of,
    print_json,
    require_device,
    run_of,
)
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.run_folder.stage_named import require_any_checkpoint, stage_named
from longhaul.terminal.console import busy, loading, output_to
from longhaul.terminal.messages import next_command, note, resumable
from longhaul.terminal.results import announcing_evaluations

if TYPE_CHECKING:
    from eval.base_model import BaseModel


def evaluate(
    given: RunArgument = None,
    run: RunOption = None,
    store: Annotated[
        Path | None, typer.Option(help="Token store; without it the one the run trained on.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Stage to evaluate, its name or length; repeatable; without it all."),
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Held-out documents to read, at most.")
    ] = 24,
    trials: Annotated[
        int, typer.Option(min=0, help="Passkey prompts per cell of the grid; 0 for none.")
    ] = 2,
    base: Annotated[
        bool,
        typer.Option(
            "--base",
            help="Also the weights that training began from: with their own rotation, and with "
            "each stage's.",
        ),
    ] = False,
    lengths: Annotated[
        str,
        typer.Option(
            help=f"Ends of the ranges of positions, such as 2K,4K,8K ({K_IS}). Documents are read "
            "to the last.",
            show_default="the stages' contexts; with --base also the base model's",
        ),
    ] = "",
    passkeys: Annotated[
        str, typer.Option(help="Lengths of passkey prompts.", show_default="as --lengths")
    ] = "",
    depths: Annotated[
        str,
        typer.Option(
            help="Depths of the passkey, 0 (first) to 1 (last).",
            show_default="0, 0.25, 0.5, 0.75, 1",
        ),
    ] = "",
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what has no evaluation with these settings.")
    ] = False,
    context_gain: Annotated[
        bool,
        typer.Option(
            "--context-gain",
            help="Also the loss of the last tokens of each document's window, given more and more "
            "of the window.",
        ),
    ] = False,
    suite: Annotated[
        str,
        typer.Option(help="Tasks or groups of lm-eval instead, such as niah_single_1."),
    ] = "",
    suite_lengths: Annotated[
        str,
        typer.Option(
            help=f"With --suite: lengths of the prompts that tasks make ({K_IS}).",
            show_default="the stages' contexts",
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --suite: samples of each task, at most.")
    ] = None,
    few_shot: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --suite: examples before each question.",
            show_default="as each task states",
        ),
    ] = None,
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template", help="With --suite: prompts in the tokenizer's chat template."
        ),
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(help="With --suite: folder of task YAML files of your own.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="With --suite: a Hugging Face folder to evaluate, not the stages."),
    ] = None,
    ranks: Ranks = 2,
    tensor_parallel: TensorParallel = 1,
    context_parallel: ContextParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    device: Device = None,
    as_json: Json = False,
    verify: Verify = None,
) -> None:
    """Evaluate loss by position and passkey retrieval of a run's stages, or tasks with --suite."""
    run = run_of(given, run)
    require_device(device)
    if suite:
        _require_defaults(
            "--suite",
            documents=documents != 24,
            trials=trials != 2,
            lengths=lengths,
            passkeys=passkeys,
            depths=depths,
            missing=missing,
            context_gain=context_gain,
            pp=pipeline_parallel != 1,
        )
        if export is not None:
            _require_defaults("--export", stage=stage, base=base, tp=tensor_parallel != 1,
                              cp=context_parallel != 1, store=store,
                              ranks=ranks != 2)  # fmt: skip
        evaluate_suites(
            run,
            SuiteOptions(
                suite=suite,
                lengths=lengths_of("--suite-lengths", suite_lengths),
                limit=limit,
                few_shot=few_shot,
                chat_template=chat_template,
                include=include_path,
                export=export,
                stages=stage or [],
                store=store,
                base=base,
                ranks=ranks,
                tp=tensor_parallel,
                cp=context_parallel,
                device=device,
                verify=verify is not False,
                as_json=as_json,
            ),
        )
        return
    for option, value in (
        ("--suite-lengths", suite_lengths),
        ("--limit", limit),
        ("--few-shot", few_shot is not None),
        ("--chat-template", chat_template),
        ("--include-path", include_path),
        ("--export", export),
    ):
        if value:
            raise ValueError(f"{option} has an effect only with --suite NAME; add it")
    from data.files.writable import require_folder
    from data.store import Manifest
    from eval.report.evaluations import other_evaluations
    from eval.run_folder import (
        base_evaluations,
        read_evaluation,
        read_stage,
        stage_names,
    )
    from longhaul.pages.evaluation_tables import show_evaluations

    names = stage_names(run)
    named = [stage_named(run, word, names) for word in stage or names]
    chosen = [name for name in names if name in named]
    require_folder(run / "eval", "the results' folder")
    require_unused(run / "eval")
    records = [read_stage(run, name) for name in names]
    contexts = sorted({record.context for record in records if record is not None})
    bounds = bounds_of(lengths) or contexts
    prompts = lengths_of("--passkeys", passkeys) or bounds
    choices = {"depths": depths_of(depths)} if depths else {}
    if not contexts:
        raise ValueError(
            f"no stage of {run} has been trained yet: it has no stage.json to evaluate"
        )
    require_any_checkpoint(run, chosen)
    with loading("NeMo and Megatron-Core"):
        from data.tokenization.tokenizer import first_token_notes
        from eval.base_model import base_models
        from eval.finished_parts import titles_of
        from longhaul.jobs.evaluation import evaluation_job, recipe_of, require_layout
        from longhaul.jobs.store_source import require_heldout
        from longhaul.run_folder.undamaged import require_evaluable
        from recipes.resolved.read import device_of
        from slurm.experiment import run_in_order

        models = base_models(run, chosen) if base else []
        if models and not lengths:
            bounds = with_context_of(models[0], bounds)
        if missing and not lengths:  # an evaluation with other ranges would be made again
            bounds = latest_ends(run, chosen, bounds[-1]) or bounds
        longest = max((*bounds, *(prompts if trials else ())))
        store = store or Path(recipe_of(run, chosen[0]).data.store)
        device = device or device_of(recipe_of(run, chosen[0]))
        manifest = Manifest.load(store)
        require_heldout(manifest, longest)
        notes = require_evaluable(run, chosen, manifest, verify)
        notes += first_token_notes(manifest)
        require_layout(
            run,
            chosen,
            ranks=ranks,
            tp=tensor_parallel,
            cp=context_parallel,
            pp=pipeline_parallel,
            length=longest,
            device=device,
        )
        job = evaluation_job(
            run,
            chosen,
            lengths=bounds,
            store=store,
            documents=documents,
            trials=trials,
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
            pipeline_parallel=pipeline_parallel,
            device=device,
            verify=verify is not False,
            passkey_lengths=prompts,
            base=base,
            missing=missing,
            context_gain=context_gain,
            **choices,
        )
    for words in notes:
        note(f"note: {words}")
    if longest > max(contexts):
        note(
            f"note: {longest:,} tokens are read, and the longest context of a stage of {run} is "
            f"{max(contexts):,}"
        )
    bases = [model.name for model in models]
    subjects = [*bases, *chosen]
    for name in subjects:
        if there := titles_of(run, name):
            note(
                f"note: {name} was interrupted after {', '.join(there)}; with the same settings, "
                "weights and code only the rest is measured"
            )
    said = f"evaluating {', '.join(subjects)} on {ranks} ranks"
    with (
        in_use(run / "eval"),
        resumable("continues with the parts that are not measured yet"),
        output_to(run / "output.log") as console,
        busy(console, said),
        announcing_evaluations(console, run, subjects),
    ):
        run_in_order("evaluate", [job], run / "launch")
    found = [each for name in chosen if (each := read_evaluation(run, name)) is not None]
    found = [*(each for each in base_evaluations(run) if each.stage in bases), *found]
    others = [other for name in subjects for other in other_evaluations(run, name)]
    if as_json:
        print_json({"evaluations": found, "other_settings": others})
        return
    show_evaluations(found, others)
    typer.echo(run / "eval")
    next_command(["longhaul", "report", "--run", run], "show all results on one page")


def _require_defaults(option: str, **given: object) -> None:
    """Raise ValueError for options that have no effect with another one."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if named:
        instead = ", or name --suite-lengths" if named == ["--lengths"] else ""
        raise ValueError(
            f"{' and '.join(named)} cannot go with {option}; leave one of them out{instead}"
        )


def with_context_of(base: "BaseModel", bounds: list[int]) -> list[int]:
    """Return the ends of ranges with one more, where the base model's own context ends."""
    from eval.run_folder import BUCKET

    context = base.context
    within = context < bounds[-1] and context % BUCKET == 0
    return sorted({*bounds, context}) if within else bounds


def latest_ends(run: Path, stages: list[str], length: int) -> list[int]:
    """Return the ends of ranges of the stages' evaluations to this length; empty without one."""
    from eval.run_folder import BrokenResultError, read_evaluation

    for stage in stages:
        with suppress(BrokenResultError):
            latest = read_evaluation(run, stage)
            if latest is not None and latest.ranges and latest.eval_length == length:
                return [mean.stop for mean in latest.ranges]
    return []


def lengths_of(option: str, words: str) -> list[int]:
    """Return the lengths of an option such as 4K,8K, in rising order; empty if it is not given."""
    if not all(words.split(",")) and words:
        raise ValueError(f"{option} is {words!r}; expected lengths such as 4K,8K")
    return sorted({length_of(option, word) for word in words.split(",")}) if words else []


def bounds_of(words: str) -> list[int]:
    """Return the ends of ranges of --lengths; raise ValueError for one that is no whole bucket."""
    from eval.run_folder import BUCKET

    bounds = lengths_of("--lengths", words)
    for bound in bounds:
        if bound % BUCKET:
            nearest = max(1, round(bound / BUCKET)) * BUCKET
            raise ValueError(
                f"--lengths: a range of positions cannot end at {bound:,}, since losses are "
                f"averaged over {BUCKET} positions; take {nearest:,}"
            )
    return bounds


def depths_of(words: str) -> list[float]:
    """Return the depths of a list such as 0,0.5,1; raise ValueError for one outside of 0 to 1."""
    try:
        depths = sorted({float(word) for word in words.split(",")})
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths is {words!r}; expected numbers from 0 to 1, such as 0,0.5,1")
    return depths
