# SPDX-License-Identifier: Apache-2.0
"""SCROLLS (Shaham et al., 2022, arXiv 2201.03533): the names of its tasks, and their metrics.

The harness's tasks download a script of metrics from the hub and run it. This is computed here
instead, in percent, for each sample with the reference that gives most:

    f1                  of words, as SQuAD has it            Qasper, NarrativeQA
    rouge/rouge1, 2, L  F-measure of rouge_score, unstemmed  GovReport, SummScreenFD, QMSum

ContractNLI and QuALITY are multiple choice, which the harness scores by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from eval.squad_text import word_f1

NAME = "scrolls"
TASKS = tuple(
    f"{NAME}_{part}"
    for part in (
        "contractnli", "govreport", "narrativeqa", "qasper", "qmsum", "quality", "summscreenfd"
    )
)  # fmt: skip
"""What `scrolls` stands for; the harness has no name for them all."""
DOWNLOAD = "_download_metric"
"""Function of the tasks' module that downloads the script."""
ROUGE = ("rouge1", "rouge2", "rougeL")


class Metric:
    """The metrics under the names that the tasks ask for."""

    def compute(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]]
    ) -> Mapping[str, float]:
        """Return the mean of each metric over samples, in percent."""
        scorer = import_module("rouge_score.rouge_scorer").RougeScorer(ROUGE)  # of lm-eval

        def rouge(kind: str) -> Callable[[str, str], float]:
            return lambda said, answer: float(scorer.score(answer, said)[kind].fmeasure)

        metrics = {"f1": word_f1, **{f"rouge/{kind}": rouge(kind) for kind in ROUGE}}
        pairs = list(zip(predictions, references, strict=True))
        return {
            name: 100 * sum(max(metric(said, one) for one in of) for said, of in pairs) / len(pairs)
            for name, metric in metrics.items()
        }


@contextmanager
def own_metrics(config: Mapping[str, Any]) -> Iterator[None]:
    """Give a task of SCROLLS these metrics while it is loaded; others are left as they are."""
    scope = getattr(getattr(config.get("class"), "__init__", None), "__globals__", {})
    if DOWNLOAD not in scope:
        yield
        return
    own = {DOWNLOAD: lambda: NAME, "load": lambda *_, **__: Metric()}
    before = {name: scope[name] for name in own}
    scope.update(own)
    try:
        yield
    finally:
        scope.update(before)
