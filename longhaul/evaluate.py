# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate`: what the checkpoints of a run can do at the longest length."""

from pathlib import Path
from typing import Annotated

import typer

from longhaul.console import loading, output_to


def evaluate(
    run: Annotated[Path, typer.Option(help="Run folder, as `longhaul run` leaves it.")],
    store: Annotated[
        Path | None, typer.Option(help="Token store; without it the one the run trained on.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Stage to evaluate, repeatable; without it all.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Held-out documents to read, at most.")] = 24,
    trials: Annotated[int, typer.Option(help="Passkey prompts a cell of the grid.")] = 2,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share each sequence.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Evaluate loss by position and passkey retrieval of a run's stages."""
    from data.store import Manifest
    from eval.results import read_run, read_stage

    names = list(read_run(run).stages)
    for name in stage or []:
        if name not in names:
            raise ValueError(f"{run} has no stage {name!r}; it has {', '.join(names)}")
    chosen = [name for name in names if not stage or name in stage]
    if ranks % (tensor_parallel * context_parallel):
        raise ValueError(
            f"{ranks} ranks do not divide into TP {tensor_parallel} x CP {context_parallel}"
        )
    records = [read_stage(run, name) for name in names]
    lengths = [record.seq_length for record in records if record is not None]
    with loading("NeMo and Megatron-Core"):
        from longhaul.evaluation_job import evaluation_job, require_trained, trained_store
        from slurm.launch import run_in_order

        require_trained(run, chosen)
        store = store or trained_store(run, chosen[0])
        Manifest.load(store)
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
        )
    with output_to(run / "output.log") as console, console.status("evaluating"):
        run_in_order("evaluate", [job], run / "launch")
    typer.echo(run / "eval")
