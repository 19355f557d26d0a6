# SPDX-License-Identifier: Apache-2.0
import importlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from data.files.whole import write_bytes
from eval.report import page as report
from eval.report import plots
from eval.run_folder import append_step, evaluation_path, load, write_json
from recipes.spec.naming import stage_folder

LENGTHS = (512, 2048, 8192)
NAMES = ("tiny_512", "tiny_2k", "tiny_8k")
ROPES = (
    {"method": "default", "base": 10000.0, "factor": 1.0},
    {"method": "default", "base": 40000.0, "factor": 1.0},
    {"method": "yarn", "base": 40000.0, "factor": 4.0, "original_length": 2048, "beta_fast": 32.0},
)
STEPS = (240, 80, 60)
TOKENS_PER_BATCH = 8192
CHANCE = math.log(10)


def make_run(run: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Write a run folder shaped like that of the tiny ladder, with plausible figures."""
    noise = np.random.default_rng(7)
    write_json(
        run / "run.json",
        {
            "ladder": "tiny",
            "card": "tiny",
            "stages": names,
            "source": "Ours: a rehearsal of length extension that fits a laptop.",
            "versions": {"python": "3.11.2", "torch": "2.13.0", "nemo_toolkit": "2.7.3"},
            "machine": {"cpus": 2, "device": "cpu"},
        },
    )
    for stage, (name, length) in enumerate(zip(names, LENGTHS, strict=True)):
        write_json(
            stage_folder(run, name) / "stage.json",
            {
                "name": name,
                "seq_length": length,
                "rope": ROPES[stage],
                "tokens": STEPS[stage] * TOKENS_PER_BATCH,
                "tokens_per_batch": TOKENS_PER_BATCH,
                "layout": {"tp": 1, "cp": 2 if stage else 1, "pp": 1, "dp": 1 if stage else 2},
                "start": names[stage - 1] if stage else "scratch",
            },
        )
        config = (
            f"model:\n  config:\n    seq_length: {length}\n    note: '<script>alert(1)</script>'\n"
        )
        write_bytes(stage_folder(run, name) / "config.yaml", config.encode())
        write_steps(run, name, stage, noise)
        write_json(evaluation_path(run, name), evaluation(name, stage, noise))
    return run


def write_steps(run: Path, name: str, stage: int, noise: np.random.Generator) -> None:
    lines = []
    for step in range(1, STEPS[stage] + 1):
        begin, end, speed = ((7.6, 5.0, 60), (5.5, 4.9, 12), (5.2, 4.8, 12))[stage]
        loss = end + (begin - end) * math.exp(-step / speed) + noise.normal(0, 0.08)
        lines.append(
            {
                "step": step,
                "loss": loss,
                "lr": 1e-3 / (1 + stage) * min(step / 10, 1 - 0.9 * step / STEPS[stage]),
                "grad_norm": 3.1,
                "tokens": TOKENS_PER_BATCH,
                "seconds": 0.8 + 0.4 * stage,
                "tokens_per_second_per_rank": 5000.0 - 1200 * stage + noise.normal(0, 100),
                "mfu": None,
                "peak_memory_bytes": int((0.9 + 0.3 * stage) * 2**30),
            }
        )
    for line in lines:
        append_step(stage_folder(run, name) / "metrics.jsonl", line)


def loss_at(position: float, stage: int) -> float:
    loss = 4.85 + 1.8 * math.exp(-position / 90) - 0.03 * math.log2(1 + position / 64)
    beyond = max(0.0, math.log2(position / (LENGTHS[stage] * 1.05)))
    return loss + (0.45, 0.4, 0.1)[stage] * beyond + 0.03 * stage


def evaluation(name: str, stage: int, noise: np.random.Generator) -> dict[str, object]:
    edges = list(range(0, 8192 + 1, 64))
    loss = [
        loss_at((a + b) / 2, stage) + noise.normal(0, 0.06) for a, b in itertools.pairwise(edges)
    ]
    ranges = []
    for start, stop in ((0, 512), (512, 2048), (2048, 8192)):
        inside = loss[start // 64 : stop // 64]
        mean = sum(inside) / len(inside)
        ranges.append({"start": start, "stop": stop, "loss": mean, "tokens": 24 * (stop - start)})
    return {
        "stage": name,
        "seq_length": LENGTHS[stage],
        "eval_length": 8192,
        "documents": 24,
        "tokens": 24 * 8192,
        "by_position": {"edges": edges, "loss": loss, "tokens": [24 * 64] * len(loss)},
        "ranges": ranges,
        "passkey": {
            "lengths": list(LENGTHS),
            "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
            "trials": 4,
            "digits": 5,
            "hits": [
                [0.25 * max(0, (stage - row) if depth > 2 else 0) for depth in range(5)]
                for row in range(3)
            ],
            "nats": [
                [2.0 - 0.3 * stage + 0.4 * row - 0.1 * depth for depth in range(5)]
                for row in range(3)
            ],
            "chance_nats": CHANCE,
        },
    }


class Page(HTMLParser):
    """Collect the tags of a page, what it loads from elsewhere, and which tags were left open."""

    VOID = frozenset({"meta", "path", "use", "rect", "circle", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href"} and value and not value.startswith("#"):
                self.loads.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self.open.pop() == tag


def built(run: Path) -> str:
    return report.build(run).read_text("utf-8")


def words(page: str) -> str:
    """Return the text of a page, spaces joined and en dashes as hyphens."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split()).replace("\N{EN DASH}", "-")


def cells(page: str) -> set[str]:
    return {each.strip() for each in re.findall(r"<td[^>]*>([^<]*)</td>", page)}


def test_report_stands_alone_and_is_well_formed(tmp_path):
    text = built(make_run(tmp_path))
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert page.tags.count("svg") == 4  # two figures, each broad and narrow
    assert "script" not in page.tags
    assert len(text.encode()) < 1_500_000


def test_every_figure_has_a_narrow_drawing_and_every_table_says_that_it_scrolls(tmp_path):
    text = built(make_run(tmp_path))
    assert text.count('<div class="narrow"><svg') == text.count('<div class="broad"><svg') == 2
    assert len(set(re.findall(r'aria-label="([^"]+)"', text))) == 2
    assert len(re.findall(r"<table[^>]*>\s*<caption", text)) == text.count("<table")
    tables = re.findall(r'<div class="wide" tabindex="0">\s*(<p class="scrolls">)?', text)
    assert len(tables) == text.count("<table")
    assert all(tables)


def test_pictures_lie_beside_the_report(tmp_path):
    run = make_run(tmp_path / "run")
    path = report.build(run, tmp_path / "elsewhere" / "page.html")
    assert path == tmp_path / "elsewhere" / "page.html"
    assert (path.parent / "page_by_position.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (path.parent / "page_by_position.svg").read_bytes()
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "page.html", "page.json", "page_by_position.png", "page_by_position.svg",
        "page_training.png", "page_training.svg",
    ]  # fmt: skip


def test_report_goes_into_a_folder_that_exists(tmp_path):
    run = make_run(tmp_path / "run")
    assert report.build(run, tmp_path) == tmp_path / "report.html"


def test_same_results_give_the_same_bytes(tmp_path):
    run = make_run(tmp_path)
    first = report.build(run).read_bytes(), (run / "by_position.svg").read_bytes()
    assert (report.build(run).read_bytes(), (run / "by_position.svg").read_bytes()) == first


def test_verdict_says_how_far_below_the_last_stage_is(tmp_path):
    run = make_run(tmp_path)
    for name, far in (("tiny_512", 5.53), ("tiny_8k", 4.91)):
        set_far_loss(run, name, far)
    assert (
        "At positions 2,048-8,192 the loss of the last stage, tiny_8k, is 4.91 nats per token, "
        "0.62 below the 5.53 of the first, tiny_512."
    ) in words(built(run))


@pytest.mark.parametrize(
    ("far", "said"),
    [(5.63, "0.10 above the 5.53 of the first"), (5.5301, "the longer context brought nothing")],
)
def test_verdict_says_when_the_last_stage_is_not_better(tmp_path, far, said):
    run = make_run(tmp_path)
    set_far_loss(run, "tiny_512", 5.53)
    set_far_loss(run, "tiny_8k", far)
    assert said in words(built(run))


def set_far_loss(run: Path, name: str, loss: float) -> None:
    changed = evaluation(name, NAMES.index(name), np.random.default_rng(7))
    changed["ranges"][-1]["loss"] = loss
    write_json(evaluation_path(run, name), changed)


def test_means_table_marks_the_lowest_of_each_column(tmp_path):
    run = make_run(tmp_path)
    set_far_loss(run, "tiny_2k", 1.25)
    table = re.search(r'<table class="best">.*?</table>', built(run), re.DOTALL).group()
    assert '<td class="marked">1.25</td>' in table
    assert table.count('class="marked"') == 3
    assert table.count("<td") == 9


def test_passkey_grid_shows_counts_and_says_when_nothing_is_retrieved(tmp_path):
    text = built(make_run(tmp_path))
    assert "Nothing is retrieved: none of 60 prompts is answered exactly" in words(text)
    assert "6 of 60 prompts are answered exactly" in words(text)
    assert {"0/4", "1/4", "2/4"} <= cells(text)


def test_tables_show_cost_and_difference_of_stages(tmp_path):
    found = cells(built(make_run(tmp_path)))
    assert "1.20 GiB" in found
    assert "1,966,080" in found
    assert "TP 1 CP 2 PP 1 DP 1" in found
    assert "yarn" in found
    assert "original_length 2,048, beta_fast 32" in found


def test_causal_mfu_is_shown_where_it_was_measured(tmp_path):
    run = make_run(tmp_path)
    assert "causal MFU" not in built(run)
    path = stage_folder(run, "tiny_8k") / "metrics.jsonl"
    for step in range(1, STEPS[2] + 1):
        append_step(path, {"step": step, "loss": 4.0, "tokens": 8192, "mfu": 0.415})
    assert "41.5%" in cells(built(run))


def test_step_without_tokens_counts_as_one_batch(tmp_path):
    run = make_run(tmp_path)
    append_step(stage_folder(run, "tiny_512") / "metrics.jsonl", {"step": 1, "loss": 7.5})
    assert "1,966,080" in cells(built(run))


def test_text_of_the_run_is_escaped(tmp_path):
    names = ("<script>", "tiny_$2k$", 'tiny"&8k')
    run = make_run(tmp_path, names)
    text = built(run)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;script&gt;" in text
    assert Page(text).open == []


def test_run_that_has_only_begun_leaves_sentences(tmp_path):
    write_json(tmp_path / "run.json", {"ladder": "tiny", "card": "tiny", "stages": list(NAMES)})
    text = words(built(tmp_path))
    for said in (
        "No stage has been evaluated yet",
        "No loss by position has been measured yet",
        "No passkey grid has been measured yet",
        "No training step has been recorded yet",
        "has not been started",
        "tiny_512 has no config.yaml",
    ):
        assert said in text
    assert not (tmp_path / "by_position.svg").exists()


def test_single_spike_does_not_squeeze_the_loss_curves(tmp_path):
    run = make_run(tmp_path)
    append_step(stage_folder(run, "tiny_2k") / "metrics.jsonl", {"step": 3, "loss": 249.0})
    figure = plots.training(load(run)[1])
    assert figure.axes[0].get_ylim()[1] < 10


def test_stage_without_evaluation_and_without_passkey_leaves_sentences(tmp_path):
    run = make_run(tmp_path)
    evaluation_path(run, "tiny_2k").unlink()
    shutil.rmtree(stage_folder(run, "tiny_8k"))
    partial = evaluation("tiny_8k", 2, np.random.default_rng(7))
    del partial["passkey"]
    write_json(evaluation_path(run, "tiny_8k"), partial)
    text = words(built(run))
    assert "Not evaluated yet: tiny_2k." in text
    assert "Evaluated without passkey prompts: tiny_8k." in text
    assert "No training steps recorded: tiny_8k." in text


def test_one_evaluated_stage_is_compared_with_nothing(tmp_path):
    run = make_run(tmp_path)
    for name in NAMES[1:]:
        evaluation_path(run, name).unlink()
    assert "Only tiny_512 has been evaluated so far" in words(built(run))


def test_diverged_loss_and_empty_bins_do_not_stop_the_report(tmp_path):
    run = make_run(tmp_path)
    for step in (59, 60):
        append_step(
            stage_folder(run, "tiny_8k") / "metrics.jsonl", {"step": step, "loss": math.nan}
        )
    broken = evaluation("tiny_8k", 2, np.random.default_rng(7))
    broken["by_position"]["loss"] = [math.nan] * 128
    broken["ranges"][-1]["loss"] = math.inf
    broken["passkey"]["nats"][0][0] = None
    write_json(evaluation_path(run, "tiny_8k"), broken)
    assert "At positions 512-2,048" in words(built(run))


def test_command_prints_the_means_and_ends_with_the_path(tmp_path):
    app = typer.Typer()
    app.command()(importlib.import_module("longhaul.commands.report").report)
    run = make_run(tmp_path)
    done = CliRunner().invoke(app, ["--run", str(run)])
    assert done.exit_code == 0
    assert "2K-8K" in done.output
    assert "tiny_8k" in done.output
    assert done.output.splitlines()[-1] == str(run / "report.html")


def test_stages_that_were_trained_one_at_a_time_have_a_report(tmp_path):
    run = make_run(tmp_path)
    (run / "run.json").unlink()
    text = words(built(run))
    assert "Stages trained one at a time: tiny_512, tiny_2k, tiny_8k" in text
    assert "At positions 2,048-8,192 the loss of the last stage, tiny_8k" in text
    assert "Model card" not in text


def test_a_stage_trained_apart_is_in_the_report_of_the_ladder(tmp_path):
    run = make_run(tmp_path)
    listed = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**listed, "stages": NAMES[:2]})
    assert "Model card tiny, ladder tiny: tiny_512 \u2192 tiny_2k \u2192 tiny_8k" in words(
        built(run)
    )


def test_report_needs_neither_torch_nor_nemo():
    code = (
        "import sys; from eval.report import page; "
        "print({'torch', 'nemo', 'megatron'} & set(sys.modules))"
    )
    root = Path(report.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
