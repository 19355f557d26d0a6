# SPDX-License-Identifier: Apache-2.0
"""Public suites that a ladder runs: before its first stage, and after each stage."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """Tasks of lm-evaluation-harness, as `longhaul evaluate --suite` takes them."""

    tasks: tuple[str, ...]
    """Tasks or groups by name."""
    lengths: tuple[int, ...] = ()
    """Lengths of the prompts that tasks make; empty for the contexts of the stages. A model is
    evaluated at those that it was trained for."""
    limit: int | None = None
    """Samples of each task, at most; None for all."""
    include: str = ""
    """Folder of task files of one's own; empty for none."""

    def __post_init__(self) -> None:
        """Raise ValueError for no tasks, and for lengths and limits below one; lists get tuples."""
        for name in ("tasks", "lengths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.tasks or not all(self.tasks):
            raise ValueError("suites has an entry without tasks; name at least one, such as mmlu")
        if any("," in task for task in self.tasks):
            raise ValueError(f"suites has tasks {list(self.tasks)}; write each as one of the list")
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"suites has lengths {list(self.lengths)}; they must be positive")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"suites has limit {self.limit}; it must be at least 1, or left out")
