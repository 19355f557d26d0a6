# SPDX-License-Identifier: Apache-2.0
"""Series can be told apart on light and dark pages, with any common colour blindness.

The matrices are those of Machado, Oliveira and Fernandes (2009) for a severity of 1.
"""

from itertools import combinations

import numpy as np
import pytest

from eval.report.curve_names import spread
from eval.report.palette import DARK, PALETTE, SERIES

SIGHT = {
    "full": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip
TO_XYZ = np.array([
    [0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(code: str) -> np.ndarray:
    values = np.array([int(code[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(values: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(values, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("palette", [PALETTE, DARK], ids=["light", "dark"])
def test_series_differ_for_every_sight_and_contrast_with_their_page(palette):
    page = TO_XYZ[1] @ linear(palette["page"])
    for name in ("ink", "muted", *SERIES):
        levels = sorted([page, TO_XYZ[1] @ linear(palette[name])])
        assert (levels[1] + 0.05) / (levels[0] + 0.05) >= 4.5, name
    for sight, matrix in SIGHT.items():
        seen = {name: lab(matrix @ linear(palette[name])) for name in SERIES}
        for one, other in combinations(SERIES, 2):
            assert np.linalg.norm(seen[one] - seen[other]) >= 24, (sight, one, other)


def test_labels_keep_their_order_and_distance_and_stay_within_the_limits():
    heights = [6.4, 6.5, 6.45, 4.5, 4.5, 6.5, 5.0]
    placed = spread(heights, (4.4, 6.5))
    gaps = np.diff(sorted(placed))
    assert gaps.min() >= 0.055 * 2.1 - 1e-9
    assert 4.4 <= min(placed) <= max(placed) <= 6.5
    assert placed[2] > placed[0]
    assert placed[6] == pytest.approx(5.0)
