# SPDX-License-Identifier: Apache-2.0
"""`longhaul batch`: solve the arithmetic of an optimizer step."""

from typing import Annotated

import typer

from longhaul.options import K_IS, Json, StageLength, length_of, print_json
from longhaul.terminal.messages import note


def batch(
    seq: Annotated[str, typer.Option(help=f"Tokens of a sequence, such as 64K ({K_IS}).")] = "",
    tokens_per_batch: Annotated[
        str, typer.Option(help=f"Tokens of a step, such as 4M ({K_IS}).")
    ] = "",
    dp: Annotated[int | None, typer.Option(help="Data ranks.")] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Micro-batches of a step on each data rank.")
    ] = None,
    micro: Annotated[int, typer.Option(help="Sequences in one micro-batch.")] = 1,
    gpus: Annotated[int | None, typer.Option(help="GPUs in all, instead of --dp.")] = None,
    tp: Annotated[int, typer.Option(help="Of --gpus, those that share each layer.")] = 1,
    cp: Annotated[int, typer.Option(help="Of --gpus, those that share each sequence.")] = 1,
    pp: Annotated[int, typer.Option(help="Of --gpus, those that have some of the layers.")] = 1,
    ladder: Annotated[
        str, typer.Option(help="Take --seq and --tokens-per-batch of this ladder's --stage.")
    ] = "",
    stage: StageLength = "",
    card: Annotated[str, typer.Option(help="The card, if a ladder file leaves it facts.")] = "",
    as_json: Json = False,
) -> None:
    """Solve global batch = micro-batch x accumulation x DP for the tokens of a step.

    Any three of --seq, --tokens-per-batch, --dp and --accumulation give the fourth.
    """
    from recipes.planner.batch_size import MOST_ACCUMULATION, data_ranks, solve

    if gpus is not None:
        if dp is not None:
            raise ValueError("--gpus and --dp exclude each other; take one of them")
        dp = data_ranks(gpus=gpus, tp=tp, cp=cp, pp=pp)
    elif (tp, cp, pp) != (1, 1, 1):
        raise ValueError("--tp, --cp and --pp divide --gpus; add --gpus, or give only --dp")
    tokens = length_of("--tokens-per-batch", tokens_per_batch) if tokens_per_batch else None
    length = length_of("--seq", seq) if seq else None
    if ladder:
        if tokens is not None or length is not None:
            raise ValueError(
                "--ladder sets --seq and --tokens-per-batch; leave them out, or --ladder"
            )
        length, tokens = _of_stage(ladder, stage, card)
    elif stage or card:
        raise ValueError("--stage and --card are of a ladder; add --ladder, or leave them out")
    found = solve(
        tokens=tokens,
        seq_length=length,
        dp=dp,
        accumulation=accumulation,
        micro_batch=micro,
    )
    if as_json:
        print_json(
            {
                "sequences": found.sequences,
                "seq_length_tokens": found.seq_length,
                "micro_batch_sequences": found.micro_batch,
                "accumulation_forwards": found.accumulation,
                "dp_ranks": found.dp,
                "tokens_per_batch": found.tokens,
            }
        )
        return
    typer.echo(f"global batch  {found.sequences:,} sequences of {found.seq_length:,} tokens")
    typer.echo(f"micro-batch   {found.micro_batch:,}")
    typer.echo(f"accumulation  {found.accumulation:,}")
    shared = f" ({gpus:,} GPUs / (TP {tp} x CP {cp} x PP {pp}))" if gpus is not None else ""
    typer.echo(f"DP            {found.dp:,}{shared}")
    typer.echo(f"tokens        {found.tokens:,} a step")
    if found.accumulation > MOST_ACCUMULATION:
        note(
            f"note: accumulation is {found.accumulation:,}, above {MOST_ACCUMULATION}: "
            "micro-batches run one after another; more data ranks would shorten the step"
        )


def _of_stage(ladder: str, stage: str, card: str) -> tuple[int, int]:
    """Return the tokens of a sequence and of a step of a ladder's stage."""
    from recipes.shipped.named import card_named, ladder_named
    from recipes.shipped.select import stage_of

    found = stage_of(ladder_named(ladder, card_named(card) if card else None), stage)
    return found.seq_length, found.tokens_per_batch
