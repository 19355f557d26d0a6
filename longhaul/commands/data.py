# SPDX-License-Identifier: Apache-2.0
"""`longhaul data`: what a store contains, what a stage takes of it, and how tokenizers differ."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import K_IS, Json, length_of, print_json
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from data.mixture.config import Mix
    from data.mixture.stage_rows import PackedSequence, StageRows
    from data.store import Manifest
    from recipes.resolved.data_read import StageData

app = typer.Typer(
    no_args_is_help=True,
    help="Inspect a store and what a stage takes of it, or compare tokenizers on your text.",
)


@app.command()
def inspect(
    store: Annotated[
        Path | None, typer.Argument(metavar="STORE", help="Token store.", show_default=False)
    ] = None,
    target: Annotated[
        str,
        typer.Argument(
            metavar="[TARGET]",
            show_default=False,
            help="A recipe, or a ladder by its name or your file: the mix of its stage.",
        ),
    ] = "",
    card: Annotated[
        str | None,
        typer.Option(help="Card of the model, with a ladder; one of a single card needs none."),
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            help="Length of the ladder's stage, such as 64K, or name of the run's stage.",
            show_default="the only one, or the only one with a mix",
        ),
    ] = "",
    run: Annotated[
        Path | None, typer.Option(help="Run folder, in place of STORE: the stage as it ran.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="List the documents that this step trains on.")
    ] = None,
    data_ranks: Annotated[
        int, typer.Option(min=1, help="Data ranks that share the sequences of the step.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, help="data.seed of the stage.", show_default="the recipe's")
    ] = None,
    lengths_only: Annotated[
        bool,
        typer.Option("--lengths-only", help="Read the indexes, not the tokens: count no copies."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Count a store's documents by length; with TARGET or --run, show the mix of a stage."""
    if run is not None:
        if store is not None:
            raise ValueError(f"--run {run} names its own store; leave out {store}, or --run")
        stated = {f"--card {card}": bool(card), f"--seed {seed}": seed is not None}
        for option in (name for name, value in stated.items() if value):
            raise ValueError(f"{option} is in the recipe of --run {run}; leave it out")
        of, store = _of_run(run, stage)
    elif store is None:
        raise ValueError("no store is named; add its folder, or --run FOLDER for that of a run")
    elif target:
        of = _of_target(target, card, stage, seed)
    else:
        given = {
            "--card": card, "--stage": stage, "--step": step, "--data-ranks": data_ranks > 1,
            "--seed": seed is not None,
        }  # fmt: skip
        for option in (name for name, value in given.items() if value):
            raise ValueError(f"{option} is of a stage; name its recipe or ladder after the store")
        _show_census(store, lengths_only, as_json)
        return
    if lengths_only:
        raise ValueError("--lengths-only counts a whole store; leave it out for a stage")
    content = _content(store, of, step, data_ranks)
    if as_json:
        print_json(content)
        return
    from longhaul.pages.data_page import show_stage, show_step

    if step:
        show_step(content)
        return
    show_stage(content)
    words = ["--run", run] if run is not None else [store, target]
    words += ["--card", card] if card else []
    words += ["--stage", stage] if stage else []
    next_command(
        ["longhaul", "data", "inspect", *words, "--step", 1], "list the documents of the first step"
    )


def _show_census(store: Path, lengths_only: bool, as_json: bool) -> None:
    from data.census import census
    from data.store import Manifest
    from longhaul.pages.data_page import holding_most, show_census
    from recipes.spec.naming import length_word

    counted = census(Manifest.load(store), lengths_only=lengths_only)
    if as_json:
        print_json({"store": str(store), **asdict(counted)})
        return
    show_census(counted)
    chosen = holding_most(counted.together)
    length = length_word(chosen.seq_length_tokens).upper()
    next_command(
        ["longhaul", "plan", "CARD", "--seq", length, "--store", store],
        f"plan a stage; packed rows of {length} keep {chosen.best_fit_tokens:.0%} of the tokens in "
        "whole documents; CARD is a model that `longhaul recipes --cards` lists",
    )


