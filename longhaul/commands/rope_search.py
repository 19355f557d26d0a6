# SPDX-License-Identifier: Apache-2.0
"""`longhaul rope search`: search divisors of RoPE's frequencies that suit a trained stage."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from longhaul.options import (
    K_IS,
    ContextParallel,
    Device,
    Json,
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
from longhaul.run_folder.stage_named import stage_named
from longhaul.terminal.console import busy, loading, output_to
from longhaul.terminal.messages import note


def search(
    stage: Annotated[str, typer.Option(help="Trained stage to search for.")],
    target: Annotated[str, typer.Option(help=f"Context to stretch to, such as 64K ({K_IS}).")],
    out: Annotated[Path, typer.Option(help="File to write, .json; a Stage can use it.")],
    given: RunArgument = None,
    run: RunOption = None,
    store: Annotated[
        Path | None, typer.Option(help="Token store; without it the one the stage trained on.")
    ] = None,
    population: Annotated[int, typer.Option(min=2, help="Candidates that survive.")] = 64,
    iterations: Annotated[int, typer.Option(min=0, help="Rounds of mutation.")] = 40,
    documents: Annotated[
        int, typer.Option(min=1, help="Held-out documents to score on, at most.")
    ] = 10,
    needles: Annotated[int, typer.Option(min=1, help="Numbers hidden in each document.")] = 4,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Depth of the numbers: 0 first, 1 last; repeatable.", show_default="0"),
    ] = None,
    score: Annotated[
        str,
        typer.Option(help="needle: loss of the answers. documents: loss past the trained length."),
    ] = "needle",
    seed: Annotated[int, typer.Option(help="Seed of candidates and needles.")] = 0,
    ranks: Ranks = 2,
    tensor_parallel: TensorParallel = 1,
    context_parallel: ContextParallel = 1,
    device: Device = None,
    as_json: Json = False,
    verify: Verify = None,
) -> None:
    """Search, starting from YaRN's, the divisors with which the stage reads TARGET tokens best."""
    from data.files.writable import require_file, require_folder
    from data.store import Manifest
    from eval.run_folder import read_stage, stage_names

    if score not in ("needle", "documents"):
        raise ValueError(f"--score is {score!r}; expected needle or documents")
    require_device(device)
    run = run_of(given, run)
    require_file(out, "--out", (".json",))
    names = stage_names(run)
    stage = stage_named(run, stage, names)
    record = read_stage(run, stage)
    if record is None:
        raise ValueError(f"{stage} of {run} has not been trained yet: it has no stage.json")
    length = length_of("--target", target)
    if length <= record.context:
        raise ValueError(
            f"--target is {length:,} tokens and {stage} was trained for {record.context:,}; "
            "a search stretches the context, so name a longer one"
        )
    folder = run / "rope_search"
    require_folder(folder, "the search's folder")
    require_unused(folder)
    with loading("NeMo and Megatron-Core"):
        from eval.rope_search.evolution import Settings
        from longhaul.jobs.evaluation import recipe_of, require_layout, search_job
        from longhaul.run_folder.undamaged import require_evaluable
        from recipes.resolved.read import device_of
        from slurm.experiment import run_in_order

        recipe = recipe_of(run, stage)
        store = store or Path(recipe.data.store)
        device = device or device_of(recipe)
        notes = require_evaluable(run, [stage], Manifest.load(store), verify)
        require_layout(
            run,
            [stage],
            ranks=ranks,
            tp=tensor_parallel,
            cp=context_parallel,
            length=length,
            device=device,
        )
        progress = folder / f"{stage}_{length}.jsonl"
        job = search_job(
            run,
            stage,
            store=store,
            target=length,
            out=out,
            progress=progress,
            settings=Settings(population=population, iterations=iterations, seed=seed),
            documents=documents,
            needles=needles,
            depths=depth or [0.0],
            objective=score,
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
            device=device,
            verify=verify is not False,
        )
    for words in notes:
        note(f"note: {words}")
    with (
        in_use(folder),
        output_to(folder / "output.log") as console,
        busy(console, f"searching; progress in {progress}"),
    ):
        progress.unlink(missing_ok=True)
        run_in_order("rope-search", [job], folder / "launch")
    if as_json:
        print_json({"out": out, **json.loads(out.read_text())["about"]})
        return
    for line in summary(json.loads(out.read_text())["about"]):
        typer.echo(line)
    typer.echo(out)


def summary(about: dict[str, Any]) -> list[str]:
    """Return the result in lines: nats per scored token, at the start and of the best."""
    unseen = about["unseen"]
    kind = {"needle": "answers to needles", "documents": f"tokens past {about['trained']:,}"}
    low, high = about["critical_pairs"]
    best = "YaRN's own" if about["critical"] is None else f"searched from pair {about['critical']}"
    rows = [
        (f"{kind[about['objective']]}, searched on", about["start_score"], about["score"]),
        *((f"{kind[name]}, unseen", unseen["start"][name], unseen["found"][name]) for name in kind),
    ]
    width = max(len(name) for name, *_ in rows)
    lines = [
        f"{about['evaluations']:,} candidates, critical pair {low} to {high}; the best: {best}",
        f"{'nats per token':<{width}}  {'YaRN':>8}  {'found':>8}",
        *(f"{name:<{width}}  {start:8.4f}  {found:8.4f}" for name, start, found in rows),
    ]
    if about["objective"] == "needle" and unseen["found"]["needle"] > unseen["guess"]:
        lines.append(
            f"note: a guess of the digits costs {unseen['guess']:.4f}, less than the answers; the "
            "stage does not retrieve, so they say little about its context; use --score documents"
        )
    return lines
