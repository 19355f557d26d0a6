# SPDX-License-Identifier: Apache-2.0
"""The data module on a store of several sources, and work that rank 0 does first."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from data.adoption.adopt import adopt
from data.adoption.checks import HeldOut
from data.adoption.pairs import Named
from data.mixture.config import Mix
from data.mixture.dataset import MixedDataset
from data.nemo_module import NumberedDataset, StoreDataModule, _validation, on_first_rank
from data.store import Manifest, StoreError
from data.token_files import cached_order
from data.token_files.held_out import long_documents
from tests.data.adoption.conftest import write_pair
from tests.data.payload import Payload
from tests.ranks import run_ranks

LENGTH = 64


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, shared_store: Manifest) -> Manifest:
    named = [
        Named(path=shared_store.prefixes(split)[0], name=name)
        for split, name in (("train", "many"), ("heldout", "few"))
    ]
    out = tmp_path_factory.mktemp("several sources") / "store"
    tokenizer = str(shared_store.tokenizer_path)
    return adopt(named, out, tokenizer=tokenizer, heldout=HeldOut(documents=2))


@pytest.mark.parametrize("mix", [None, Mix(long_from=32, long_share=0.7)], ids=["none", "mix"])
def test_a_store_of_several_sources_has_samples_to_train_and_to_validate_on(
    several: Manifest, megatron_rank: None, mix: Mix | None
) -> None:
    module = StoreDataModule(str(several.root), LENGTH, 1, 4, documents="within", mix=mix)
    module.build(
        trainer_max_steps=40, trainer_val_check_interval=4, trainer_limit_val_batches=3,
        trainer_limit_test_batches=0,
    )  # fmt: skip
    assert isinstance(module._train_ds, MixedDataset)
    assert len(module._train_ds) == 160
    assert len(module._validation_ds) >= 11 * 3 * 4  # repeated, as one source would be
    assert module._validation_ds[0]["tokens"].shape == (LENGTH,)
    assert module.step_facts(3)["work_max_over_mean"] == 1


def test_no_file_of_a_blend_is_read_or_written(
    several: Manifest, megatron_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, ran = Path(shutil.copytree(several.root, tmp_path / "store")), tmp_path / "ran"
    module = StoreDataModule(str(store), LENGTH, 1, 4)

    def samples() -> list[list[int]]:
        module.build(40, 4, 3, 0)
        assert module._validation_ds is not None
        return [module._validation_ds[at]["tokens"].tolist() for at in range(8)]

    def by_megatron() -> None:
        config = module.gpt_dataset_config
        config.blend_per_split = [None, config.blend_per_split[1], None]
        config.path_to_cache = str(store / "index")
        BlendedMegatronDatasetBuilder(
            NumberedDataset, [0, len(module._validation_ds), 0], lambda: True, config
        ).build()

    before = samples()
    assert cached_order.NOT_SAVED not in caplog.text
    assert not list((store / "index").glob("*Blend*"))
    by_megatron()
    files = list((store / "index").glob("*-BlendedDataset-valid-dataset*_index.npy"))
    assert len(files) == 2
    for path in files:
        path.write_bytes(pickle.dumps(Payload(ran)))
    assert samples() == before
    assert not ran.exists()
    with pytest.raises(pickle.UnpicklingError):  # the second's folder is there: both have run
        by_megatron()
    assert ran.is_dir()


def test_a_source_of_three_pairs_has_the_samples_of_one_pair_in_megatron_s_order(
    shared_store: Manifest, megatron_rank: None, tmp_path: Path
) -> None:
    documents = [
        [ids.tolist()] for ids in long_documents(shared_store, min_tokens=1, split="train")
    ]
    write_pair(tmp_path / "one" / "a", documents)
    for name, some in zip("abc", (documents[:1], documents[1:50], documents[50:]), strict=True):
        write_pair(tmp_path / "three" / name, some)
    samples = []
    for pairs in ("one", "three"):
        manifest = adopt(
            [Named(path=tmp_path / pairs, name="web")], tmp_path / f"store of {pairs}",
            tokenizer=str(shared_store.tokenizer_path), heldout=HeldOut(documents=9),
        )  # fmt: skip
        module = StoreDataModule(str(manifest.root), LENGTH, 1, 4)
        module.build(
            trainer_max_steps=5, trainer_val_check_interval=5, trainer_limit_val_batches=1,
            trainer_limit_test_batches=0,
        )  # fmt: skip
        assert isinstance(module._train_ds, NumberedDataset)
        samples.append(
            [of_split[at]["tokens"].tolist() for of_split, many in
             ((module._train_ds, 20), (module._validation_ds, 4)) for at in range(many)]
        )  # fmt: skip
    assert samples[0] == samples[1]


def test_a_source_with_less_than_a_sequence_held_out_is_not_validated_on(
    several: Manifest,
) -> None:
    many, few = several.heldout.parts
    both = _validation(several, 1)
    assert both[::2] == [str(many.tokens), str(few.tokens)]
    shorter, longer = sorted((many, few), key=lambda part: part.tokens)
    assert shorter.tokens < longer.tokens
    assert _validation(several, shorter.tokens) == [str(several.root / longer.prefix)]
    with pytest.raises(StoreError, match=r"no source of the store .* held-out tokens"):
        _validation(several, longer.tokens)


def test_positions_need_a_store_of_one_source(several: Manifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 sources and the stage draws positions"):
        StoreDataModule(str(several.root), LENGTH, 1, 4, positions=lambda tokens, _: tokens)


def _first(folder: str, fails: bool) -> str:
    def work() -> str:
        made = Path(folder) / "made"
        if dist.get_rank() == 0:
            if fails:
                raise StoreError("the disk is full")
            made.write_text("by rank 0")
        return made.read_text()

    try:
        return on_first_rank(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_other_ranks_find_what_rank_0_has_made(tmp_path: Path) -> None:
    assert run_ranks(_first, 2, str(tmp_path), False) == ["by rank 0"] * 2


def test_a_failure_of_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(_first, 2, str(tmp_path), True) == [
        "StoreError: the disk is full",
        "RuntimeError: rank 0 has failed: StoreError: the disk is full",
    ]
