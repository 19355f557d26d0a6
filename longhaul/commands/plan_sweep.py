# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan --sweep`: one choice for each of several lengths and numbers of GPUs."""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import typer

from longhaul.options import length_of, print_json
from longhaul.pages.sweep_page import as_csv, as_json, page
from longhaul.terminal.console import busy, plain_console
from recipes.planner.batch_size import even_batch
from recipes.planner.documents import DocumentLengths
from recipes.planner.search.request import SearchRequest
from recipes.planner.search.sweep import sweep
from recipes.shipped.machines import gpus_of
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Fp8
from recipes.spec.model_card import ModelCard
from recipes.spec.suggest import did_you_mean

OPTION, EXAMPLE = "--sweep", "'seq=64K:4M nodes=1:64'"
MOST, SECONDS_EACH = 1_000, 0.05
"""Points of a sweep, and what one takes."""


def plan_sweep(
    card: ModelCard,
    words: str,
    *,
    seq: str,
    cluster: Cluster,
    nodes: int | None,
    gpus: int | None,
    batch: int,
    tokens: int,
    fp8: Fp8,
    tightest: bool,
    documents: DocumentLengths | None = None,
    as_text: bool,
    csv: Path | None,
    plot: Path | None,
) -> None:
    """Print a table, or JSON, of a sweep; write a CSV file and a picture where asked to.

    Args:
        card: the model.
        words: the sweep, such as `seq=64K:4M nodes=1:64`.
        seq: the length where the sweep does not state any; empty if none is given.
        cluster: the machines.
        nodes: their number; not together with a number that the sweep states.
        gpus: the GPUs, if they are not whole nodes; likewise.
        batch: about as many tokens has a step.
        tokens: the budget of the stage.
        fp8: the recipe of linear layers.
        tightest: whether to choose the fastest that was tried, however full the GPUs are.
        documents: lengths of the documents that attention stays within, if it does.
        as_text: whether to print JSON.
        csv: the file to write, if any.
        plot: the picture to write, if any.

    Raises ValueError for a sweep that cannot be read or has too many points.
    """
    given = parsed(words)
    _require_once(given, {"seq": seq, "nodes": nodes, "gpus": gpus})
    lengths = given.get("seq") or ([length_of("--seq", seq)] if seq else [])
    if not lengths:
        raise ValueError(f"--sweep {words!r} states no lengths; add seq=64K:4M to it, or --seq")
    if "nodes" in given:
        ranks = [gpus_of(cluster, count, None) for count in given["nodes"]]
    elif "gpus" in given:
        ranks = [gpus_of(cluster, None, count) for count in given["gpus"]]
    else:
        ranks = [gpus_of(cluster, nodes, gpus)]
    _require_few(len(lengths) * len(ranks), words)
    asked = [
        SearchRequest(
            card=card,
            seq_length=length,
            tokens_per_batch=even_batch(batch, length, count),
            cluster=cluster,
            gpus=count,
            fp8=fp8,
            documents=documents,
        )
        for length, count in product(lengths, ranks)
    ]
    console = plain_console(stderr=True)
    with busy(console, f"planning {len(asked):,} points"):
        points = list(sweep(asked, tokens, tightest=tightest))
    if as_text:
        print_json(as_json(points))
    else:
        page(points)
    if csv is not None:
        as_csv(csv, points)
        typer.echo(csv, err=as_text)
    if plot is not None:
        from longhaul.pages.sweep_plot import draw

        draw(plot, points)
        typer.echo(plot, err=as_text)


def parsed(words: str) -> Mapping[str, list[int]]:
    """Return the values of each name in the words of a sweep.

    `seq=64K:1M` is 64K and each double of it up to 1M, and 1M; `nodes=1,3,8` is these three.
    Raises ValueError for anything else.
    """
    readers: dict[str, Callable[[str], int]] = {
        "seq": lambda word: length_of(f"--sweep seq={word}", word),
        "nodes": lambda word: _count("nodes", word),
        "gpus": lambda word: _count("gpus", word),
    }
    found: dict[str, list[int]] = {}
    for word in words.split():
        name, equals, values = word.partition("=")
        if not equals or not values:
            raise ValueError(
                f"--sweep: {word!r} is not NAME=VALUES; a sweep is written as in --sweep {EXAMPLE}"
            )
        if name not in readers:
            raise ValueError(f"--sweep has no {name!r}; {did_you_mean(name, readers)}")
        if name in found:
            raise ValueError(f"--sweep states {name} twice; separate its values by commas")
        found[name] = _values(name, values, readers[name])
    if not found:
        raise ValueError(f"--sweep is empty; a sweep is written as in --sweep {EXAMPLE}")
    if "nodes" in found and "gpus" in found:
        raise ValueError("--sweep states nodes and gpus; leave one of them out")
    return found


def _require_once(given: Mapping[str, list[int]], options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that the sweep states too."""
    beside = {"seq": ["seq"], "nodes": ["nodes", "gpus"], "gpus": ["nodes", "gpus"]}
    for name in given:
        for option in beside[name]:
            if options[option]:
                raise ValueError(f"--sweep states {name}; leave --{option} out")


def _values(name: str, words: str, read: Callable[[str], int]) -> list[int]:
    found: dict[int, None] = {}
    for part in words.split(","):
        first, colon, last = part.partition(":")
        low = read(first)
        high = read(last) if colon else low
        if high < low:
            raise ValueError(f"--sweep {name}={part} ends below its start; write {last}:{first}")
        while low < high:
            found[low] = None
            low *= 2
        found[high] = None
    return list(found)


def _count(name: str, word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) <= 9 and int(word)):
        raise ValueError(f"--sweep {name}={word}: expected a number of {name} from 1 on")
    return int(word)


def _require_few(points: int, words: str) -> None:
    if points > MOST:
        raise ValueError(
            f"--sweep {words!r} has {points:,} points, which take about "
            f"{points * SECONDS_EACH / 60:,.0f} minutes; at most {MOST:,} are planned at once, so "
            "name fewer lengths or nodes"
        )
