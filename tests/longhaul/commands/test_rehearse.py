# SPDX-License-Identifier: Apache-2.0
"""`longhaul rehearse`: a recipe of each ladder runs green through NeMo on a few gloo ranks."""

import json
from operator import attrgetter
from pathlib import Path

import pytest

from recipes.shipped.table import ROWS
from tests.longhaul.support.rehearsed_rows import (
    line,
    losses,
    of_the_suite,
    ranks_for,
    rehearsed_rows,
    smallest_rows,
    structure,
)
from tests.recipes.support.rows_to_rehearse import ROWS_TO_REHEARSE

LOSSES = {
    "llama3_8b_longrecipe_128k": [(6.264, 5.354), (5.408, 4.987)],
    "llama3_8b_prolong_64k": [(6.311, 5.451), (5.389, 4.965)],
    "olmo3_8k_32b_olmo3_32b_64k": [(6.341, 5.362), (5.325, 4.873)],
    "qwen25_7b_qwen25_1m_64k": [(6.276, 5.238), (5.131, 4.825)],
    "smollm3_4k_3b_smollm3_32k": [(6.352, 5.280), (5.209, 4.817)],
    "tiny_512": [(6.384, 4.611), (4.682, 4.254)],
}
"""First and last loss of both stages, on two cores with torch 2.13."""
TOLERANCE = 0.02
"""Relative: the text and the seeds are the same everywhere, the order of sums is not."""


@pytest.fixture(scope="session")
def made_up_store(tmp_path_factory) -> Path:
    from data.synthetic import prepare_made_up
    from recipes.rehearsal.shrink import VOCAB

    store = tmp_path_factory.mktemp("stores") / "rehearsal"
    prepare_made_up(store, vocab_size=VOCAB)
    return store


@pytest.fixture
def rehearse(answer, made_up_store, tmp_path):
    """Return a function that rehearses in the test's folder, the text there already."""
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "rehearsal").symlink_to(made_up_store)
    return lambda *words: answer("rehearse", *words)


def require_green(code: int, shown: str, said: str, run: Path) -> None:
    """Assert that every line of the verdict is ok; show what the ranks wrote if not."""
    log = run / "output.log"
    assert code == 0, shown + said + (log.read_text()[-4000:] if log.exists() else "")
    lines = [line for line in shown.splitlines() if line.startswith(("ok  ", "FAIL"))]
    assert len(lines) == 11
    assert not any(line.startswith("FAIL") for line in lines)


@pytest.mark.slow
@pytest.mark.nightly  # tiny_2k is rehearsed below, with overrides
@pytest.mark.parametrize("row", of_the_suite(), ids=lambda row: row.name)
def test_a_recipe_of_the_ladder_is_rehearsed_with_its_losses(rehearse, tmp_path, monkeypatch, row):
    monkeypatch.setitem(ROWS, row.name, row)  # a shorter one is no row of the collection
    code, shown, said = rehearse(row.name, "--ranks", ranks_for(row))
    run = tmp_path / "runs" / "rehearsals" / row.name
    require_green(code, shown, said, run)
    stages = losses(run)
    assert len(stages) == 2
    for seen, expected in zip(stages, LOSSES.get(row.name, stages), strict=True):
        assert seen == pytest.approx(expected, rel=TOLERANCE)


def test_a_rehearsal_of_each_ladder_and_family_has_a_line(tmp_path):
    rows = rehearsed_rows()
    for kind in ("ladder.name", "card.family"):
        of = attrgetter(kind)
        assert set(map(of, rows)) == set(map(of, ROWS.values()))
    assert line("tiny_512", tmp_path) == "FAIL  tiny_512: it did not end"
    checks = [
        {"holds": True, "words": "tiny_256: loss 6.384 to 4.611 in 6 steps, falling"},
        {"holds": True, "words": "tiny_1k: loss 4.682 to 4.254 in 6 steps, falling"},
    ]
    record = {"checks": checks, "seconds": 32.7}
    (tmp_path / "rehearsal.json").write_text(json.dumps(record))
    assert line("tiny_512", tmp_path) == (
        "ok    tiny_512: 2 checks, loss 6.384 to 4.611, then 4.682 to 4.254, 33 s"
    )
    checks[1]["holds"] = False
    (tmp_path / "rehearsal.json").write_text(json.dumps(record))
    assert line("tiny_512", tmp_path) == f"FAIL  tiny_512: {checks[1]['words']}"


def test_every_structure_of_the_ladders_is_rehearsed():
    ladders = smallest_rows()
    rehearsed = of_the_suite()
    assert set().union(*map(structure, rehearsed)) == set().union(*map(structure, ladders))
    for row in rehearsed:  # none is left that the others make superfluous
        others = [structure(other) for other in rehearsed if other is not row]
        assert structure(row) - set().union(*others), row.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", pytest.param("experts", marks=pytest.mark.nightly)])
