# SPDX-License-Identifier: Apache-2.0
"""Judge the scores of a stage on RULER's samples by the thresholds of its gate.

    RUN/eval/<stage>.ruler.gate.json    whether the stage passed, and a sentence for each threshold

A score whose samples are each 0 or 1 has Wilson's interval, any other that of its standard error
(`eval.ruler.scoring`). Thresholds and judgements are shares of 1.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from eval.gates.judgement import (
    FEW_SAMPLES,
    MET,
    NOT_MET,
    Judgement,
    Measure,
    pass_judgements,
    unmeasured,
    verdict,
)
from eval.ruler.scoring import Average, Score, Scores
from eval.run_folder import evaluation_path
from eval.uncertainty import prompts_to_tell, share_interval
from recipes.spec.gate import MEAN


def pass_scores(run: Path, stage: str, least: Mapping[str, float], scores: Scores) -> None:
    """Judge the scores of a stage; raise GateShutError if the next stage must not start."""
    path = evaluation_path(run, stage).with_suffix(".ruler.gate.json")
    pass_judgements(path, stage, {"least": dict(least)}, list(judge(least, scores)))


def judge(least: Mapping[str, float], scores: Scores) -> Iterator[Judgement]:
    """Yield the judgement of each threshold, of a task or of the mean, as shares of 1."""
    tasks = {row.task: row for row in scores.scores}
    for name, bound in least.items():
        if name == MEAN:
            [mean] = scores.averages
            yield _mean(bound, mean, sum(row.samples for row in scores.scores))
        elif name in tasks:
            yield _task(bound, tasks[name])
        else:
            yield unmeasured(f"ruler {name}", bound, f"there are no samples of {name}")


def _mean(least: float, mean: Average, samples: int) -> Judgement:
    """Judge an average by its standard error, that of independent tasks."""
    error = math.nan if mean.standard_error is None else mean.standard_error / 100
    measure = Measure(value=mean.score / 100, error=error, counted=samples, few=FEW_SAMPLES)
    said = (
        f"mean score {measure.value:.3f}{measure.spread} of {mean.tasks} tasks at "
        f"{mean.length:,} tokens over {samples:,} samples, at least {least:g} required"
    )
    return measure.judged(f"ruler {MEAN}", least, said, least=True)


def _task(least: float, row: Score) -> Judgement:
    """Judge the score of a task by its interval."""
    value, low, high = row.score / 100, row.low / 100, row.high / 100
    error = math.nan if row.standard_error is None else row.standard_error / 100
    measure = Measure(value=value, error=error, counted=row.samples, few=FEW_SAMPLES)
    said = (
        f"score {value:.3f}{measure.spread} of {row.task} at {row.length:,} tokens over "
        f"{row.samples:,} samples, at least {least:g} required"
    )
    wilson = share_interval(round(value * row.samples), row.samples)
    if not (math.isclose(low, wilson[0], abs_tol=1e-9) and math.isclose(high, wilson[1])):
        return measure.judged(f"ruler {row.task}", least, said, least=True)
    would_do = None
    if low >= least or (least == 1 and value == 1):  # no number of samples shows more
        state = MET
    elif high < least:
        state = NOT_MET
    else:
        state, would_do = FEW_SAMPLES, prompts_to_tell(value, least)
    sentence = f"{said}: {verdict(state, row.samples, would_do)}"
    return Judgement(
        f"ruler {row.task}", value, least, value >= least, sentence, state, error, row.samples,
        would_do,
    )  # fmt: skip
