# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal checks is refused where the run folder says otherwise than was planned."""

import json
import math
from pathlib import Path

import pytest

from longhaul.rehearsal.checks import WEIGHT_SUMS, Planned, verdict

ROPE = {"method": "default", "base": 10_000.0}
BEFORE = Planned(
    name="one_64", seq_length=64, steps=4, tokens_per_step=128, first_rate=1e-3, rope=ROPE,
    layout={"tp": 1, "cp": 2, "pp": 1, "dp": 1},
)  # fmt: skip
AFTER = Planned(
    name="one_128", seq_length=128, steps=3, tokens_per_step=256, first_rate=5e-4, rope=ROPE,
    layout={"tp": 2, "cp": 1, "pp": 1, "dp": 1},
)  # fmt: skip
LOSSES = {"one_64": [6.0, 5.0, 4.5, 4.0], "one_128": [4.1, 3.9, 3.8]}
SUMS = {"layer.0": [1.5, 20.0], "norm": [64.0, 64.0]}


def write(run: Path) -> Path:
    """Write what a rehearsal leaves where all is well."""
    for stage, start, end in ((BEFORE, {"norm": [0.0, 1.0]}, SUMS), (AFTER, SUMS, SUMS)):
        folder = run / "stages" / stage.name
        checkpoint = folder / "checkpoints" / f"step={stage.steps}"
        checkpoint.mkdir(parents=True)
        facts = {
            "step": stage.steps, "max_steps": stage.steps, "tokenizer": "f",
            "seq_length": stage.seq_length, "rope": ROPE,
        }  # fmt: skip
        (checkpoint / "longhaul.json").write_text(json.dumps(facts))
        lines = [
            {"step": step, "loss": loss, "lr": stage.first_rate, "tokens": stage.tokens_per_step}
            for step, loss in enumerate(LOSSES[stage.name], start=1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / WEIGHT_SUMS).write_text(json.dumps({"start": start, "end": end}))
    for stage, loss in ((BEFORE, 4.2), (AFTER, 3.9)):
        write_evaluation(run, stage.name, loss)
    return run


def write_evaluation(run: Path, name: str, loss: float) -> None:
    content = {
        "stage": name, "seq_length": 64, "eval_length": 128, "documents": 1, "tokens": 128,
        "by_position": {"edges": [0, 64, 128], "loss": [loss, loss], "tokens": [64, 64]},
    }  # fmt: skip
    path = run / "eval" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def change(run: Path, path: str, change) -> None:
    """Change the JSON of a file, or of each of its lines."""
    file = run / path
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def failed(run: Path) -> list[str]:
    return [check.words for check in verdict(run, (BEFORE, AFTER)) if not check.holds]


def test_all_holds_and_each_line_says_what_was_seen(tmp_path):
    checks = verdict(write(tmp_path), (BEFORE, AFTER))
    assert all(check.holds for check in checks)
    words = "\n".join(check.words for check in checks)
    for said in (
        "one_64: loss 6.000 to 4.000 in 4 steps, falling",
        "one_128: 256 tokens a step over all ranks, of 256",
        "2 of 2 weights arrived as they were, written under CP2, loaded under TP2",
        "held-out loss by position 4.200 after one_64, 3.900 after one_128",
    ):
        assert said in words


@pytest.mark.parametrize(
    ("path", "changed", "said"),
    [
        ("stages/one_64/metrics.jsonl", {"loss": math.nan}, "not finite"),
        ("stages/one_64/metrics.jsonl", {"loss": 5.0}, "not falling"),
        ("stages/one_128/metrics.jsonl", {"lr": 1e-3}, "the first step ran at rate 0.001"),
        ("stages/one_64/metrics.jsonl", {"tokens": 64}, "64 tokens a step over all ranks, of 128"),
        ("stages/one_128/metrics.jsonl", {"step": 1}, "1 steps were taken of 3"),
        ("stages/one_64/checkpoints/step=4/longhaul.json", {"step": 2}, "has step 2 instead of 4"),
        ("stages/one_128/checkpoints/step=3/longhaul.json", {"rope": {}}, "has rope {} instead of"),
        ("stages/one_128/weight_sums.json", {"start": {"norm": [64.0, 64.0]}}, "not layer.0"),
        (
            "stages/one_128/weight_sums.json",
            {"start": SUMS | {"norm": [64.001, 64.0]}},
            "1 of 2 weights arrived",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_from_the_plan_fails_in_its_line(tmp_path, path, changed, said):
    change(write(tmp_path), path, lambda content: {**content, **changed})
    assert any(said in words for words in failed(tmp_path)), failed(tmp_path)


def test_a_second_stage_that_goes_on_from_random_weights_fails(tmp_path):
    """The weights arrived, and the optimizer put back its own copy after the first step."""
    write(tmp_path)
    later = iter([4.1, 6.2, 6.1])
    path = "stages/one_128/metrics.jsonl"
    change(tmp_path, path, lambda line: {**line, "loss": next(later)})
    assert any("begins at 4.100 and continues at 6.150" in words for words in failed(tmp_path))


def test_a_stage_whose_marker_is_damaged_fails_in_its_line(tmp_path):
    marker = write(tmp_path) / "stages/one_64/checkpoints/step=4/longhaul.json"
    marker.write_text("{")
    (words,) = failed(tmp_path)
    assert words.startswith(f"one_64: {marker} is damaged")


def test_a_stage_without_a_checkpoint_sums_or_evaluation_fails(tmp_path):
    write(tmp_path)
    (tmp_path / "stages/one_64/checkpoints/step=4/longhaul.json").unlink()
    (tmp_path / "stages/one_128" / WEIGHT_SUMS).unlink()
    (tmp_path / "eval/one_128.json").unlink()
    assert failed(tmp_path) == [
        "one_64: there is no complete checkpoint",
        "hand-over: a stage has left no sums of its weights",
        "evaluation: a stage has no finite held-out loss",
    ]


def test_trained_weights_may_stay_level_within_the_noise_of_their_batches(tmp_path):
    write(tmp_path)
    path = "stages/one_128/metrics.jsonl"
    losses = iter([4.0, 4.0, 4.3])
    change(tmp_path, path, lambda line: {**line, "loss": next(losses)})
    assert failed(tmp_path) == []
    change(tmp_path, path, lambda line: {**line, "loss": 3.0 + line["step"]})
    assert failed(tmp_path) == ["one_128: loss 4.000 to 6.000 in 3 steps, not falling"]


def test_a_held_out_loss_that_rises_fails(tmp_path):
    write_evaluation(write(tmp_path), "one_128", 4.3)
    assert any("4.300 after one_128" in words for words in failed(tmp_path))
