# SPDX-License-Identifier: Apache-2.0
"""Output of `longhaul plan`: a page, a bill, or JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from longhaul.options import print_json
from longhaul.pages import plan_sentences
from longhaul.terminal.console import print_left_out, show
from recipes.notation.layout import words_of
from recipes.planner.accuracy import (
    bytes_range,
    has_calibrated_bytes,
    is_calibrated,
    rate_range,
)
from recipes.planner.plan import FSDP, HEADROOM, Plan
from recipes.planner.rank_groups import rank_map
from recipes.planner.search.alternatives import faster_batch
from recipes.planner.search.ranking import SearchResult, search
from recipes.planner.search.request import SearchRequest
from recipes.planner.serving import serving
from recipes.planner.timeouts import limits
from recipes.spec.cluster import Cluster
from recipes.spec.extension_facts import ExtensionFact
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import budget_word, counted, length_shown, recipe_name
from recipes.spec.stage import Ladder
from recipes.spec.units import GiB

BAR, NEXT = 30, 3
LAYOUT, SHARES = "layout", "share of the GPU"
LEAST_SHARE = 0.0005
SHORT_STEP = 0.1
"""Seconds below which a step's time is shown in milliseconds, or with more decimals."""


def page(
    question: SearchRequest, answer: SearchResult, budget: int, *, default_budget: bool, why: bool
) -> None:
    """Print the page of the first plan, followed by the next best ones."""
    plan = answer.plans[0]
    typer.echo(
        f"{question.card.name} at {length_shown(question.seq_length)} tokens on "
        f"{counted(question.gpus, 'GPU')} of {question.cluster.name} ({question.cluster.gpu.name})"
    )
    typer.echo(f"layout: {words_of(plan.workload.layout)}")
    if untried := _untried(answer):
        typer.echo(untried)
    if leaner := _leaner(answer):
        typer.echo(leaner)
    typer.echo(
        f"batch: {question.tokens_per_batch:,} tokens, "
        f"{counted(question.tokens_per_batch // question.seq_length, 'sequence')}, "
        f"{counted(plan.workload.micro_batches, 'micro-batch')} on each data rank"
    )
    if question.documents is not None:
        typer.echo(plan_sentences.documents(plan))
    show(lambda without: _memory(plan, without), [SHARES])
    show(lambda without: _time(plan, without), ["share"])
    typer.echo(plan_sentences.attention(plan))
    typer.echo(plan_sentences.figures(plan, budget, default_budget=default_budget))
    typer.echo(plan_sentences.ranges(plan))
    typer.echo(plan_sentences.with_failures(plan, budget))
    typer.echo(plan_sentences.served(plan))
    typer.echo(_limits(plan))
    groups = "; ".join(map(str, rank_map(plan.workload, question.cluster)))
    typer.echo(f"ranks: {groups or 'one'}")
    if answer.plans[1:]:
        left_out = show(lambda without: _next(answer.plans, without), (LAYOUT,))
        if left_out:
            for number, other in _numbered(answer.plans):
                typer.echo(f"{number}: {words_of(other.workload.layout)}")
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
    if faster := faster_batch(question, answer):
        typer.echo(_batch(question, plan, faster))
    if why:
        show(lambda _: _ruled_out(answer))


