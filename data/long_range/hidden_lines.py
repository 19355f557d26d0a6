# SPDX-License-Identifier: Apache-2.0
"""Lines with keys and numbers, and what is asked for about them, of each kind that hides lines.

    retrieval      The code of Bamiro is 48213.         BAMIRO = 48213
                   The code of which key? Bamiro: 48213.     assert BAMIRO == 48213

The second line of each pair ends the document. Keys are made of syllables, and no key or number
occurs twice in a document.
"""

import random
from collections.abc import Iterator

from data.long_range.composition import Hidden, Query
from data.long_range.spec import Spec

SYLLABLES = [first + then for first in "bdfgklmnprstvz" for then in "aeiou"]


def hidden_lines(spec: Spec, draw: random.Random) -> Hidden:
    """Return the hidden lines of a document and its queries."""
    return {"retrieval": _retrieval, "multi_needle": _multi_needle, "variables": _variables}[
        spec.kind
    ](spec, draw)


def distinct_names(draw: random.Random) -> Iterator[str]:
    """Yield names of two to four syllables, in lower case, each once."""
    seen: set[str] = set()
    while True:
        # Longer ones as they run out: 4,900 names have two syllables.
        name = "".join(draw.choices(SYLLABLES, k=draw.randint(2, 4) + len(seen) // 100_000))
        if name not in seen:
            seen.add(name)
            yield name


def distinct_numbers(draw: random.Random, digits: int) -> Iterator[str]:
    """Yield numbers with this many digits, each once."""
    seen: set[int] = set()
    while True:
        number = draw.randrange(10 ** (digits - 1), 10**digits)
        if number not in seen:
            seen.add(number)
            yield str(number)


def _retrieval(spec: Spec, draw: random.Random) -> Hidden:
    names, numbers = distinct_names(draw), distinct_numbers(draw, spec.digits)
    pairs = [(next(names), next(numbers)) for _ in range(spec.keys)]
    lines, queries = [], []
    for name, number in pairs:
        if spec.form == "code":
            lines.append(f"{name.upper()} = {number}")
            queries.append(Query(f"assert {name.upper()} == ", number, (lines[-1],)))
        else:
            lines.append(f"The code of {name.capitalize()} is {number}.")
            prompt = f"What is the code of {name.capitalize()}? It is "
            queries.append(Query(prompt, number, (lines[-1],), ".\n"))
    return Hidden(tuple(lines), tuple(draw.sample(queries, spec.queries)))


def _multi_needle(spec: Spec, draw: random.Random) -> Hidden:
    names, numbers = distinct_names(draw), distinct_numbers(draw, spec.digits)
    order = [name for name in (next(names) for _ in range(spec.keys)) for _ in range(spec.values)]
    draw.shuffle(order)
    lines_of: dict[str, list[str]] = {name: [] for name in order}
    numbers_of: dict[str, list[str]] = {name: [] for name in order}
    lines = []
    for name in order:
        number = next(numbers)
        code, prose = f"{name.upper()}.add({number})", f"{name.capitalize()} has the code {number}."
        lines.append(code if spec.form == "code" else prose)
        lines_of[name].append(lines[-1])
        numbers_of[name].append(number)
    queries = []
    for name in draw.sample(sorted(lines_of), spec.queries):
        answer = ", ".join(numbers_of[name])
        if spec.form == "code":
            prompt, end = f"assert {name.upper()} == {{", "}\n"
        else:
            prompt, end = f"Which codes does {name.capitalize()} have? It has ", ".\n"
        queries.append(Query(prompt, answer, tuple(lines_of[name]), end))
    return Hidden(tuple(lines), tuple(queries))


def _variables(spec: Spec, draw: random.Random) -> Hidden:
    names, numbers = distinct_names(draw), distinct_numbers(draw, spec.digits)
    chains = [[next(names) for _ in range(spec.hops + 1)] for _ in range(spec.chains)]
    values = [next(numbers) for _ in chains]
    lines_of: list[list[str]] = []
    for chain, value in zip(chains, values, strict=True):
        of = [value, *chain]
        lines_of.append([_assignment(spec, new, old) for old, new in zip(of, chain, strict=False)])
    turns = [number for number, chain in enumerate(chains) for _ in chain]
    draw.shuffle(turns)
    left = [iter(lines) for lines in lines_of]
    lines = [next(left[number]) for number in turns]
    queries = []
    for number in draw.sample(range(spec.chains), spec.queries):
        chain, value = chains[number], values[number]
        if spec.form == "code":
            prompt = f"assert {chain[-1]} == "
            queries.append(Query(prompt, value, tuple(lines_of[number])))
        else:
            prompt = f"Which variables have the value {value}? They are "
            names_of = ", ".join(name.capitalize() for name in chain)
            queries.append(Query(prompt, names_of, tuple(lines_of[number]), ".\n"))
    return Hidden(tuple(lines), tuple(queries))


def _assignment(spec: Spec, new: str, old: str) -> str:
    if spec.form == "code":
        return f"{new} = {old}"
    value = old if old.isdigit() else f"the value of {old.capitalize()}"
    return f"The variable {new.capitalize()} is {value}."
