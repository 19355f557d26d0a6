# SPDX-License-Identifier: Apache-2.0
import pytest

from data.mixture.config import Mix, OtherLength, Share


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Share(source="web", weight=-1), "weight of source web is -1"),
        (lambda: Share(source="web", weight=1, at_least=3000), "such as 4,096"),
        (lambda: Share(source="web", weight=1, at_least=64, below=64), "which are none"),
        (lambda: Mix(packing="worst"), "'best_fit' or 'cut'"),
        (lambda: Mix(shares=[Share(source="web", weight=0)]), "all weights of the mix are 0"),
        (lambda: Mix(shares=[Share(source="a", weight=1, end_weight=0)]), "end at 0"),
        (
            lambda: Mix(
                shares=[Share(source="a", weight=1), Share(source="a", weight=1, at_least=16)]
            ),
            "documents in common, a and a from 16",
        ),
        (lambda: Mix(ramp_from=1.5), "ramp_from is 1.5"),
        (
            lambda: Mix(ramp_from=1, shares=[Share(source="a", weight=1, end_weight=2)]),
            "no end_weight is reached",
        ),
        (lambda: Mix(long_from=1000), "long_from is 1,000; it is a power of two"),
        (lambda: Mix(most_repeats=0.5), "most_repeats is 0.5"),
        (lambda: Mix(documents_per_row=0), "documents_per_row is 0"),
        (lambda: Mix(documents_per_row=4, packing="cut"), "no effect on packing 'cut'"),
        (lambda: Mix(overlap=3, packing="cut"), "only best_fit has one"),
        (lambda: Mix(other_lengths=[OtherLength(seq_length=8, steps=1.5)]), "less than 1"),
    ],
)
def test_what_a_mix_cannot_have_is_said(build, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (Mix(other_lengths=[OtherLength(seq_length=100, steps=0.1)]), "not a whole part"),
        (Mix(other_lengths=[OtherLength(seq_length=512, steps=0.1)]), "not a whole part"),
        (Mix(overlap=512), "overlap is 512, not less than 512"),
        (Mix(overlap=64, other_lengths=[OtherLength(seq_length=64, steps=0.1)]), "less than 64"),
        (Mix(other_lengths=[OtherLength(seq_length=64, steps=0.1)] * 2), "state each once"),
    ],
)
def test_lengths_that_do_not_fit_the_stage_are_said(mix: Mix, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mix.lengths(512)