def test_a_structure_that_no_shipped_recipe_has_is_rehearsed(rehearse, tmp_path, monkeypatch, name):
    row = ROWS_TO_REHEARSE[name]
    monkeypatch.setitem(ROWS, row.name, row)
    run = tmp_path / "there"
    code, shown, said = rehearse(row.name, "--ranks", ranks_for(row), "--out", run)
    require_green(code, shown, said, run)
    record = json.loads((run / "rehearsal.json").read_text())
    assert record["recipe"] == row.name
    assert {what for what, _, _ in record["compared"]} >= {"tokens", "TP", "CP", "PP", "DP"}


@pytest.mark.slow
@pytest.mark.nightly  # a probe, in the file of that name, takes a combination of one's own
def test_a_combination_that_no_row_has_is_rehearsed(rehearse, made_up_store, tmp_path):
    asked = ("--card", "llama32_3b", "--ladder", "nemo", "--stage", "64K")
    code, shown, said = rehearse(
        *asked, "trainer.max_steps=4", "--ranks", 2, "--store", made_up_store
    )
    run = tmp_path / "runs" / "rehearsals" / "llama32_3b_nemo_64k"
    require_green(code, shown, said, run)
    assert json.loads((run / "rehearsal.json").read_text())["recipe"] == "llama32_3b_nemo_64k"


def test_overrides_apply_to_both_small_stages(rehearse, tmp_path):
    run = tmp_path / "runs" / "rehearsals" / "tiny_2k"
    code, shown, said = rehearse(
        "tiny_2k", "--ranks", 2, "optim.config.lr=4e-3", "trainer.max_steps=2"
    )
    require_green(code, shown, said, run)
    assert "tiny_1k  2/2" in said
    assert "2/2" not in shown  # progress is no result
    for stage in ("tiny_256", "tiny_1k"):
        lines = (run / "stages" / stage / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 2
        assert json.loads(lines[0])["lr"] == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny_3k",), "did you mean tiny_"),
        (("tiny_2k", "--ranks", 65), "--ranks is 65; one machine rehearses on at most 64"),
        (("tiny_2k", "--store", "nowhere"), "there is no store at nowhere"),
        (("tiny_2k", "trainer.max_stpes=2"), "did you mean trainer.max_steps"),
        (("tiny_2k", "log.name=other"), "use --out and --store"),
        (("tiny_2k", "log.ckpt.dirpath=other"), "use --out and --store"),
        (("tiny_2k", "--out", "stores"), "stores exists and is not a rehearsal"),
        ((), "name one recipe: a shipped one by its NAME, any other by --card, --ladder and"),
        (("tiny_2k", "--card", "card.yaml"), "name one recipe: a shipped one by its NAME"),
        (
            ("tiny_2k", "--nodes", "2"),
            "--nodes, --gpus, --layout and --cluster apply only to --card; tiny_2k has",
        ),
        (("--card", "llama32_1b", "--ladder", "prolon"), "did you mean prolong?"),
        (
            ("--card", "llama32_1b", "--ladder", "gene_64k"),
            "ladder gene_64k cannot train llama32_1b at 16K: its rotation has 64 divisors",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_cannot_be_rehearsed_is_one_sentence(rehearse, words, said):
    assert said in rehearse(*words).error()


def test_a_refused_rehearsal_leaves_nothing_and_an_earlier_one_as_it_was(rehearse, tmp_path):
    words = ("tiny_2k", "trainer.max_stpes=2")
    assert "did you mean" in rehearse(*words).error()
    assert not (tmp_path / "runs").exists()
    earlier = tmp_path / "runs" / "rehearsals" / "tiny_2k"
    earlier.mkdir(parents=True)
    (earlier / "rehearsal.json").write_text("{}")
    (earlier / "output.log").write_text("of before")
    assert "did you mean" in rehearse(*words).error()
    assert sorted(path.name for path in earlier.iterdir()) == ["output.log", "rehearsal.json"]
    assert (earlier / "output.log").read_text() == "of before"


@pytest.mark.parametrize("ranks", [0, -1])
def test_less_than_a_rank_is_refused(rehearse, ranks):
    code, _, said = rehearse("tiny_2k", "--ranks", ranks)
    assert code == 2
    assert "--ranks" in said


def test_a_rank_that_fails_ends_the_command_with_its_error(rehearse):
    code, shown, said = rehearse("tiny_2k", "--ranks", 2, "optim.config.optimizer=adamax")
    assert code == 1
    assert "error: rank" in said
    assert "adamax" in said
    assert "the output of its ranks is in" in said
    assert not any(line.startswith("ok  ") for line in shown.splitlines())
