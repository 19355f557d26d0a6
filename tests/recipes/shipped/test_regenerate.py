# SPDX-License-Identifier: Apache-2.0
"""The table is rewritten where the planner chooses, and nowhere else."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.shipped import regenerate, table
from recipes.shipped.table import ROWS
from recipes.spec.layout import ContextParallel, Layout

SOURCE = Path(table.__file__).read_text()
PLANNED = {name: row for name, row in ROWS.items() if row.planned}
OTHER = Layout(tp=4, cp=ContextParallel.hybrid(ulysses=2, ring=8, heads_per_stage=16), pp=14)


def rows_of(path: Path):
    """Return the rows of a table in another file."""
    spec = importlib.util.spec_from_file_location("another_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROWS


def test_the_same_rows_leave_the_file_byte_for_byte():
    assert regenerate.rewritten(SOURCE, ROWS) == SOURCE


@pytest.mark.parametrize("name", ["llama3_8b_nemo_16k", "llama3_8b_nemo_128k"])
def test_a_row_is_laid_out_as_it_is_shipped(name):
    assert regenerate.planned_today(ROWS[name]) == ROWS[name]


def test_what_is_written_reads_as_the_same_rows(tmp_path):
    layouts = [row.layout for row in PLANNED.values()]
    moved = {
        name: replace(row, nodes=2 * row.nodes, layout=layout)
        for (name, row), layout in zip(PLANNED.items(), [*layouts[1:], OTHER], strict=True)
    }
    file = tmp_path / "table.py"
    file.write_text(regenerate.rewritten(SOURCE, moved))
    assert rows_of(file) == ROWS | moved
    assert max(map(len, file.read_text().splitlines())) <= 100


def test_a_new_row_gets_nodes_and_layout_and_other_text_stays():
    new = '    _row("llama3_8b@nemo:16K", "dgx_h100:1", "one rank"),  # a reason\n'
    fp8 = '    _row("llama3_8b@nemo:16K", "dgx_b200:1",\n        "one rank", variant="fp8"),\n'
    other = '    _row("other@nemo:16K", "dgx_h100:1", "dp2"),\n'
    chosen = replace(ROWS["llama3_8b_nemo_16k"], nodes=4, layout=Layout(dp=32))
    written = regenerate.rewritten(f"# before\n{new}# after\n{fp8}{other}", {"new": chosen})
    row = new.replace("dgx_h100:1", "dgx_h100:4").replace("one rank", "dp32")
    assert written == f"# before\n{row}# after\n{fp8}{other}"


def test_the_command_writes_planned_rows_and_prints_those_that_change(
    tmp_path, monkeypatch, capsys
):
    changed = replace(ROWS["llama3_8b_nemo_16k"], nodes=2, layout=replace(OTHER, pp=1))
    file = tmp_path / "table.py"
    file.write_text(SOURCE)
    asked = []

    def planned_today(row):
        asked.append(row.name)
        return changed if row.name == changed.name else row

    monkeypatch.setattr(table, "__file__", str(file))
    monkeypatch.setattr(regenerate, "planned_today", planned_today)
    regenerate.main()
    assert asked == list(PLANNED)
    assert rows_of(file) == ROWS | {changed.name: changed}
    assert capsys.readouterr().out == "llama3_8b_nemo_16k: 2 x dgx_h100, tp4 hybrid2x8/16\n"