def _of_target(target: str, card: str | None, stage: str, seed: int | None) -> "StageData":
    from data.mixture.stage_rows import SEED
    from longhaul.jobs.ladder_run import choose
    from recipes.resolved.data_read import StageData
    from recipes.shipped.select import stage_of
    from recipes.shipped.table import ROWS
    from recipes.spec.naming import length_shown

    if target in ROWS:
        if card or stage:
            raise ValueError(f"{target} is a recipe, which has card and stage; leave out both")
        of = ROWS[target].stage
    else:
        chosen, _ = choose(target, card, stage)
        mixed = [each for each in chosen.stages if each.mix is not None]
        if not stage and len(mixed) == 1 and len(chosen.stages) > 1:
            of = mixed[0]
            note(
                f"note: {length_shown(of.seq_length)} is the only stage of {chosen.name} with a "
                "mix; it is shown"
            )
        else:
            of = stage_of(chosen, stage)
    return StageData(
        mix=of.mix,
        seq_length=of.seq_length,
        steps=of.steps,
        sequences=of.sequences_per_batch,
        within=of.documents == "within",
        seed=SEED if seed is None else seed,
    )


def _of_run(run: Path, stage: str) -> "tuple[StageData, Path]":
    """Return a stage as it ran, with its overrides and what it skipped, and its store."""
    from eval.run_folder import require_run
    from recipes.checkpoints.marker import RECIPE
    from recipes.resolved.data_read import data_of

    require_run(run)
    names = sorted(recipe.parent.name for recipe in (run / "stages").glob(f"*/{RECIPE}"))
    if stage not in names and not (not stage and len(names) == 1):
        raise ValueError(
            f"--stage is {stage!r}; name a stage of {run}: {', '.join(names) or 'it has none yet'}"
        )
    return data_of(run / "stages" / (stage or names[0]))


def _content(store: Path, of: "StageData", step: int | None, data_ranks: int) -> dict[str, Any]:
    """Pack a store for a stage, and return its mix, or the documents of a step."""
    from data.mixture.groups import without_shares
    from data.mixture.stage_rows import for_store, mix_of
    from data.progress import say
    from data.store import Manifest
    from data.token_files.megatron_index import read_index

    if of.sequences % data_ranks:
        raise ValueError(
            f"--data-ranks is {data_ranks}, which does not divide the {of.sequences:,} sequences "
            "of a step; name a number that does"
        )
    if step is not None and step > of.steps:
        raise ValueError(f"--step is {step:,}, and the stage has {of.steps:,} steps")
    manifest = Manifest.load(store)
    stated = mix_of(of.mix, manifest)
    if stated is None:
        raise ValueError(
            f"the stage of {of.seq_length:,} tokens has no mix; write `mix:` into a ladder file of "
            "your own (docs/data.md)"
        )
    mix = for_store(stated, manifest)
    if mix != stated:
        note(f"note: {without_shares(manifest)}")
    say(f"packing the documents of {manifest.root} into sequences of {of.seq_length:,} tokens")
    lengths = [
        read_index(prefix.with_name(f"{prefix.name}.idx")).lengths
        for prefix in manifest.prefixes("train")
    ]
    rows = of.rows(manifest, mix, lengths)
    return _of_step(rows, manifest, step, data_ranks, of) if step else _of_stage(rows, mix, of)


def _of_stage(rows: "StageRows", mix: "Mix", of: "StageData") -> dict[str, Any]:
    from data.mixture.groups import needs, often_repeated

    needed = needs(mix, rows.groups, of.steps * of.sequences * of.seq_length)
    counts = rows.schedule.counts.sum(0).tolist()
    groups = [
        {
            "documents": group.words,
            "seq_length_tokens": group.seq_length,
            "weight": group.weight,
            "end_weight": group.end_weight,
            "rows_packed": packed.rows,
            "rows_taken": count,
            "padding": 1 - packed.filled,
            "documents_cut": packed.cuts,
            "most_documents_in_a_row": packed.most_pieces,
        }
        for group, packed, count in zip(rows.groups, rows.packed, counts, strict=True)
    ]
    return {
        "seq_length_tokens": of.seq_length,
        "steps": of.steps,
        "sequences_a_step": of.sequences,
        "packing": mix.packing,
        "mix": mix.words,
        "sources": [{**need._asdict(), "repeats": need.repeats} for need in needed],
        "groups": groups,
        "often_repeated": often_repeated(needed),
    }


