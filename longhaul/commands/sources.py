# SPDX-License-Identifier: Apache-2.0
"""`longhaul sources`: public data sets with long documents, and how to get and prepare them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import Json, print_json
from longhaul.terminal.messages import next_command

if TYPE_CHECKING:
    from rich.table import Table

    from data.public_datasets import PublicDataset


def sources(
    name: Annotated[str, typer.Argument(help="A name of the list, or an id on the hub.")] = "",
    as_json: Json = False,
) -> None:
    """List public long-document data sets, with the commands that download and prepare them."""
    from data.public_datasets import DATASETS, named

    if name:
        dataset = named(name)
        if as_json:
            print_json(_content(dataset))
            return
        for line in _page(dataset):
            typer.echo(line)
        return
    if as_json:
        print_json([_content(dataset) for dataset in DATASETS])
        return
    from longhaul.terminal.console import print_left_out, show

    rows = [
        {"name": one.name, "size": one.size, "licence": one.licence, "hub": one.hub_id}
        for one in DATASETS
    ]

    def table(without: Sequence[str]) -> "Table":
        from rich.table import Table

        shown = Table(box=None)
        titles = [title for title in rows[0] if title not in without]
        for title in titles:
            shown.add_column(title, no_wrap=title in ("name", "hub"))
        for row in rows:
            shown.add_row(*(row[title] for title in titles))
        return shown

    print_left_out(rows, "name", show(table, ("licence", "size")))
    next_command(["longhaul", "sources", DATASETS[0].name], "see what one is and how to get it")


def _page(dataset: "PublicDataset") -> list[str]:
    lines = [
        f"{dataset.name}: {dataset.what}",
        f"size: {dataset.size}",
        f"licence: {dataset.licence}",
        f"page: https://huggingface.co/datasets/{dataset.hub_id}",
    ]
    lines += [f"note: {note}" for note in dataset.notes]
    if dataset.unverified:
        lines.append(f"not verified: {', '.join(dataset.unverified)}")
    if dataset.gated:
        lines.append("gated: accept its terms on its page, then run `hf auth login`")
    lines.append("download:" if len(dataset.subsets) == 1 else "download one of:")
    for subset, command in zip(dataset.subsets, dataset.commands, strict=True):
        size = f", {subset.size}" if subset.size else ""
        lines += [f"  # {subset.name}{size}", f"  {command}"]
    if dataset.prepare is not None:
        lines += ["then, with the tokenizer of your model:", f"  {dataset.prepare}"]
    return lines


def _content(dataset: "PublicDataset") -> dict[str, Any]:
    return {**asdict(dataset), "commands": dataset.commands, "prepare": dataset.prepare}
