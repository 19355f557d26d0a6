# SPDX-License-Identifier: Apache-2.0
"""docs/ladders.md: the generated page has each ladder's figures, marked as stated or ours."""

import pytest

from recipes.ladders import LADDERS
from tests.recipes.support.ladder_table import HEAD, OF_NO_SOURCE, PAGE, page
from tests.recipes.support.stated_figures import OTHERWISE, OUR_LENGTHS, STATED
from tests.recipes.test_ladders import READ

OF_STAGES = [
    (name, length, figure, value)
    for name, of_lengths in OTHERWISE.items()
    for length, figures in of_lengths.items()
    for figure, value in figures.items()
]


def rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of the table of figures by ladder."""
    found: dict[str, list[dict[str, str]]] = {}
    name = ""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(HEAD) or cells[0] in ("ladder", ":--"):
            continue
        name = cells[0].strip("`") or name
        found.setdefault(name, []).append(dict(zip(HEAD, cells, strict=True)))
    return found


def test_the_page_is_up_to_date():
    command = "python -m tests.recipes.support.ladder_table"
    assert PAGE.read_text() == page(), f"run: {command}"


def test_every_stage_of_every_ladder_with_a_source_has_a_row():
    stages = {
        name: len([row for row in of_ladder if row["length"] != "all"])
        for name, of_ladder in rows().items()
    }
    assert stages == {
        name: len(ladder.stages) for name, ladder in LADDERS.items() if name not in OF_NO_SOURCE
    }


def test_a_figure_is_plain_if_stated_and_in_italics_if_ours():
    first, second = rows()["k2v2"][:2]
    assert (first["optimizer"], second["optimizer"]) == ("carried; *new*", "carried")
    assert (second["steps"], second["rate"]) == ("17,500", "6e-06 constant")
    assert second["documents"] == "*across*"
    of_llama31 = rows()["llama31"]
    assert [row["length"] for row in of_llama31[:2]] == ["*16K*", "*32K*"]
    assert of_llama31[5]["rotation"] == "*llama3 by 8 from 8K*, base 500K"
    assert of_llama31[6]["tokens"] == "800B"


def test_a_constant_rate_is_a_rate_whose_end_is_its_peak():
    shown = {
        name: [row["rate"].strip("*").endswith("constant") for row in of_ladder if row["steps"]]
        for name, of_ladder in rows().items()
    }
    assert shown == {
        name: [stage.lr.final_ratio == 1 for stage in LADDERS[name].stages] for name in shown
    }


@pytest.mark.parametrize(("name", "length", "figure", "value"), OF_STAGES)
def test_what_a_source_has_otherwise_differs_and_is_said(name, length, figure, value):
    ladder = LADDERS[name]
    assert READ[figure](ladder[length]) != value
    stated = {row[0]: row[1] for row in STATED}[name][length]
    assert figure not in stated
    assert ladder.departures or ladder.ours


def test_a_length_that_is_ours_is_one_of_the_ladder_and_its_list_says_so():
    for name, lengths in OUR_LENGTHS.items():
        assert set(lengths) <= {stage.seq_length for stage in LADDERS[name].stages}
        assert any("length" in sentence for sentence in LADDERS[name].ours)
