# SPDX-License-Identifier: Apache-2.0
"""`longhaul ruler predict`: answer RULER's samples with a checkpoint of a run, or an export."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import ContextParallel, Ranks, TensorParallel, require_device
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.run_folder.stage_named import require_any_checkpoint, stage_named
from longhaul.terminal.console import busy, loading, output_to
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from eval.answers.end_tokens import EndTokens
    from eval.ruler.predictions import Questions


def predict(
    files: Annotated[
        list[Path], typer.Argument(help="Sample files, or folders of `longhaul ruler make`.")
    ],
    out: Annotated[
        Path,
        typer.Option(help="File of predictions, .jsonl; answers that it has are not made again."),
    ],
    run: Annotated[
        Path | None, typer.Option(help="Run folder, as written by `longhaul run`; with --stage.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Stage that answers, its name or length: its newest checkpoint.")
    ] = "",
    export: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder that answers, not a stage.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Token store whose tokenizer is read; without it the one the run trained on."
        ),
    ] = None,
    ranks: Ranks = 2,
    tensor_parallel: TensorParallel = 1,
    context_parallel: ContextParallel = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; without it the device the run trained on, and of an export cuda "
            "where there is one."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer the first samples of each file only.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify the SHA-256 of the weights.")
    ] = True,
) -> None:
    """Answer samples greedily with a stage of a run, on local ranks, or with an export."""
    require_device(device)
    if (export is None) == (run is None):
        raise ValueError("name what answers: --run with --stage, or --export")
    of_run = {"--stage": stage, "--store": store, "--tp": tensor_parallel > 1,
              "--cp": context_parallel > 1}  # fmt: skip
    given = [name for name, value in of_run.items() if value]
    if export is not None and given:
        raise ValueError(f"{' and '.join(given)} cannot go with --export; leave one of them out")
    if run is not None and not stage:
        raise ValueError("--run needs --stage, the stage that answers, by its name or length")
    from data.files.writable import require_file
    from eval.ruler.predictions import begin, job_folder, questions, require_same

    asked = questions(files, limit)
    require_file(out, "--out", (".jsonl",))
    folder = job_folder(out)
    require_unused(folder)
    if run is not None:
        _require_stage(run, stage, store, asked)
    sizes = Sizes(ranks, tensor_parallel, context_parallel)
    with loading("NeMo and Megatron-Core"):
        if run is not None:
            answering = _stage(run, stage, store, asked, sizes, device, verify)
        else:
            assert export is not None
            answering = _export(export, asked, ranks, device, verify)
        require_same(out, answering.facts)
        from longhaul.jobs import ruler_answers
        from slurm.experiment import run_in_order

        make = ruler_answers.stage_job if run is not None else ruler_answers.export_job
        job = make(
            answering.folder, ranks=ranks, files=asked.files, out=out, limit=limit,
            **answering.choices,
        )  # fmt: skip
    for words in answering.notes:
        note(f"note: {words}")
    with in_use(folder):
        left = asked.lengths.keys() - begin(out, answering.facts)
        said = (
            f"{answering.name} answers {len(left):,} of {len(asked.lengths):,} samples on {ranks} "
            "ranks"
        )
        if left:
            with _resumable(), output_to(folder / "output.log") as console, busy(console, said):
                run_in_order(ruler_answers.NAME, [job], folder / "launch")
    typer.echo(out)
    limited = [] if limit is None else ["--limit", limit]
    into = [] if run is None else ["--run", run]
    next_command(
        ["longhaul", "ruler", "score", *files, "--predictions", out, *limited, *into],
        "score the answers",
    )


@dataclass(frozen=True)
class Sizes:
    """Ranks, and how many of them share a layer and a sequence."""

    ranks: int
    tp: int
    cp: int


@dataclass(frozen=True)
class Answering:
    """A model that answers: what a file of predictions records of it, and its job's choices."""

    name: str
    folder: Path
    facts: dict[str, Any]
    choices: dict[str, Any]
    notes: Sequence[str] = ()


