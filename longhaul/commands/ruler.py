# SPDX-License-Identifier: Apache-2.0
"""`longhaul ruler`: make RULER's samples, answer them with a checkpoint, and score the answers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longhaul.commands.ruler_predict import predict
from longhaul.options import K_IS, Json, length_of, print_json
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from eval.ruler.samples import SampleFile
    from eval.ruler.scoring import Scores
    from eval.ruler.sources import Sources
    from eval.ruler.tasks import Task
    from longhaul.run_folder.ruler_results import Answered

app = typer.Typer(
    help="Make RULER's samples at any length for a tokenizer, answer and score them.",
    no_args_is_help=True,
)
app.command()(predict)
SAMPLES = 500
SHOWN = 3
"""Replaced scores that a note names."""
LENGTHS = "4K,8K,16K,32K,64K,128K"


@app.command()
def make(
    tokenizer: Annotated[
        str, typer.Option(help="Folder or name of the model's Hugging Face tokenizer.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it may hold other samples.")],
    lengths: Annotated[
        str, typer.Option(help=f"Tokens of prompt and answer together, as 4K,128K ({K_IS}).")
    ] = LENGTHS,
    tasks: Annotated[
        str, typer.Option(help="Names of tasks, as niah_single_1,vt, or all.")
    ] = "all",
    samples: Annotated[int, typer.Option(help="Samples of each task and length.")] = SAMPLES,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    ruler_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with PaulGrahamEssays.json, squad.json and hotpotqa.json. Without it: text"
            " of our own, and the suite is ruler-offline."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a file of samples for each task and length; what is there already is checked."""
    from data.files.writable import require_folder
    from eval.ruler.sources import Sources
    from eval.ruler.tasks import named

    if samples < 1:
        raise ValueError(f"--samples is {samples}; ask for at least 1")
    chosen = named([name.strip() for name in tasks.split(",")])
    tokens_of = sorted({length_of("--lengths", word) for word in lengths.split(",")})
    short = [task.name for task in chosen if task.form.new_tokens >= tokens_of[0]]
    if short:
        raise ValueError(
            f"--lengths has {tokens_of[0]:,} tokens, and the answer of {short[0]} alone may take "
            f"{named([short[0]])[0].form.new_tokens}; give 1K or more"
        )
    sources = Sources(ruler_data)
    require_folder(out, "--out")
    wanted = [(task, at) for at in tokens_of for task in chosen]
    folder, rows, there = _made(tokenizer, out, sources, wanted, samples, seed)
    if as_json:
        print_json({"suite": sources.suite, "folder": folder, "files": rows})
        return
    from longhaul.pages.ruler_page import show_files

    show_files(sources.suite, rows, there)
    typer.echo(folder)
    if ruler_data is None:
        note("note: ruler-offline has text of its own; do not report its scores as RULER's")
    elif sources.own_words:
        note(
            "note: keys and word lists are of our own words; adjectivelist.txt, nounlist.txt and "
            f"verblist.txt of wonderwords in {ruler_data} make them RULER's"
        )
    next_command(
        ["longhaul", "ruler", "score", folder, "--predictions", "PREDICTIONS"],
        "score a model's answers; PREDICTIONS is a .jsonl file with lines of id and prediction, as "
        "`longhaul ruler predict` writes it",
    )


def _made(
    tokenizer: str,
    out: Path,
    sources: "Sources",
    wanted: "list[tuple[Task, int]]",
    samples: int,
    seed: int,
) -> "tuple[Path, list[SampleFile], list[bool]]":
    """Make the files one after the other; return folder, rows, and which were there already."""
    from longhaul.terminal.console import busy, loading, plain_console

    with loading("the tokenizer"):
        from data.tokenization.tokenizer import load
        from eval.ruler.samples import make as make_file
        from eval.ruler.samples import require_length, suite_folder
        from eval.ruler.tokens import Tokens

        tokens = Tokens(load(tokenizer))
    folder = suite_folder(out, sources, tokens)
    rows, there = [], []
    shortest = min(length for _, length in wanted)
    for task in (task for task, length in wanted if length == shortest):
        require_length(task, shortest, seed, tokens, sources)
    console = plain_console(sys.stderr)
    for task, length in wanted:
        with busy(console, f"{task.name} at {length:,} tokens, {samples:,} samples"):
            row, found = make_file(
                folder, task, length=length, samples=samples, seed=seed, tokens=tokens,
                sources=sources,
            )  # fmt: skip
        rows.append(row)
        there.append(found)
    return folder, rows, there


@app.command()
def score(
    files: Annotated[
        list[Path], typer.Argument(help="Sample files, or folders of `longhaul ruler make`.")
    ],
    predictions: Annotated[
        list[Path],
        typer.Option(
            help='File of lines {"id": ..., "prediction": ...} with generated texts; repeatable.'
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score the first samples of each file only.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder to write the scores into, for `longhaul report`."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Model of the run that answered: a stage, its name or length, or a base model. "
            "Not needed for answers of `longhaul ruler predict --run`."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Score predictions by the paper's metrics, with standard errors and the effective length."""
    from eval.ruler.samples import files_of
    from eval.ruler.scoring import score as score_files

    if model and run is None:
        raise ValueError("--model needs --run, the run folder to write the scores into")
    missing = [path for path in predictions if not path.is_file()]
    if missing:
        raise ValueError(
            f"--predictions {missing[0]} is not a file; name a .jsonl file with lines of id and "
            "prediction"
        )
    written_by = None if run is None else _answered(run, model, predictions)
    scores, unknown = score_files(files_of(files), predictions, limit)
    if unknown and limit is None:
        note(f"note: {unknown:,} predictions are of samples that are not in the files")
    written = None
    if run is not None and written_by is not None:
        written = _write(run, scores, written_by)
    if as_json:
        print_json(scores)
        return
    from longhaul.pages.ruler_page import show_scores

    show_scores(scores)
    if written is not None:
        typer.echo(written)
        next_command(["longhaul", "report", "--run", run], "show all results on one page")


def _answered(run: Path, model: str, predictions: list[Path]) -> "Answered":
    """Return which model of a run answered, before anything is scored."""
    from data.files.writable import require_folder
    from longhaul.run_folder.ruler_results import answered

    found = answered(run, model, predictions)
    require_folder(run, "--run")
    return found


def _write(run: Path, scores: "Scores", of: "Answered") -> Path:
    """Write scores into a run, say what they replace, and return the file."""
    from eval.ruler.results import result_path, write_result
    from longhaul.run_folder.ruler_results import result

    lost = write_result(run, result(scores, of))
    path = result_path(run, of.model)
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        note(
            f"note: {path} had scores of {', '.join(lost[:SHOWN])}{more} too, which are replaced; "
            "score all sample files by one command to keep them"
        )
    return path
