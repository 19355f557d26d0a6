# SPDX-License-Identifier: Apache-2.0
"""`longhaul rehearse --probe`: a small extension of real weights, and whether they follow it."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from data.files.writable import require_folder
from longhaul.defaults import planned_cluster, store_of
from longhaul.jobs import ladder_run
from longhaul.options import length_of, print_json
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import loading, output_to, show
from longhaul.terminal.messages import note, resumable
from longhaul.terminal.progress import Watched, progress
from longhaul.terminal.results import announcing_evaluations
from recipes.checkpoints.marker import checkpoint_facts, start_checkpoint
from recipes.rehearsal import extension
from recipes.shipped.machines import Machines
from recipes.spec.cluster import CLUSTER
from recipes.spec.extension_facts import card_facts
from recipes.spec.naming import MODELS, RUNS, budget_from, length_shown, recipe_name
from recipes.spec.suggest import lookup

if TYPE_CHECKING:
    from longhaul.rehearsal.extension import Probed
    from recipes.shipped.row import Row
    from recipes.spec.model_card import ModelCard
    from recipes.spec.stage import Ladder, Stage

GPU_DOCUMENTS, CPU_DOCUMENTS = 12, 4
CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options that only a probe has."""

    start: Path | None = None
    tokens: str = ""
    length: str = ""
    documents: int | None = None
    device: str | None = None
    as_json: bool = False

    def require_none(self) -> None:
        """Raise ValueError if one is given without --probe."""
        given = {
            "--from": self.start, "--tokens": self.tokens, "--length": self.length,
            "--documents": self.documents, "--device": self.device, "--json": self.as_json,
        }  # fmt: skip
        if named := [name for name, value in given.items() if value not in (None, "", False)]:
            raise ValueError(f"{' and '.join(named)} has an effect only with --probe; add it")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is probed, before anything large is loaded."""

    card: "ModelCard"
    whole: "Stage"
    start: Path
    native: int
    length: int
    plan: ladder_run.LadderRun
    row: "Row"

    @property
    def stage(self) -> "Stage":
        """The small extension."""
        return self.plan.ladder.stages[0]

    @property
    def ends(self) -> list[int]:
        """Ends of the ranges of positions that are shown."""
        from eval.run_folder import BUCKET

        return extension.range_ends(self.native, self.length, BUCKET)


def run_probe(
    named: "tuple[ModelCard, Ladder, Stage, bool]",
    asked: Machines,
    options: ProbeOptions,
    *,
    ranks: int | None,
    out: Path | None,
    store: Path | None,
    overrides: Sequence[str],
) -> None:
    """Probe a stage and print what was seen; `named` says too whether it is one for CPU ranks."""
    probe = planned(named, asked, options, ranks=ranks, out=out, store=store)
    on_cpu = probe.row.layout.device == "cpu"
    run = probe.plan.run
    documents = options.documents or (CPU_DOCUMENTS if on_cpu else GPU_DOCUMENTS)
    require_folder(run, "--out")
    ladder_run.require_own_folder(probe.plan)
    ladder_run.require_gpus_of([probe.row], options.device, overrides)
    small = probe.stage
    if not options.as_json:
        note(
            f"{recipe_name(probe.card, named[1], probe.whole)}: {small.steps:,} steps of "
            f"{small.tokens_per_batch:,} tokens at {length_shown(small.seq_length)} from "
            f"{probe.start}, read at {length_shown(probe.length)}; native context "
            f"{probe.native:,}"
        )
    with in_use(run):
        seen = _measured(probe, overrides, documents=documents, ranks=ranks)
    if options.as_json:
        print_json(seen.content())
        return
    _print(seen)
    typer.echo(run / "probe.json")


def planned(
    named: "tuple[ModelCard, Ladder, Stage, bool]",
    asked: Machines,
    options: ProbeOptions,
    *,
    ranks: int | None,
    out: Path | None,
    store: Path | None,
) -> Probe:
    """Return the probe of a stage; raise ValueError for one that is not possible."""
    from recipes.shipped import select

    card, ladder, stage, for_cpu = named
    if options.device not in (None, "cpu"):
        raise ValueError(f"--device is {options.device!r}; expected cpu, or leave it out for GPUs")
    on_cpu = asked.on_cpu or options.device == "cpu" or (for_cpu and not asked.sized)
    start = _start(card, stage, options.start)
    native = _native(start)
    length = _length(stage, native, options.length, on_cpu=on_cpu)
    if on_cpu:
        machines = replace(asked, device="cpu", cluster="", layout=asked.layout or _words(ranks))
    elif ranks is not None:
        raise ValueError(
            f"--ranks is {ranks}, and the ranks of a probe on GPUs are those of its layout; take "
            "--gpus, or --layout"
        )
    else:
        machines = replace(asked, cluster=asked.cluster or planned_cluster() or CLUSTER)
    tokens = extension.CPU_TOKENS if on_cpu else extension.GPU_TOKENS
    small = extension.probe_ladder(
        ladder, stage, length=length,
        tokens=budget_from(options.tokens) if options.tokens else tokens,
        steps=extension.CPU_STEPS if on_cpu else extension.GPU_STEPS,
        gpus=1 if on_cpu else machines.gpus_in_all,
    )  # fmt: skip
    card = replace(card, start=str(start))
    run = out or RUNS / "probes" / recipe_name(card, ladder, stage)
    plan = ladder_run.LadderRun(ladder=small, card=card, run=run, store=store_of(card, store))
    if not plan.store.exists():
        own = start / "hugging_face"
        tokenizer = shlex.quote(str(own if own.is_dir() else card.hf_id or "TOKENIZER"))
        to = shlex.quote(str(plan.store))
        raise ValueError(
            f"there is no token store at {plan.store}; name one with --store, or make it: "
            f"longhaul prepare --source DOCUMENTS --tokenizer {tokenizer} --out {to}"
        )
    row = select.placed_row(card, small, small.stages[0], machines)
    if row.nodes > 1:
        raise ValueError(
            f"a probe runs on one node, and its layout takes {row.nodes}; lower --nodes or --gpus"
        )
    return Probe(
        card=card, whole=stage, start=start, native=native, length=length, plan=plan, row=row
    )


def _words(ranks: int | None) -> str:
    """Return the layout of CPU ranks in words; empty for the usual one of two."""
    return "" if ranks in (None, CPU_RANKS) else "cpu" if ranks == 1 else f"cpu ring{ranks}"


def _start(card: "ModelCard", stage: "Stage", given: Path | None) -> Path:
    """Return the folder of the weights; raise ValueError if there is none."""
    folder = given or Path(card.start or MODELS / card.name)
    if given is None and stage.start != "card":
        what = "the stage before" if stage.start == "previous" else "random weights"
        raise ValueError(
            f"the stage of {length_shown(stage.seq_length)} starts from {what}; name the weights "
            "to probe with --from, an import or RUN/stages/NAME"
        )
    if not folder.is_dir():
        option = "--from" if given is not None else "the weights of the card"
        raise ValueError(
            f"{option}: there is no folder {folder}; import weights with `longhaul import`, and "
            "name them with --from"
        )
    checkpoints = folder / "checkpoints"
    return checkpoints if checkpoints.is_dir() else folder


def _native(start: Path) -> int:
    """Return the context that weights were trained for, in tokens."""
    facts = checkpoint_facts(start_checkpoint(start))
    if facts is None or "rope" not in facts:
        raise ValueError(
            f"{start} does not state its rotation, so it cannot be measured; import the weights "
            "with `longhaul import`"
        )
    return int(facts["seq_length"])


def _length(stage: "Stage", native: int, words: str, *, on_cpu: bool) -> int:
    """Return the length to read at; raise ValueError for one that tells nothing or takes hours."""
    from eval.run_folder import BUCKET

    target = stage.target_length
    length = length_of("--length", words) if words else target
    named = f"--length is {length:,}" if words else f"the stage is for {length:,} tokens"
    if length > target:
        raise ValueError(
            f"{named}, and the stage is for {target:,}; name at most that, since its rotation "
            "reaches no further"
        )
    if length <= native:
        raise ValueError(
            f"{named}, and the weights were trained for {native:,}; a probe reads beyond that, so "
            "name a longer --length or another stage"
        )
    if length % BUCKET:
        raise ValueError(
            f"{named}, and losses are averaged over {BUCKET} positions; take "
            f"{length // BUCKET * BUCKET:,}"
        )
    if on_cpu and length > extension.MOST_ON_CPU:
        raise ValueError(
            f"{named}, which takes CPU ranks hours; name a --length above {native:,} and up to "
            f"{extension.MOST_ON_CPU:,}, or probe on a node with GPUs"
        )
    return length


def _measured(
    probe: Probe, overrides: Sequence[str], *, documents: int, ranks: int | None
) -> "Probed":
    """Train what is left of the probe, evaluate the three models, and return what was seen."""
    plan = probe.plan
    with loading("NeMo and Megatron-Core"):
        from data.store import Manifest
        from eval.base_model import base_models
        from eval.run_folder import write_json
        from longhaul.jobs import evaluation, local_chain, stage_checks, training
        from longhaul.jobs.store_source import require_heldout
        from longhaul.rehearsal.extension import RECORD, probed
        from longhaul.run_folder.places import require_places, require_room
        from longhaul.run_folder.undamaged import require_undamaged
        from slurm.experiment import run_in_order

        (stage,) = local_chain.stages(plan, [probe.row], overrides, None)
        require_places(stage.recipe)
        stage_checks.require_same(stage)
        stage_checks.require_device(stage)
        stage_checks.require_start(stage)
        local_chain.require_store([stage], evaluated=False)
        require_heldout(Manifest.load(plan.store), probe.length)
        require_room([stage], plan.card)
        notes = require_undamaged([stage], plan.verify)
        layout = evaluation.evaluation_layout(stage, plan.evaluation)
        if stage.layout.device == "cpu":
            layout |= {"ranks": min(ranks or CPU_RANKS, documents)}
        for words in (*notes, *local_chain.standing([stage])):
            note(f"note: {words}")
        require_unused(plan.run / "eval")
        local_chain.write_records(plan, [stage])
        tp, cp, pp = evaluation.sizes_of(layout)
        evaluation.require_layout(
            plan.run, [stage.name], ranks=layout["ranks"], tp=tp, cp=cp, pp=pp,
            length=probe.length, device=layout["device"],
        )  # fmt: skip
        evaluated = evaluation.evaluation_job(
            plan.run, [stage.name], lengths=probe.ends, store=plan.store, documents=documents,
            trials=0, base=True, missing=True, context_gain=True, **layout,
        )  # fmt: skip
        jobs = [*([] if stage.is_done else [training.training_job(stage)]), evaluated]
    watched = [Watched(stage.name, stage.steps, stage.metrics, stage.tokens_per_batch)]
    note(f"the ranks write to {plan.run / 'launch'}")
    with ExitStack() as held:
        for folder in (stage.folder, plan.run / "eval"):
            held.enter_context(in_use(folder))
        held.enter_context(resumable())
        console = held.enter_context(output_to(plan.run / "output.log"))
        held.enter_context(progress(console, watched, after="evaluating"))
        subjects = [*(model.name for model in base_models(plan.run, [stage.name])), stage.name]
        held.enter_context(announcing_evaluations(console, plan.run, subjects))
        run_in_order("probe", jobs, plan.run / "launch", console.print)
    facts = card_facts(probe.card, probe.row.layout, probe.length)
    seen = probed(plan.run, stage.name, start=str(probe.start), native=probe.native, facts=facts)
    write_json(plan.run / RECORD, seen.content())
    return seen


def _print(seen: "Probed") -> None:
    from rich.table import Table

    from longhaul.rehearsal.extension import sentences, table_rows

    table = Table(title=f"Loss of {seen.documents} held-out documents, nats per token")
    table.add_column("positions (* beyond native)", overflow="fold")
    for name in seen.readings:
        table.add_column(name, justify="right", overflow="fold")
    for row in table_rows(seen):
        table.add_row(*row)
    show(lambda _: table)
    for sentence in sentences(seen):
        typer.echo(sentence)


def stage_of_words(
    name: str, card: str, ladder: str, stage: str
) -> "tuple[ModelCard, Ladder, Stage, bool]":
    """Return card, ladder and stage of a recipe's name or options, and whether it is for CPUs."""
    from recipes.models import TINY
    from recipes.shipped.named import combined
    from recipes.shipped.select import stage_of
    from recipes.shipped.table import ROWS

    if name:
        row = lookup("recipe", name, ROWS)
        return row.card, row.ladder, row.stage, row.layout.device == "cpu"
    model, climbed, said = combined(card, ladder, stage)
    for words in said:
        note(f"note: {words}")
    return model, climbed, stage_of(climbed, stage), model is TINY
