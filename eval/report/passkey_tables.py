# SPDX-License-Identifier: Apache-2.0
"""The passkey grid of a stage as tables, shares with their 95% intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.measurements import Passkey
from eval.report.cells import MISSING, Cell, Row, shade
from eval.run_folder import Evaluation
from eval.uncertainty import share_interval, share_text


@dataclass(frozen=True)
class Grid:
    """The passkey grid of one stage as two tables of the same shape."""

    stage: str
    sentence: str
    depths: list[str]
    shares: list[str]
    """For each prompt length, the share found over all depths."""
    hits: list[Row]
    nats: list[Row]


def passkey_sentence(passkey: Passkey) -> str:
    """Return a sentence with the result of a passkey grid."""
    prompts, hits = passkey.tried, passkey.found
    nats = [value for row in passkey.nats for value in row if math.isfinite(value)]
    if not prompts:
        return "No prompt was tried."
    if hits:
        said = f"{hits} of {prompts:,} prompts are answered exactly"
    else:
        said = f"Nothing is retrieved: none of {prompts:,} prompts is answered exactly"
    low, high = share_interval(hits, prompts)
    said += f" (a share of {low:.0%} to {high:.0%}, with 95% confidence)"
    if not nats:
        return f"{said}."
    mean = sum(nats) / len(nats)
    return (
        f"{said}; an answer token costs {mean:.2f} nats, a guess of its digits "
        f"{passkey.chance_nats:.2f}."
    )


def of_length(passkey: Passkey, length: int) -> str:
    """Return the share found at one prompt length over all depths, with its 95% interval."""
    hits = passkey.hits[passkey.lengths.index(length)]
    found = sum(round(share * passkey.trials) for share in hits if math.isfinite(share))
    return share_text(found, passkey.trials * len(passkey.depths))


def grid_tables(evaluation: Evaluation, passkey: Passkey) -> Grid:
    """Return the passkey grid of an evaluation as tables."""

    def rows(values: Sequence[Sequence[float]], cell: Callable[[float], Cell]) -> list[Row]:
        return [
            Row(
                f"{length:,}",
                [cell(value) if math.isfinite(value) else Cell(MISSING) for value in row],
                note="beyond its length" if length > evaluation.seq_length else "",
            )
            for length, row in zip(passkey.lengths, values, strict=True)
        ]

    def hit(share: float) -> Cell:
        return Cell(f"{round(share * passkey.trials)}/{passkey.trials}", shade=shade(share))

    def nat(value: float) -> Cell:
        chance = passkey.chance_nats
        return Cell(f"{value:.2f}", shade=shade(1 - value / chance) if chance > 0 else 0.0)

    return Grid(
        stage=evaluation.stage,
        sentence=passkey_sentence(passkey),
        depths=[f"{depth:.0%}" for depth in passkey.depths],
        shares=[of_length(passkey, length) for length in passkey.lengths],
        hits=rows(passkey.hits, hit),
        nats=rows(passkey.nats, nat),
    )
