# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor spike` on run folders written out: the normal one, and each fault once."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from eval.run_folder import write_json
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
    numbers = changes.get("numbers", range(1, len(values) + 1))
    lines = [
        {"step": numbers[n], "loss": loss, "lr": changes.get("rate", FIRST_RATE) * (n + 1),
         "grad_norm": norms[n], "tokens": 1000, "samples": samples[n], "seconds": 1.0}
        for n, loss in enumerate(values)
    ]  # fmt: skip
    (at / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        "trainer": {"max_steps": STEPS},
        "optim": {"config": {"lr": PEAK}, "lr_scheduler": {"warmup_ratio": WARMUP / STEPS}},
        "data": {"store": changes.get("store", "stores/one")},
        "model": {"config": {"vocab_size": 128_256, "rope": changes.get("stated")}},
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
        ({"values": [*losses()[:40], None, *losses()[41:]]}, "not a number in 1 steps, first at"),
        ({"norms": [300.0] * 80}, "still 300"),
        ({"rate": PEAK}, "ran at rate 1e-05"),
        ({"tokenizer": "xyz"}, "the tokenizer differs"),
        ({"rope": ROPE | {"factor": 2.0}}, "rotation differs from the stage's: factor"),
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


@pytest.mark.parametrize(
    "left", [b"\0" * 64, b"\xff\xfe\n", b'{"step": 81, "lo\0\0\0'], ids=["NULs", "bytes", "cut"]
)
def test_bytes_that_no_run_writes_are_a_warning_with_their_line(answer, tmp_path, left):
    run = a_run(tmp_path / "run")
    with (run / "stages" / "long" / "metrics.jsonl").open("ab") as file:
        file.write(left)
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 0, said.out + said.err
    assert (
        "warning  metrics.jsonl has NULs or bytes that are not UTF-8 in 1 line, first in line 81"
        in said.out
    )


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


LONGROPE = RopeScaling(
    method="longrope", base=10_000.0, factor=4.0, original_length=2048,
    short_factor=[1.0, 1.0], long_factor=[1.0, 3.5],
)  # fmt: skip
STRETCHED = RopeScaling(
    method="yarn", base=10_000.0, factor=2.0, original_length=8192,
    before=RopeScaling(method="linear", base=10_000.0, factor=4.0, original_length=2048),
)  # fmt: skip


def tree(rope: RopeScaling) -> dict:
    """Return a rotation as config.yaml has it: every field, and what it builds."""
    nested = None if rope.before is None else tree(rope.before)
    every = {field.name: getattr(rope, field.name) for field in fields(rope)}
    return {"_target_": "custom_modules.rope.config.RopeScaling", **every, "before": nested}


@pytest.mark.parametrize(
    ("stated", "written", "name"),
    [
        (LONGROPE, replace(LONGROPE, long_factor=[1.0, 4.5]), "long_factor"),
        (STRETCHED, replace(STRETCHED, before=replace(STRETCHED.before, factor=2.0)), "before"),
        (STRETCHED, replace(STRETCHED, before=None), "before"),
        (replace(STRETCHED, before=None), STRETCHED, "before"),
        (STRETCHED, replace(STRETCHED, attention_factor=1.0), "attention_factor"),
        (replace(STRETCHED, attention_factor=1.0), STRETCHED, "attention_factor"),
    ],
    ids=["longrope", "before", "not before", "newly before", "set", "unset"],
)
def test_another_rotation_is_a_failure_whatever_field_it_differs_in(
    answer, tmp_path, stated, written, name
):
    run = a_run(tmp_path / "run", stated=tree(stated), rope=written.to_dict())
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 1, said.out
    assert f"failure  the checkpoint's rotation differs from the stage's: {name}" in said.out


@pytest.mark.parametrize("rope", [LONGROPE, STRETCHED], ids=["longrope", "before"])
def test_the_same_rotation_is_ok_as_a_tree_and_as_a_marker(answer, tmp_path, rope):
    run = a_run(tmp_path / "run", stated=tree(rope), rope=json.loads(json.dumps(rope.to_dict())))
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 0, said.out
    assert "the checkpoint has the stage's rotation" in said.out


def resumed(*, at: int, from_sample: int) -> dict:
    """Return the lines of 10 steps of 8 samples, and of a resume that goes on to step 80."""
    steps = [*range(1, 11), *range(at, 81)]
    firsts = [8 * n for n in range(10)] + [from_sample + 8 * n for n in range(81 - at)]
    return {
        "values": (losses()[:10] + losses()[at - 1 :]),
        "numbers": steps,
        "samples": [[first, first + 7] for first in firsts],
    }


def test_a_resume_that_goes_back_reads_the_same_samples_for_the_same_steps(answer, tmp_path):
    run = a_run(tmp_path / "run", **resumed(at=6, from_sample=40))
    said = answer("doctor", "spike", "--run", run)
    assert "each step reads the samples after those of the step before" in said.out
    assert "samples that earlier steps have read" not in said.out


@pytest.mark.parametrize(
    ("at", "from_sample", "why"),
    [
        (6, 0, "step 6 reads samples that earlier steps have read: it begins at 0 instead of 40"),
        (6, 80, "step 6 skips 40 samples: it begins at 80 instead of 40"),
        (11, 0, "step 11 reads samples that earlier steps have read: it begins at 0 instead of 80"),
        (11, 96, "step 11 skips 16 samples: it begins at 96 instead of 80"),
        (13, 72, "step 13 reads samples that earlier steps have read"),
    ],
    ids=["back from 0", "back ahead", "on from 0", "on ahead", "after cut lines"],
)
def test_a_resume_that_reads_twice_or_skips_is_a_failure(answer, tmp_path, at, from_sample, why):
    run = a_run(tmp_path / "run", **resumed(at=at, from_sample=from_sample))
    said = answer("doctor", "spike", "--run", run)
    assert said.code == 1, said.out
    assert f"failure  {why}" in said.out


def test_lines_cut_between_two_steps_are_no_fault(answer, tmp_path):
    run = a_run(tmp_path / "run", **resumed(at=13, from_sample=96))
    said = answer("doctor", "spike", "--run", run)
    assert "each step reads the samples after" in said.out


def test_a_slow_divergence_is_a_failure(answer, tmp_path):
    values = [*losses(steps=60), *(2.2 + 0.02 * n for n in range(300))]
    said = answer("doctor", "spike", "--run", a_run(tmp_path / "run", values))
    assert said.code == 1
    assert "the loss diverges: it rises from 2.2" in said.out
    assert "needs no action" not in said.out


def test_a_large_norm_long_after_the_switch_is_shown_with_its_step(answer, tmp_path):
    norms = [249.0, *[1.0] * 199]
    norms[119] = 80.0
    run = a_run(tmp_path / "run", losses(steps=200), norms=norms)
    said = answer("doctor", "spike", "--run", run)
    assert "the gradient norm is 80 at step 120, long after the switch" in said.out
