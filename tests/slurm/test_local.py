# SPDX-License-Identifier: Apache-2.0
import pytest

from slurm.local import local_executor


@pytest.mark.parametrize(
    ("said", "given"),
    [
        (None, "expandable_segments:True"),
        ("", "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_ranks_allocate_in_segments_that_grow_unless_the_user_says_otherwise(
    said, given, monkeypatch
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if said is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    assert local_executor(2).env_vars["PYTORCH_CUDA_ALLOC_CONF"] == given