def _stage(
    run: Path,
    word: str,
    store: Path | None,
    asked: "Questions",
    sizes: Sizes,
    device: str | None,
    verify: bool,
) -> Answering:
    from data.files.sha256 import sha256_of
    from data.store import Manifest
    from data.tokenization.tokenizer import load
    from eval.answers.end_tokens import end_tokens
    from eval.ruler.predictions import require_tokenizer
    from eval.run_folder import stage_names
    from longhaul.jobs.evaluation import recipe_of, require_layout, require_trained
    from recipes.checkpoints.files import note as unverified
    from recipes.checkpoints.marker import MARKER, newest_checkpoint
    from recipes.hugging_face.source_checkpoint import published_folder
    from recipes.resolved.read import device_of
    from recipes.spec.naming import stage_folder

    name = stage_named(run, word, stage_names(run))
    recipe = recipe_of(run, name)
    manifest = Manifest.load(store or Path(recipe.data.store))
    require_trained(run, [name], manifest)
    tokenizer = load(str(manifest.tokenizer_path))
    require_tokenizer(asked, tokenizer, f"stage {name}")
    device = device or device_of(recipe)
    unit = 2 * sizes.cp * sizes.tp
    longest = -(-asked.lengths[asked.longest] // unit) * unit
    require_layout(
        run, [name], ranks=sizes.ranks, tp=sizes.tp, cp=sizes.cp, length=longest, device=device
    )
    folder = stage_folder(run, name)
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None  # require_trained found it
    words = unverified(checkpoint, verify)
    ends = end_tokens(tokenizer.hugging_face, published_folder(checkpoint))
    return Answering(
        name,
        folder,
        facts=_facts(checkpoint, sha256_of([checkpoint / MARKER])[0], device, asked, ends),
        choices={
            "checkpoint": str(checkpoint.resolve()),
            "tokenizer": str(manifest.tokenizer_path.resolve()),
            "seq_length": longest,
            "tensor_parallel": sizes.tp,
            "context_parallel": sizes.cp,
            "device": device,
            "verify": verify,
        },
        notes=[] if words is None else [words],
    )


def _require_stage(run: Path, word: str, store: Path | None, asked: "Questions") -> None:
    """Raise ValueError for a stage without a checkpoint, or with a shorter context than samples.

    The tokenizer of `store`, if it is named, has to be that of the samples, as their lengths are.
    """
    from data.store import Manifest
    from data.tokenization.tokenizer import load
    from eval.ruler.predictions import require_room, require_tokenizer
    from eval.run_folder import read_stage, stage_names

    name = stage_named(run, word, stage_names(run))
    record = read_stage(run, name)
    if record is None:
        raise ValueError(f"{name} of {run} has not been trained yet: it has no stage.json")
    require_any_checkpoint(run, [name])
    if store is not None:
        tokenizer = load(str(Manifest.load(store).tokenizer_path))
        require_tokenizer(asked, tokenizer, f"stage {name}")
    require_room(asked, record.context, f"stage {name}")


def _export(
    folder: Path, asked: "Questions", ranks: int, device: str | None, verify: bool
) -> Answering:
    import torch

    from data.tokenization.tokenizer import load
    from eval.answers.end_tokens import end_tokens
    from eval.ruler.predictions import require_room, require_tokenizer
    from recipes.hugging_face.checksums import unverified
    from recipes.hugging_face.folder_facts import folder_facts

    found = folder_facts(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no .safetensors file; other weights are not read")
    tokenizer = load(str(folder))
    require_tokenizer(asked, tokenizer, f"{folder}")
    require_room(asked, found.context, f"{folder}")
    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < ranks:
        instead = f"--ranks {gpus}" if gpus else "--device cpu"
        raise ValueError(
            f"{ranks} ranks on cuda need as many GPUs; this machine has {gpus}: give {instead}"
        )
    words = unverified(folder, verify=verify)
    return Answering(
        folder.resolve().name,
        folder,
        facts=_facts(
            folder, found.digest, device, asked, end_tokens(tokenizer.hugging_face, folder)
        ),
        choices={"device": device},
        notes=[words] if words else [],
    )


def _facts(
    weights: Path, digest: str, device: str, asked: "Questions", ends: "EndTokens"
) -> dict[str, Any]:
    """Return what a file of predictions records; `digest` changes with the weights."""
    others = ends.of_model
    return {
        "weights": str(weights.resolve()),
        "weights_sha256": digest,
        "precision": "bf16" if device == "cuda" else "fp32",
        **asked.facts(),
        **({"other_end_tokens": list(others)} if others else {}),
    }


@contextmanager
def _resumable() -> Iterator[None]:
    """Say how to resume if the job is stopped or fails."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        note("the same command continues with the samples that have no answer yet")
        raise