def bill(
    card: ModelCard,
    ladder: Ladder,
    cluster: Cluster,
    plans: Sequence[tuple[Plan, int]],
    *,
    as_text: bool,
    command: str | None,
    of_stages: Sequence[str | None] = (),
    facts: Sequence[ExtensionFact] = (),
) -> None:
    """Print a line per stage, and the totals of the ladder.

    JSON has the command that trains all of it as planned; if there is none, those of the stages.
    It also has `facts`, which the caller prints below the page.
    """
    hours = [plan.gpu_hours(tokens) for plan, tokens in plans]
    cost = [plan.cost(tokens) for plan, tokens in plans]
    names = [recipe_name(card, ladder, stage) for stage in ladder.stages]
    if as_text:
        stages = [
            {"stage": name, **_numbers(plan, tokens)}
            for name, (plan, tokens) in zip(names, plans, strict=True)
        ]
        for stage, own in zip(stages, of_stages, strict=False):
            stage["command"] = own
        whole_bill = {"gpu_hours": sum(hours), "cost": sum(cost), "currency": cluster.currency}
        found = {"extension_facts": list(map(asdict, facts))}
        print_json({"stages": stages, **whole_bill, "command": command} | found)
        return
    gpus = plans[0][0].gpus
    paid = f"cost ({cluster.currency})" if cluster.currency else "cost"
    lines = [
        {
            "stage": name,
            LAYOUT: words_of(plan.workload.layout),
            "GiB": f"{plan.memory.total / GiB:.1f}",
            "s/step": _seconds(plan.time.step, 1),
            "MFU": f"{plan.time.mfu:.0%}",
            "days": f"{each / plan.gpus / 24:.2f}",
            "GPU-hours": f"{each:,.0f}",
            paid: f"{price:,.0f}" if price else "-",
        }
        for name, (plan, _), each, price in zip(names, plans, hours, cost, strict=True)
    ]
    whole = {
        "stage": "all",
        "days": f"{sum(hours) / gpus / 24:.2f}",
        "GPU-hours": f"{sum(hours):,.0f}",
        paid: f"{sum(cost):,.0f}" if any(cost) else "-",
    }

    def table(without: Sequence[str]) -> Table:
        made = Table(
            title=f"{card.name} on ladder {ladder.name}, {counted(gpus, 'GPU')} of {cluster.name}"
        )
        titles = [title for title in lines[0] if title not in without]
        for title in titles:
            left = title in ("stage", LAYOUT)
            made.add_column(title, no_wrap=True, justify="left" if left else "right")
        for line in lines:
            made.add_row(*(line[title] for title in titles))
        made.add_section()
        made.add_row(*(whole.get(title, "") for title in titles))
        return made

    print_left_out(lines, "stage", show(table, (LAYOUT, "GiB", "s/step", "MFU")))


def several(
    questions: Sequence[SearchRequest], budget: int, *, tightest: bool, as_text: bool
) -> None:
    """Plan each question; print a line for each, or JSON. Hours and days are with failures."""
    chosen = [next(iter(search(one, tightest=tightest).plans), None) for one in questions]
    cluster = questions[0].cluster
    if as_text:
        points = [
            {
                "seq_length": question.seq_length,
                "gpus": question.gpus,
                "tokens_per_batch": question.tokens_per_batch,
                "fits": plan is not None,
            }
            | ({} if plan is None else _numbers(plan, budget))
            for question, plan in zip(questions, chosen, strict=True)
        ]
        print_json({"card": questions[0].card.name, "cluster": cluster.name, "points": points})
        return
    paid = [f"cost ({cluster.currency})"] if cluster.price_per_gpu_hour else []
    table = Table(title=f"{questions[0].card.name} on {cluster.name} ({cluster.gpu.name})")
    for title in ("seq", "GPUs", "batch", LAYOUT, "GiB", "tokens/s/GPU", "MFU", "days",
                  "GPU-hours", *paid):  # fmt: skip
        left = title == LAYOUT
        table.add_column(title, no_wrap=not left, justify="left" if left else "right")
    for question, plan in zip(questions, chosen, strict=True):
        line = [length_shown(question.seq_length), f"{question.gpus:,}",
                length_shown(question.tokens_per_batch)]  # fmt: skip
        if plan is None:
            table.add_row(*line, "does not fit")
            continue
        hours = plan.gpu_hours(budget) / plan_sentences.goodput_of(plan, budget).share
        figures = [hours / plan.gpus / 24, hours]
        if paid:
            figures.append(hours * cluster.price_per_gpu_hour)
        layout = words_of(plan.workload.layout)
        table.add_row(
            *line,
            f"{layout} (not proven)" if plan.untried else layout,
            f"{plan.memory.total / GiB:.1f}",
            f"{plan.time.tokens_per_gpu_second:,.0f}",
            f"{plan.time.mfu:.0%}",
            *(f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in figures),
        )
    show(lambda _: table)
    typer.echo(f"days, GPU-hours{' and cost' if paid else ''}: {budget_word(budget)} tokens, with "
               "failures of nodes")  # fmt: skip


def as_json(question: SearchRequest, answer: SearchResult, budget: int) -> dict[str, Any]:
    """Return the plans as numbers: bytes, seconds, tokens."""
    other = faster_batch(question, answer)
    return {
        "card": question.card.name,
        "cluster": question.cluster.name,
        "gpus": question.gpus,
        "seq_length": question.seq_length,
        "tokens_per_batch": question.tokens_per_batch,
        "plans": [_numbers(plan, budget) for plan in answer.plans[: NEXT + 1]],
        "faster_batch_tokens": other and other.workload.tokens_per_batch,
        "tried": answer.tried,
        "ruled_out": dict(answer.ruled_out),
    }


