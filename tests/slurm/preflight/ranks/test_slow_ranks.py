# SPDX-License-Identifier: Apache-2.0
"""Who meets whom, what bandwidths mean, and who is blamed, by numbers written out."""

import random
from statistics import median

import pytest

from slurm.preflight.check import PreflightCheck
from slurm.preflight.ranks.clocks import clock_check
from slurm.preflight.ranks.slow_ranks import allowed, bus_share, slower, speed_checks
from slurm.preflight.ranks.timings import schedule, tournament
from slurm.preflight.requirements import Bandwidth, Expected

H100 = Bandwidth(nvlink_gbps=450, network_gbps=50)


def test_a_tournament_of_four_has_three_rounds_in_which_all_meet():
    assert tournament([0, 1, 2, 3]) == [
        [(0, 3), (1, 2)],
        [(0, 2), (1, 3)],
        [(0, 1), (2, 3)],
    ]


def test_a_tournament_may_end_early():
    assert tournament(range(9), 3) == tournament(range(9))[:3]


def test_of_three_one_waits_in_each_round():
    assert [len(pairs) for pairs in tournament([0, 1, 2])] == [1, 1, 1]
    assert {pair for pairs in tournament([0, 1, 2]) for pair in pairs} == {(0, 1), (0, 2), (1, 2)}


def test_ranks_meet_inside_their_node_and_across_at_the_same_place():
    inside, across = schedule(["a", "a", "b", "b"])
    assert inside == [{0: 1, 1: 0, 2: 3, 3: 2}]
    assert across == [{0: 2, 2: 0, 1: 3, 3: 1}]


def test_a_node_with_fewer_ranks_plays_with_those_it_has():
    inside, across = schedule(["a", "a", "b"])
    assert inside == [{0: 1, 1: 0}]
    assert across == [{0: 2, 2: 0}]


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_share("all-reduce", 8) == pytest.approx(1.75)
    assert bus_share("all-to-all", 8) == pytest.approx(0.875)
    assert bus_share("ring", 8) == 1


def test_the_links_allow_what_the_slowest_way_does():
    assert allowed("all-reduce", H100, 8, 8) == 450
    assert allowed("all-reduce", H100, 32, 8) == 400
    assert allowed("all-to-all", H100, 32, 8) == pytest.approx(50 * 31 / 24)
    assert allowed("ring", H100, 32, 8) == 50


def job(ranks: int, *, pair: dict[tuple[int, int], float] | None = None, **own: float):
    """Return times of ranks on one node; `pair` are those of links, `own` of products by rank."""
    links = pair or {}
    return [
        {
            "product": own.get(f"r{rank}", 1.0),
            "copy": 1.0,
            "inside": {
                str(other): links.get((min(rank, other), max(rank, other)), 1.0)
                for other in range(ranks)
                if other != rank
            },
            "across": {},
            "collectives": {"all-reduce": 0.001},
            "message": 10**8,
        }
        for rank in range(ranks)
    ]


def judged(times, hosts=None, **expected) -> dict[str, PreflightCheck]:
    checks = speed_checks(Expected(**expected), hosts or ["n0"] * len(times), times)
    return {check.name: check for check in checks}


def test_a_rank_whose_every_link_is_slow_is_blamed_and_its_partners_are_not():
    found = judged(job(4, pair={(0, 2): 3.0, (1, 2): 3.0, (2, 3): 3.0}))
    blamed = found["slow rank (links in its node)"]
    assert blamed.state == "failure"
    assert blamed.said == "rank 2 on n0 takes 3.0 times as long as the median rank"


def test_one_slow_link_between_healthy_ranks_is_named_as_a_link():
    found = judged(job(4, pair={(1, 3): 2.5}))
    assert found["slow link (links in its node)"].said.startswith(
        "the link of rank 1 on n0 and rank 3 on n0 takes 2.5 times"
    )


def test_a_rank_that_computes_a_little_slower_is_a_warning():
    found = judged(job(8, r5=1.4))["slow rank (compute)"]
    assert (found.state, found.said[:11]) == ("warning", "rank 5 on n")


def test_half_of_the_ranks_slow_is_seen_although_the_median_moves():
    found = judged(job(4, r2=4.0, r3=4.0))["slow rank (compute)"]
    assert found.state == "failure"
    assert "rank 2" in found.said
    assert "rank 3" in found.said


@pytest.mark.parametrize(
    ("nvlink", "state"), [(150, "ok"), (250, "warning"), (450, "failure"), (None, "ok")]
)
def test_a_collective_is_held_to_what_the_links_allow(nvlink, state):
    links = None if nvlink is None else Bandwidth(nvlink_gbps=nvlink, network_gbps=50)
    found = judged(job(4), bandwidth=links)["all-reduce"]  # 100 GB/s, 150 on the bus
    assert found.state == state
    assert found.said.startswith("150 GB/s bus, 100 GB/s algorithm, 4 ranks")


def test_a_failure_names_the_nodes_of_the_ranks_that_fail_and_not_of_those_that_are_warned_of():
    hosts = ["n0", "n0", "n1", "n1", "n2", "n2"]
    found = judged(job(6, r3=3.0, r4=1.5), hosts)["slow rank (compute)"]
    assert (found.state, found.nodes) == ("failure", ("n1",))
    warned = judged(job(6, r4=1.5), hosts)["slow rank (compute)"]
    assert (warned.state, warned.nodes) == ("warning", ("n2",))


def test_a_slow_link_names_the_nodes_of_both_ends():
    hosts = ["n0", "n1", "n2", "n3"]
    found = judged(job(4, pair={(1, 3): 2.5}), hosts)["slow link (links in its node)"]
    assert (found.state, found.nodes) == ("failure", ("n1", "n3"))


@pytest.mark.parametrize(
    ("ahead", "nodes"),
    [
        ({"n0": 0, "n1": 0.1, "n2": 7}, ("n2",)),
        ({"n0": 0, "n1": 7, "n2": 7.1}, ("n0",)),
        ({"n0": 0, "n1": 7}, ("n0", "n1")),
    ],
    ids=["one", "rank 0's", "one of two"],
)
def test_a_wrong_clock_is_of_the_node_that_is_far_from_the_others(ahead, nodes):
    (check,) = clock_check({host: (float(one), 0.01) for host, one in ahead.items()}, 1.0)
    assert (check.state, check.nodes) == ("failure", nodes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_a_rank_is_compared_with_the_median_of_the_others(count):
    drawn = random.Random(count)
    for _ in range(50):
        times = {rank: float(drawn.randint(1, 6)) for rank in range(count)}
        plainly = {}
        for rank, took in times.items():
            others = [other for one, other in times.items() if one != rank]
            if others and took >= 1.5 * median(others):
                plainly[rank] = took / median(others)
        assert slower(times, 1.5) == plainly
