# SPDX-License-Identifier: Apache-2.0
"""Claims of the blocks on a GPU: none is made beside a peer that was not measured."""

import pytest

from benchmarks.gpu_blocks import Measured, bytes_claim, time_claim

OURS = Measured(seconds=1.0, extra_bytes=10)
SLOWER = Measured(seconds=2.0, extra_bytes=400)
OUT = Measured(reason="out of memory")


def test_a_claim_is_the_ratio_to_the_peer():
    assert bytes_claim(OURS, SLOWER, 1 / 20) == "Of bytes: 0.025; the claim of 0.05 holds."
    assert time_claim("time", SLOWER, OURS, 1.05) == "Of time: 2.000; the claim of 1.05 is missed."


@pytest.mark.parametrize(("ours", "peer"), [(OURS, OUT), (OUT, SLOWER)])
def test_no_claim_is_made_beside_a_peer_without_a_measurement(ours, peer):
    for said in (bytes_claim(ours, peer, 1 / 20), time_claim("time", ours, peer, 1.05)):
        assert said.endswith("no claim, since one of the two was not measured (out of memory).")