def _numbers(plan: Plan, tokens: int) -> dict[str, Any]:
    return {
        "layout": words_of(plan.workload.layout),
        "memory_bytes": plan.memory.categories,
        "memory_total_bytes": plan.memory.total,
        "peak_in": plan.memory.peak_in,
        "host_bytes_per_rank": plan.memory.host,
        "step_seconds": plan.time.step,
        "time_seconds": plan.time.categories,
        "tokens_per_second_per_gpu": plan.time.tokens_per_gpu_second,
        "tokens_per_second_per_gpu_range": rate_range(plan),
        "memory_total_bytes_range": bytes_range(plan),
        "calibrated": is_calibrated(plan),
        "memory_calibrated": has_calibrated_bytes(plan),
        "mfu": plan.time.mfu,
        "attention_kernel": plan.cluster.efficiency.attention_kernel,
        "attention_shares": plan.cluster.efficiency.attention_of(plan.workload.card.head_dim),
        "attention_within_documents": plan.time.attended._asdict(),
        "tokens": tokens,
        "gpu_hours": plan.gpu_hours(tokens),
        "goodput": _in_numbers(plan, tokens),
        "cost": plan.cost(tokens),
        "currency": plan.cluster.currency,
        "serving": asdict(serving(plan)),
        "limits": asdict(limits(plan)),
        "ranks": [str(group) for group in rank_map(plan.workload, plan.cluster)],
        "untried": plan.untried,
        "warnings": plan.warnings,
    }


def _in_numbers(plan: Plan, tokens: int) -> dict[str, Any]:
    """Return the wall time with failures: times in seconds, GPU-hours with what they cost."""
    found = plan_sentences.goodput_of(plan, tokens)
    lost = found.failures
    return {
        "share": found.share,
        "gpu_hours": plan.gpu_hours(tokens) / found.share,
        "checkpoint_every_steps": found.every,
        "checkpoint_bytes": found.saved_bytes,
        "seconds_between_failures": lost.between,
        "seconds_blocked_by_a_checkpoint": lost.blocked,
        "seconds_to_restart": lost.down + lost.restart,
    }


def _memory(plan: Plan, without: Sequence[str]) -> Table:
    table = _with_shares(
        f"memory of a rank, at its peak in {plan.memory.peak_in}",
        ("category", "GiB", SHARES),
        without,
    )
    rows, whole = len(table.columns), plan.cluster.gpu_bytes
    for name, size in plan.memory.categories.items():
        if size / whole >= LEAST_SHARE:
            table.add_row(*(name, f"{size / GiB:.2f}", _bar(size / whole))[:rows])
    table.add_section()
    total = plan.memory.total
    table.add_row(*("all", f"{total / GiB:.2f}", _bar(total / whole))[:rows])
    if plan.memory.host:
        share = plan.memory.host / plan.host_bytes
        host = ("host", f"{plan.memory.host / GiB:.2f}", f"{share:.0%} of a rank's host")
        table.add_row(*host[:rows])
    return table


def _time(plan: Plan, without: Sequence[str]) -> Table:
    whole = plan.time.step
    unit, factor = ("s", 1.0) if whole >= SHORT_STEP else ("ms", 1e3)
    title = f"a step, {whole * factor:,.2f} {unit}"
    table = _with_shares(title, ("category", unit, "share"), without)
    rows = len(table.columns)
    for name, seconds in plan.time.categories.items():
        if seconds / whole >= LEAST_SHARE:
            table.add_row(*(name, f"{seconds * factor:,.3f}", _bar(seconds / whole))[:rows])
    return table


def _with_shares(title: str, columns: Sequence[str], without: Sequence[str]) -> Table:
    """Return a table of categories, their figures, and bars that a narrow terminal leaves out."""
    table = Table(title=title)
    for column in (name for name in columns if name not in without):
        right = column == columns[1]
        table.add_column(column, no_wrap=True, justify="right" if right else "left")
    return table


def _seconds(seconds: float, digits: int) -> str:
    """Return seconds with `digits` decimals; of a short step, with two significant digits."""
    return f"{seconds:,.{digits}f}" if seconds >= SHORT_STEP else f"{seconds:.2g}"


