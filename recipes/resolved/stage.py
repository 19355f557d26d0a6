# SPDX-License-Identifier: Apache-2.0
"""A stage as it will run: its resolved recipe, and the facts that are read back out of it once.

Commands resolve a recipe (overrides, device, places) and pass this value on; jobs, records and
pages take layout, folders and plan from here. The recipe must not change any more.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import nemo_run as run

from recipes.checkpoints.marker import is_finished, steps_taken
from recipes.planner.plan import Plan
from recipes.planner.search.request import SearchRequest
from recipes.resolved.read import (
    folder_of,
    layout_of,
    step_log,
    tokens_per_batch,
    trained_length,
)
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard


@dataclass(frozen=True, kw_only=True)
class ResolvedStage:
    """One stage: recipe, layout, folders and, on a cluster, its plan."""

    recipe: run.Partial
    """`llm.pretrain` with all its arguments, overridden, checked, paths absolute."""
    layout: Layout
    plan: Plan | None = None
    """Memory and time on the cluster that it is submitted to; None for CPU ranks."""
    evaluate_every: int | None = None
    """Steps between evaluations while it trains (0: by their own time); None: none are made."""
    alert: str = ""
    """Command that is called for each finding about its health; empty: none is."""
    profile: str | None = None
    """Words of --profile: the steps that are profiled, and how; None: none are."""
    debug_comm: bool = False
    """Whether its ranks log their communication into its folder."""
    track: tuple[str, ...] = ()
    """Trackers that its metrics are sent to (`recipes.spec.trackers`)."""

    @classmethod
    def of(cls, recipe: run.Partial) -> "ResolvedStage":
        """Return the stage of a recipe that is not going to be changed any more."""
        return cls(recipe=recipe, layout=layout_of(recipe))

    def planned(self, card: ModelCard, machines: Cluster | None) -> "ResolvedStage":
        """Return the stage with its plan on a cluster; CPU ranks have none."""
        if self.layout.device == "cpu" or machines is None:
            return self
        question = SearchRequest(
            card=card,
            seq_length=self.seq_length,
            tokens_per_batch=self.tokens_per_batch,
            cluster=machines,
            gpus=self.layout.world_size,
            fp8=self.layout.fp8,
        )
        return replace(self, plan=question.plan(self.layout))

    @property
    def name(self) -> str:
        """Name of the recipe, the stage's folder and its job."""
        return str(self.recipe.log.name)

    @property
    def seq_length(self) -> int:
        """Tokens of a training sequence."""
        return int(self.recipe.data.seq_length)

    @cached_property
    def trained_length(self) -> int:
        """Context that the stage trains for, in tokens; skips make it exceed `seq_length`."""
        return trained_length(self.recipe)

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one optimizer step."""
        return tokens_per_batch(self.recipe)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole stage."""
        return int(self.recipe.trainer.max_steps)

    @property
    def nodes(self) -> int:
        """Nodes that its ranks are spread over."""
        return int(self.recipe.trainer.num_nodes)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each of them."""
        return int(self.recipe.trainer.devices)

    @cached_property
    def folder(self) -> Path:
        """Folder that the stage writes to."""
        return folder_of(self.recipe)

    @property
    def metrics(self) -> Path:
        """File that the stage writes a line a step to."""
        return Path(step_log(self.recipe).path)

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return Path(self.recipe.resume.resume_from_directory)

    @property
    def steps_taken(self) -> int:
        """Steps of its newest complete checkpoint, 0 without one."""
        return steps_taken(self.checkpoints)

    @property
    def is_done(self) -> bool:
        """Whether the stage has all its steps."""
        return is_finished(self.checkpoints, self.steps)
