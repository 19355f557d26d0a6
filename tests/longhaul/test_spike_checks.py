# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor spike` on run folders written out: the normal one, and each fault once."""

import json
from pathlib import Path

import pytest

from eval.results import write_json
from tests.longhaul.test_light_commands import after

STEPS, WARMUP, PEAK = 200, 20, 1e-5
FIRST_RATE = PEAK / (WARMUP + 1)
ROPE = {"method": "yarn", "base": 10_000.0, "factor": 4.0, "original_length": 2048}


def losses(*, start=5.5, level=2.2, over=30, steps=80) -> list[float]:
    """Return a loss that falls from a jump to a level, and stays."""
    return [level + max(0.0, start - level) * max(0.0, 1 - n / over) for n in range(steps)]


def folder(run: Path, name: str, values, **changes) -> None:
    """Write a stage's files; `changes` are what is wrong with it."""
    at = run / "stages" / name
    at.mkdir(parents=True)
    norms = changes.get("norms", [249.0, *[1.0] * (len(values) - 1)])
    samples = changes.get("samples", [[8 * n, 8 * n + 7] for n in range(len(values))])
    lines = [
        {"step": n + 1, "loss": loss, "lr": changes.get("rate", FIRST_RATE) * (n + 1),
         "grad_norm": norms[n], "tokens": 1000, "samples": samples[n], "seconds": 1.0}
        for n, loss in enumerate(values)
    ]  # fmt: skip
    (at / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        "trainer": {"max_steps": STEPS},
        "optim": {"config": {"lr": PEAK}, "lr_scheduler": {"warmup_ratio": WARMUP / STEPS}},
        "data": {"store": changes.get("store", "stores/one")},
        "model": {"config": {"vocab_size": 128_256}},
        "resume": {"start": None},
    }
    (at / "config.yaml").write_text(json.dumps(tree))  # JSON is YAML
    write_json(at / "stage.json", {"name": name, "seq_length": 8192, "rope": ROPE})
    checkpoint = at / "checkpoints" / "step=80"
    checkpoint.mkdir(parents=True)
    marker = {"step": 80, "max_steps": STEPS, "tokenizer": changes.get("tokenizer", "abc"),
              "rope": changes.get("rope", ROPE)}  # fmt: skip
    (checkpoint / "longhaul.json").write_text(json.dumps(marker))


def a_run(path: Path, values=None, **changes) -> Path:
    """Write a run of two stages, the second as told."""
    write_json(path / "run.json", {"ladder": "l", "card": "c", "stages": ["short", "long"]})
    folder(path, "short", losses(start=2.6))
    folder(path, "long", values or losses(), **changes)
    return path


def test_a_jump_that_comes_back_is_normal(answer, tmp_path):
    said = answer("doctor", "spike", "--run", a_run(tmp_path / "run"))
    assert said.code == 0, said.out + said.err
    assert "from 2.20 to 5.50 at the switch" in said.out
    assert "back at 2.20 by step" in said.out
    assert "at most 249 (step 1)" in said.out
    assert "of the stage's own warm-up" in said.out
    assert "nothing is wrong" in said.out
    assert "failure" not in said.out
    assert "warning" not in said.out


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"values": [2.5 + n / 40 for n in range(80)]}, "the loss rises"),
        ({"values": [3.0] * 80}, "was 2.20 before the switch"),
        ({"values": losses(start=12.0)}, "that of random weights"),
        ({"values": [*losses()[:40], None, *losses()[41:]]}, "no number at step 41"),
        ({"norms": [300.0] * 80}, "still 300"),
        ({"rate": PEAK}, "ran at rate 1e-05"),
        ({"tokenizer": "xyz"}, "the tokenizer is another"),
        ({"rope": ROPE | {"factor": 2.0}}, "the rotation's factor"),
        ({"samples": [[8 * (n % 40), 8 * (n % 40) + 7] for n in range(80)]}, "step 41 reads"),
    ],
    ids=["rising", "staying", "random", "nan", "norm", "rate", "tokenizer", "rope", "samples"],
)
def test_a_fault_is_a_failure_and_exits_1(answer, tmp_path, changes, why):
    said = answer("doctor", "spike", "--run", a_run(tmp_path / "run", **changes))
    assert said.code == 1, said.out + said.err
    assert any(why in line for line in said.out.splitlines() if line.startswith("failure")), (
        said.out
    )


def test_another_store_is_a_warning(answer, tmp_path):
    run = a_run(tmp_path / "run", [3.0] * 80, store="stores/two")
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 0, said.out
    assert "warning  the stage reads stores/two, the one before stores/one" in said.out


def test_before_the_warm_up_ends_there_is_time(answer, tmp_path):
    run = a_run(tmp_path / "run", losses(over=60, steps=20))
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 0, said.out
    assert "look again at step 50" in said.out


def test_a_later_spike_is_a_warning_with_its_step(answer, tmp_path):
    values = losses()
    values[70] += 1.5
    said = answer("doctor", "spike", "--run", a_run(tmp_path / "run", values))
    assert said.code == 0, said.out
    assert "spikes later, at step 71" in said.out


def test_ranges_that_got_worse_are_a_warning(answer, tmp_path):
    run = a_run(tmp_path / "run")
    for name, loss in (("short", 2.0), ("long", 2.4)):
        ranges = [{"start": 0, "stop": 512, "loss": loss}]
        write_json(
            run / "eval" / f"{name}.json",
            {"stage": name, "seq_length": 512, "eval_length": 512, "documents": 1, "tokens": 512,
             "ranges": ranges},
        )  # fmt: skip
    said = answer("doctor", "spike", "--run", run)
    assert "positions 0 to 512 is 0.40 nats worse" in said.out


def test_the_stage_asked_for_is_looked_at(answer, tmp_path):
    said = answer("doctor", "spike", "--run", a_run(tmp_path / "run"), "--stage", "short")
    assert said.out.startswith("short, 8,192 tokens: 80 steps\n")


def test_a_stage_that_is_not_there_has_its_nearest_name(answer, tmp_path):
    run = a_run(tmp_path / "run")
    said = answer("doctor", "spike", "--run", run, "--stage", "longer")
    assert "did you mean long?" in said.error()


def test_it_is_light(tmp_path):
    done = after("doctor", "spike", "--run", str(a_run(tmp_path / "run")))
    assert done.returncode == 0, done.stderr