def _bar(share: float) -> str:
    return f"{'█' * round(BAR * min(share, 1)):<{BAR}} {share:6.1%}"


def _as_tried(plan: Plan) -> str:
    """Return what is known of a plan's untried parts, as the end of a sentence."""
    parts = [part for part in plan.untried if part != FSDP]
    said = f"{' and '.join(parts)} {'have' if parts[1:] else 'has'} not been tried on GPUs here"
    of_fsdp = f"{FSDP} could not read the weights of an import on an H100"
    return " and ".join([said] * bool(parts) + [of_fsdp] * (FSDP in plan.untried))


def _untried(answer: SearchResult) -> str:
    """Return a sentence on the first plan's untried parts, or on a faster plan with some."""
    plan, *others = answer.plans
    if plan.untried:
        return f"not proven: {_as_tried(plan)}{'' if answer.given else '; no other layout fits'}"
    faster = next((one for one in others if one.untried), None)
    if faster is None:
        return ""
    return (
        f"not taken: {words_of(faster.workload.layout)} takes "
        f"{1 - faster.time.step / plan.time.step:.0%} less time, but {_as_tried(faster)}; "
        "--layout plans it"
    )


def _leaner(answer: SearchResult) -> str:
    """Return a sentence on the memory that the first plan saves; empty if it is the fastest."""
    plan = answer.plans[0]
    fastest = min(
        (one for one in answer.plans if bool(one.untried) == bool(plan.untried)),
        key=lambda one: one.time.step,
    )
    saved = (fastest.memory.total - plan.memory.total) / GiB
    if saved <= 0 or fastest.time.step >= plan.time.step:
        return ""
    return (
        f"leaner: it takes {saved:.1f} GiB less than the fastest that was tried, and "
        f"{plan.time.step / fastest.time.step - 1:.1%} more time (--tightest plans that one)"
    )


def _batch(question: SearchRequest, plan: Plan, other: Plan) -> str:
    tokens = other.workload.tokens_per_batch
    sequences, change = tokens // question.seq_length, tokens / question.tokens_per_batch - 1
    return (
        f"faster: a batch of {sequences:,} sequences ({change:+.0%} tokens), which more data ranks "
        f"divide, {other.time.tokens_per_gpu_second:,.0f} tokens/s/GPU instead of "
        f"{plan.time.tokens_per_gpu_second:,.0f}: --tokens-per-batch {tokens}"
    )


def _limits(plan: Plan) -> str:
    found = limits(plan)
    return (
        f"a rank is considered hung after {found.collective:,.0f} s in one collective, or "
        f"{found.heartbeat:,.0f} s without the end of a step ({found.first_heartbeat:,.0f} s for "
        f"the first); PYTORCH_CUDA_ALLOC_CONF={found.allocator}"
    )


def _next(plans: Sequence[Plan], without: Sequence[str]) -> Table:
    table = Table(title="the next best")
    titles = [name for name in ("", LAYOUT, "s/step", "time", "GiB") if name not in without]
    for column in titles:
        left = column == LAYOUT
        table.add_column(column, no_wrap=True, justify="left" if left else "right")
    best = plans[0].time.step
    for number, plan in _numbered(plans):
        line = {
            "": str(number),
            LAYOUT: words_of(plan.workload.layout),
            "s/step": _seconds(plan.time.step, 2),
            "time": f"{plan.time.step / best - 1:+.1%}",
            "GiB": f"{plan.memory.total / GiB:.1f}",
        }
        table.add_row(*(line[title] for title in titles))
    return table


def _numbered(plans: Sequence[Plan]) -> Iterator[tuple[int, Plan]]:
    """Yield the plans after the first with their places, but for an untried one after a tried."""
    others = [one for one in plans[1:] if plans[0].untried or not one.untried]
    return enumerate(others[:NEXT], start=2)


def _ruled_out(answer: SearchResult) -> Table:
    table = Table(
        title=f"{len(answer.plans)} of {answer.tried} layouts fit with {HEADROOM:.0%} to spare; "
        "ruled out",
    )
    table.add_column("layouts", justify="right")
    table.add_column("why")
    ruled: Mapping[str, int] = answer.ruled_out
    for reason, count in sorted(ruled.items(), key=lambda item: -item[1]):
        table.add_row(str(count), reason)
    return table
