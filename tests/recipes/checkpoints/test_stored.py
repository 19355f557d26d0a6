# SPDX-License-Identifier: Apache-2.0
"""What is read of stored checkpoints without loading them."""

import pytest
import torch

from recipes.checkpoints.stored import require_optimizer


def test_only_a_checkpoint_with_the_state_of_an_optimizer_is_one_to_carry_it_over_from(tmp_path):
    import torch.distributed.checkpoint as dcp

    for name, state in (("import", {}), ("trained", {"optimizer.state.exp_avg": torch.zeros(2)})):
        dcp.save(
            {"module.weight": torch.zeros(2), **state},
            checkpoint_id=tmp_path / name / "weights",
            no_dist=True,
        )
    require_optimizer(tmp_path / "trained")
    with pytest.raises(ValueError, match="import has no state of an optimizer to carry over"):
        require_optimizer(tmp_path / "import")
    (tmp_path / "trained" / "weights" / ".metadata").unlink()
    with pytest.raises(ValueError, match="trained has no state of an optimizer to carry over"):
        require_optimizer(tmp_path / "trained")
