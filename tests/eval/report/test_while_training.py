# SPDX-License-Identifier: Apache-2.0
"""The report's section on what was measured while stages trained."""

import json

from eval.report.while_training import panels_of, while_training
from eval.run_folder import load
from recipes.spec.naming import stage_folder
from tests.eval.report.test_page import built, cells, make_run, words


def evaluate_at(run, name, steps):
    """Add an evaluation to the lines of these steps."""
    metrics = stage_folder(run, name) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if (step := line["step"]) in steps:
            line |= {
                "heldout_loss": 5 - step / 100,
                "heldout_by_quarter": [5.0 - step / 100 + at for at in (0.3, 0.1, -0.1, -0.3)],
                "heldout_by_length": {"512": 4.0 + step, "64": 6.0},
                "passkey_nats": 2.5,
                "evaluation_seconds": 0.8,
            }
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_has_the_course_of_each_stage_that_was_evaluated(tmp_path):
    run = make_run(tmp_path)
    assert while_training(load(run)[1]) is None
    evaluate_at(run, "tiny_2k", (20, 40, 60))
    stages = load(run)[1]
    quarters, lengths, passkey = panels_of([step for step in stages[1].steps if step.is_evaluated])
    assert quarters[3] == ("4 of 4", [5.0 - step / 100 - 0.3 for step in (20, 40, 60)])
    assert lengths == [("64", [6.0, 6.0, 6.0]), ("512", [24.0, 44.0, 64.0])]
    assert passkey == [("", [2.5, 2.5, 2.5])]
    page = built(run)
    assert "While training" in words(page)
    assert 'aria-label="tiny_2k while it trained, by step' in page
    assert "tiny_512 while it trained" not in page
    share = f"{3 * 0.8 / (80 * 1.2):.2%}"  # a step of this stage takes 1.2 s
    assert {"60", "4.400", "2.50", share} <= set(cells(page))
