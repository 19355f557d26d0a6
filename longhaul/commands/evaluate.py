# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate`: evaluate the checkpoints of a run up to the longest length."""

from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import (
    ContextParallel,
    Device,
    Json,
    Ranks,
    Run,
    TensorParallel,
    Verify,
    print_json,
    require_device,
)
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import busy, loading, output_to
from longhaul.terminal.messages import next_command, note


def evaluate(
    run: Run,
    store: Annotated[
        Path | None, typer.Option(help="Token store; without it the one the run trained on.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Stage to evaluate, repeatable; without it all.")
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Held-out documents to read, at most.")
    ] = 24,
    trials: Annotated[int, typer.Option(min=1, help="Passkey prompts per cell of the grid.")] = 2,
    ranks: Ranks = 2,
    tensor_parallel: TensorParallel = 1,
    context_parallel: ContextParallel = 1,
    device: Device = None,
    as_json: Json = False,
    verify: Verify = None,
) -> None:
    """Evaluate loss by position and passkey retrieval of a run's stages."""
    from data.files.writable import require_folder
    from data.store import Manifest
    from eval.report.evaluations import other_evaluations
    from eval.run_folder import read_evaluation, read_stage, stage_names
    from longhaul.pages.evaluation_tables import show_evaluations

    names = stage_names(run)
    for name in stage or []:
        if name not in names:
            raise ValueError(f"{run} has no stage {name!r}; it has {', '.join(names)}")
    chosen = [name for name in names if not stage or name in stage]
    require_device(device)
    require_folder(run / "eval", "the results' folder")
    require_unused(run / "eval")
    records = [read_stage(run, name) for name in names]
    lengths = sorted({record.context for record in records if record is not None})
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs.evaluation import evaluation_job, recipe_of, require_layout
        from longhaul.run_folder.undamaged import require_evaluable
        from recipes.resolved.read import device_of
        from slurm.experiment import run_in_order

        store = store or Path(recipe_of(run, chosen[0]).data.store)
        device = device or device_of(recipe_of(run, chosen[0]))
        notes = require_evaluable(run, chosen, Manifest.load(store), verify)
        require_layout(
            run,
            chosen,
            ranks=ranks,
            tp=tensor_parallel,
            cp=context_parallel,
            length=max(lengths),
            device=device,
        )
        job = evaluation_job(
            run,
            chosen,
            lengths=lengths,
            store=store,
            documents=documents,
            trials=trials,
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
            device=device,
            verify=verify is not False,
        )
    for words in notes:
        note(f"note: {words}")
    said = f"evaluating {', '.join(chosen)} on {ranks} ranks"
    with (
        in_use(run / "eval"),
        output_to(run / "output.log") as console,
        busy(console, said),
    ):
        run_in_order("evaluate", [job], run / "launch")
    found = [each for name in chosen if (each := read_evaluation(run, name)) is not None]
    others = [other for name in chosen for other in other_evaluations(run, name)]
    if as_json:
        print_json({"evaluations": found, "other_settings": others})
        return
    show_evaluations(found, others)
    typer.echo(run / "eval")
    next_command(["longhaul", "report", "--run", run], "show all results on one page")
