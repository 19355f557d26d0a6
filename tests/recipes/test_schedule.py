# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from recipes.schedule import WarmupCosine


def rates(steps: int, peak: float, **shares: float) -> list[float]:
    """Return the rate of each step, as the trainer would take them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    module = WarmupCosine(max_steps=1, **shares)
    module.max_steps = steps  # the strategy sets the trainer's steps
    scheduler = module.scheduler(None, optimizer)["lr_scheduler"]["scheduler"]
    taken = []
    for _ in range(steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


@pytest.mark.parametrize(("steps", "peak"), [(20, 1e-4), (200, 4e-3)])
def test_warm_up_and_end_follow_the_peak_and_the_steps(steps, peak):
    taken = rates(steps, peak, warmup_ratio=0.1, final_ratio=0.1)
    assert max(taken) == pytest.approx(peak)
    assert taken.index(max(taken)) == steps // 10
    assert 0 < taken[0] < peak
    assert taken[-1] == pytest.approx(0.1 * peak, rel=0.1)


def test_a_share_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match="warmup_ratio"):
        WarmupCosine(max_steps=10, warmup_ratio=1.5, final_ratio=0.1)