def _of_step(
    rows: "StageRows", manifest: "Manifest", step: int, data_ranks: int, of: "StageData"
) -> dict[str, Any]:
    from data.packing.balance import balanced, imbalance

    first = (step - 1) * of.sequences
    over = sum(count for begin, count in of.skipped if first >= begin)
    refs = rows.step((first + over) // of.sequences)
    work = rows.work(refs) if of.within else [1.0] * len(refs)
    shares = balanced(work, data_ranks)
    sequences = [
        {
            "data_rank": rank,
            "group": rows.groups[refs[number].group].words,
            "source": manifest.train.parts[sequence.part].source,
            "pieces": _pieces(sequence),
        }
        for rank, numbers in enumerate(shares)
        for number in numbers
        for sequence in rows.packed_rows(refs[number])
    ]
    return {
        "step": step,
        "seq_length_tokens": rows.groups[refs[0].group].seq_length,
        "joined_to_tokens": of.seq_length,
        "work_max_over_mean": imbalance(work, shares),
        "sequences": sequences,
    }


def _pieces(sequence: "PackedSequence") -> list[dict[str, int]]:
    """Return the pieces of documents of a sequence, without its padding."""
    columns = (sequence.documents, sequence.offsets, sequence.lengths)
    return [
        {"document": document, "first_token": offset, "tokens": length}
        for document, offset, length in zip(*(each.tolist() for each in columns), strict=True)
        if document >= 0
    ]


@app.command()
def tokenizers(
    names: Annotated[
        list[str], typer.Argument(help="Folders or names of Hugging Face tokenizers, or stores.")
    ],
    text: Annotated[
        str | None,
        typer.Option(
            help="Documents, as `prepare --source` takes them, but not synthetic ones."
            " Without it: the Python standard library's source files."
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="Field or column that holds the text; OBJECT.FIELD in an object.")
    ] = "text",
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave broken records out instead of stopping.")
    ] = False,
    sample_mib: Annotated[
        int, typer.Option(min=1, help="MiB of held-out text to compare on.")
    ] = 16,
    card: Annotated[
        str, typer.Option(help="Model card, for the cost of the vocabulary.")
    ] = "llama31_8b",
    seq: Annotated[str, typer.Option(help=f"Sequence whose logits are counted ({K_IS}).")] = "64K",
    as_json: Json = False,
) -> None:
    """Compare tokenizers on held-out text: tokens of a document, and cost of the vocabulary."""
    from data.tokenizer_comparison import QUANTILES, compare, sample
    from longhaul.pages.data_page import show_tokenizers
    from recipes.shipped.named import card_named

    length = length_of("--seq", seq)
    model = card_named(card)
    documents = sample(
        text, text_key=text_key, skip_broken=skip_broken, most_bytes=sample_mib << 20
    )
    compared = compare(names, documents)
    rows = [
        {
            **asdict(figures),
            "embedding_and_head_bytes": figures.vocabulary_bytes(
                model.hidden, tied=model.tied_embeddings
            ),
            "logits_bytes": figures.logits_bytes(length),
        }
        for figures in compared
    ]
    content = {
        "source": text or "the Python standard library",
        "heldout": documents.heldout,
        "documents": len(documents.texts),
        "sample_bytes": documents.bytes,
        "quantiles": QUANTILES,
        "card": model.name,
        "seq_length_tokens": length,
        "tokenizers": rows,
    }
    if as_json:
        print_json(content)
        return
    show_tokenizers(content, hidden=model.hidden, tied=model.tied_embeddings)
    best = min(compared, key=lambda figures: figures.tokens)
    words = ["longhaul", "prepare", "--tokenizer", best.name, "--out", "STORE"]
    words += ["--source", text] if text else []
    words += ["--text-key", text_key] if text_key != "text" else []
    words += ["--skip-broken"] if skip_broken else []
    next_command(
        words,
        "prepare a store with the one that needs the fewest tokens; STORE is a folder to write",
    )
