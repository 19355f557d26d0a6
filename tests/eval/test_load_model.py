# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one rank is the same model in pipeline stages, even and uneven ones."""

from pathlib import Path
from typing import NamedTuple

import pytest
from megatron.core import parallel_state

from custom_modules.cpu.backend import cpu_backend
from tests.ranks import Ranks, one_rank
from tests.recipes.hugging_face.support.models import VOCAB, folder
from tests.recipes.hugging_face.support.stages import untrained
from tests.recipes.hugging_face.test_parity import imported
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS

pytestmark = pytest.mark.slow

LENGTH, LAYERS, RANKS = 96, 6, 4
STAGES = {2: [3, 3], 4: [1, 2, 2, 1]}


class Loaded(NamedTuple):
    """What a rank found of a model."""

    nats: list[float]
    """Loss of each token."""
    parameters: int
    layers: int
    """Layers of this rank."""
    stage: int


def loaded(folders: dict[str, str], sizes: list[int]) -> dict[tuple[str, int], Loaded]:
    """Load the models of stages under each PP."""
    from eval.answers.generation import next_tokens
    from eval.load_model import load
    from eval.model_facts import parameters_of

    tokens = [(7 * at + at**2) % VOCAB for at in range(LENGTH)]
    found = {}
    with cpu_backend(force=True):
        for pp in sizes:
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
            for name, folder in folders.items():
                model = load(Path(folder), seq_length=LENGTH)
                found[name, pp] = Loaded(
                    next_tokens(model, tokens, 0, LENGTH - 1).nats.tolist(),
                    parameters_of(model),
                    len(model.decoder.layers),
                    parallel_state.get_pipeline_model_parallel_rank(),
                )
            parallel_state.destroy_model_parallel()
    return found


def require_stages(folder: str, pp: int) -> None:
    """Raise ValueError if a stage cannot be evaluated under a PP, as `longhaul evaluate` does."""
    from longhaul.jobs.evaluation import require_layout

    run, name = Path(folder).parents[1], Path(folder).name
    require_layout(run, [name], ranks=pp, tp=1, cp=1, pp=pp, length=LENGTH, device="cpu")


def test_a_checkpoint_is_the_same_model_in_even_and_uneven_stages(tmp_path):
    folders = {}
    for name in ("llama", "llama, tied"):
        to = tmp_path / name
        card = imported(folder(to / "published", name, num_hidden_layers=LAYERS), to / "imported")
        folders[name] = str(untrained(to / "imported", card, card.native_rope, to / "run"))
    with one_rank():
        alone = loaded(folders, [1])
    assert alone["llama", 1].parameters > alone["llama, tied", 1].parameters
    with Ranks(loaded, RANKS, folders, list(STAGES), server=NEMO) as ranks:
        found = ranks.results(TIMEOUT_SECONDS)
    for (name, pp), of_rank in ((key, rank[key]) for rank in found for key in rank):
        expected = alone[name, 1]
        assert of_rank.nats == pytest.approx(expected.nats, rel=1e-5)
        assert of_rank.parameters == expected.parameters
        assert of_rank.layers == STAGES[pp][of_rank.stage]
        require_stages(folders[name], pp)
    said = (
        "6 layers are not divisible by PP 5, nor are 8 with embedding and LM head as a layer each"
    )
    with pytest.raises(ValueError, match=f"{said}; PP may be 1, 2, 3, 4 or 6"):
        require_stages(folders["llama"], 5)
