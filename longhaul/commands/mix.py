# SPDX-License-Identifier: Apache-2.0
"""`longhaul mix`: what a stage takes of a store's documents, and which of them a step sees."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import Json, print_json
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from data.mixture.config import Mix
    from data.mixture.stage_rows import PackedSequence, StageRows
    from data.store import Manifest
    from recipes.resolved.data_read import StageData


def mix(
    ladder: Annotated[str, typer.Option(help="Ladder of the stage: a name, or your file.")] = "",
    store: Annotated[
        Path | None, typer.Option(help="With --ladder: the token store to train on.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="Card of the model; a ladder of one card needs none.")
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            help="Length of the ladder's stage, such as 64K, or name of the run's stage.",
            show_default="the only one, or the only one with a mix",
        ),
    ] = "",
    run: Annotated[
        Path | None, typer.Option(help="Run folder, in place of --ladder: the stage as it ran.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="List the documents that this step trains on.")
    ] = None,
    data_ranks: Annotated[
        int, typer.Option(min=1, help="Data ranks that share the sequences of a step.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With --ladder: seed of the data (data.seed).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack a store for a stage, and show its mix, or the documents that one step sees."""
    from data.mixture.groups import without_shares
    from data.mixture.stage_rows import for_store, mix_of
    from data.store import Manifest
    from longhaul.pages.mix_page import show_stage, show_step

    if (run is None) == (not ladder):
        raise ValueError("name either --ladder, with --store, or --run")
    if run is not None:
        of, store = _of_run(run, stage)
    else:
        of = _of_ladder(ladder, card, stage, seed)
    if store is None:
        raise ValueError("--store is missing; name the token store to train on")
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
    taken = for_store(stated, manifest)
    if taken != stated:
        note(f"note: {without_shares(manifest)}")
    rows = _rows(manifest, taken, of)
    content = _of_step(rows, manifest, step, data_ranks, of) if step else _of_stage(rows, taken, of)
    if as_json:
        print_json(content)
    elif step:
        show_step(content)
    else:
        show_stage(content)
        words = ["longhaul", "mix", "--ladder", ladder, "--store", store]
        words += ["--card", card] if card else []
        if run is not None:
            words = ["longhaul", "mix", "--run", run]
        words += ["--stage", stage] if stage else []
        next_command([*words, "--step", 1], "list the documents of the first step")


def _of_ladder(ladder: str, card: str | None, stage: str, seed: int | None) -> "StageData":
    from data.mixture.stage_rows import SEED
    from longhaul.jobs.ladder_run import choose
    from recipes.resolved.data_read import StageData
    from recipes.shipped.select import stage_of
    from recipes.spec.naming import length_shown

    chosen, _ = choose(ladder, card, stage)
    mixed = [each for each in chosen.stages if each.mix is not None]
    if not stage and len(mixed) == 1 and len(chosen.stages) > 1:
        of = mixed[0]
        note(
            f"note: {length_shown(of.seq_length)} is the only stage of {chosen.name} with a mix; "
            "it is shown"
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


def _rows(manifest: "Manifest", mix: "Mix", of: "StageData") -> "StageRows":
    from data.mixture.stage_rows import StageRows
    from data.progress import say
    from data.token_files.megatron_index import read_index

    say(f"packing the documents of {manifest.root} into sequences of {of.seq_length:,} tokens")
    return StageRows.of(
        manifest,
        mix,
        seq_length=of.seq_length,
        steps=of.steps,
        rows=of.sequences,
        seed=of.seed,
        document_lengths=[
            read_index(prefix.with_name(f"{prefix.name}.idx")).lengths
            for prefix in manifest.prefixes("train")
        ],
    )


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
    sequences = []
    for rank, numbers in enumerate(shares):
        for number in numbers:
            for sequence in rows.packed_rows(refs[number]):
                sequences.append(
                    {
                        "data_rank": rank,
                        "group": rows.groups[refs[number].group].words,
                        "source": manifest.train.parts[sequence.part].source,
                        "pieces": _pieces(sequence),
                    }
                )
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
