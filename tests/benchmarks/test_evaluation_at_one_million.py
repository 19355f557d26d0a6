# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a million tokens, at a small length and a part of the model."""

import re

import pytest

from tests.benchmarks.test_benchmarks_run import page_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_two_ranks_tell_the_losses_and_the_passkey_of_one_at_any_part_of_the_model(tmp_path):
    small = ["evaluation_at_one_million", "--length", "512", "--layers", "1", "--heads", "2"]
    small += ["--depths", "0.5", "--timeout", "9"]
    two = page_of(*small, out=tmp_path / "two.md")
    one = page_of(
        *small, "--ranks", "1", "--most-gib", "0.1",
        out=tmp_path / "one.md", status=1, error=r"GiB resident, 0\.1 claimed",
    )  # fmt: skip
    said = r"(1 layer of its 4, 2 heads of its 4) .* quarters: ([\d., ]+)\. Passkeys: (.*) nats"
    layers, losses, passkeys = re.search(said, two).groups()
    assert re.search(said, one).groups() == (layers, losses, passkeys)
    assert losses.count(",") == 3
    assert [row[0] for row in rows_of(two, ["rank", "loss s"])] == ["0", "1", "all"]
