# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from recipes.nemo2.lr_schedule import SCHEDULES, WarmupCosine, WarmupLinear


def rates(steps: int, peak: float, schedule: type = WarmupCosine, **shares: float) -> list[float]:
    """Return the rate of each step, as the trainer would take them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    module = schedule(max_steps=1, **shares)
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


def test_a_final_ratio_of_one_keeps_the_peak():
    taken = rates(450, 4e-5, warmup_ratio=25 / 450, final_ratio=1.0)
    assert taken[:26] == pytest.approx([4e-5 * (step + 1) / 26 for step in range(26)])
    assert taken[26:] == pytest.approx([4e-5] * 424)


def test_a_line_falls_evenly_from_the_peak_to_the_end():
    taken = rates(10, 1.0, WarmupLinear, warmup_ratio=0.2, final_ratio=0.0)
    rising, falling = [1 / 3, 2 / 3], [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert taken == pytest.approx(rising + falling)


def test_a_line_that_is_resumed_goes_on_where_it_was():
    def line():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        module = WarmupLinear(max_steps=10, warmup_ratio=0.2, final_ratio=0.5)
        return optimizer, module.scheduler(None, optimizer)["lr_scheduler"]["scheduler"]

    optimizer, before = line()
    for _ in range(6):
        optimizer.step()
        before.step()
    again, after = line()
    again.load_state_dict(optimizer.state_dict())
    after.load_state_dict(before.state_dict())
    again.step()
    after.step()
    assert again.param_groups[0]["lr"] == pytest.approx(0.5 + 0.5 * 3 / 8)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.__name__)
def test_a_share_outside_zero_to_one_is_refused(schedule):
    with pytest.raises(ValueError, match="warmup_ratio"):
        schedule(max_steps=10, warmup_ratio=1.5, final_ratio=0.1)
