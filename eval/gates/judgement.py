# SPDX-License-Identifier: Apache-2.0
"""One threshold of a gate, the measured value, and how sure it is that the threshold is met.

The measured value decides. If the threshold is outside of its 95% interval, it is met or not met;
otherwise there are too few documents, prompts or samples to tell.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.run_folder import write_json
from eval.uncertainty import documents_to_tell, interval_width
from recipes.spec.gate import GateShutError

log = logging.getLogger(__name__)

MET, NOT_MET = "met", "not met"
FEW_DOCUMENTS, FEW_PROMPTS = "too few documents to tell", "too few prompts to tell"
FEW_SAMPLES = "too few samples to tell"


@dataclass(frozen=True)
class Judgement:
    """One threshold, and the measured value.

    Args:
        passed: Whether the measured value is within the threshold.
        state: `met`, `not met`, or too few documents, prompts or samples to tell.
        standard_error: Of the measured value, over documents or samples; NaN if it is not known.
        counted: Documents, prompts or samples that were measured.
        would_do: How many would tell, if too few were measured and that can be estimated.
    """

    name: str
    measured: float
    allowed: float
    passed: bool
    said: str
    state: str = NOT_MET
    standard_error: float = math.nan
    counted: int = 0
    would_do: int | None = None

    @property
    def undecided(self) -> bool:
        """Whether the threshold is within the interval of the measured value."""
        return self.state in (FEW_DOCUMENTS, FEW_PROMPTS, FEW_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measured value with its standard error over what was counted; NaN if it is not known."""

    value: float
    error: float
    counted: int
    few: str
    """State if too few were counted."""

    @property
    def spread(self) -> str:
        """The standard error as text; empty if it is not known."""
        return f" +- {self.error:.3f}" if math.isfinite(self.error) else ""

    def judged(self, name: str, threshold: float, said: str, *, least: bool = False) -> Judgement:
        """Return the judgement of a value that must be at most, or at `least`, a threshold.

        The verdict is added to the sentence.
        """
        beyond = threshold - self.value if least else self.value - threshold
        passed, would_do = beyond <= 0, None
        sure = abs(beyond) >= interval_width(self.counted) * self.error
        if math.isfinite(self.value) and not sure:
            state, would_do = self.few, documents_to_tell(beyond, self.error, self.counted)
        else:
            state = MET if passed else NOT_MET
        sentence = f"{said}: {verdict(state, self.counted, would_do)}"
        return Judgement(
            name, self.value, threshold, passed, sentence, state,
            self.error, self.counted, would_do,
        )  # fmt: skip


def unmeasured(name: str, allowed: float, said: str) -> Judgement:
    """Return the judgement of a threshold whose value was not measured: it is not met."""
    return Judgement(name, math.nan, allowed, False, said)


def pass_judgements(
    path: Path, stage: str, asked: Mapping[str, Any], judgements: Sequence[Judgement]
) -> None:
    """Write the judgements of a stage; raise GateShutError if the next stage must not start.

    `asked` is what the file states of the thresholds.
    """
    failed = [each for each in judgements if not each.passed]
    write_json(path, {"stage": stage, "open": not failed, **asked, "judgements": judgements})
    for each in judgements:
        if each.undecided and each.passed:
            log.warning("the gate after %s opens, but %s: %s", stage, each.name, each.said)
    if failed:
        said = "; ".join(f"{each.name}: {each.said}" for each in failed)
        raise GateShutError(f"the gate after {stage} is shut: {said}")


def verdict(state: str, count: int, would_do: int | None) -> str:
    """Return a state as the end of a sentence, with how many were measured and how many would do.

    Without a count, the losses of single documents are not known.
    """
    if state in (MET, NOT_MET):
        return state
    if not count:
        return f"{state}, since the evaluation does not state the loss of each on the same ones"
    enough = "" if would_do is None else f", about {would_do:,} are needed"
    return f"{state} ({count:,} measured{enough})"
