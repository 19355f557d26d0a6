# SPDX-License-Identifier: Apache-2.0
"""Find the token types that a longer context helps most, and write them to the store's folder.

    torchrun --nproc-per-node N -m eval.loss.impactful_tokens STORE BEFORE AFTER --length 16384

BEFORE and AFTER are folders of two stages of one model: before and after a short extension of its
context (RUN/stages/NAME). Both score the same windows of `length` tokens, one per document.
LongRecipe keeps sentences with the types whose total log-probability grew most
(`data.train_short.impactful_tokens` has the formula). One model is in memory at a time.
"""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from data.store import Manifest, SplitName, require_tokenizer
from data.token_files.held_out import long_documents, with_first
from data.train_short.impactful_tokens import ImpactfulTokens, add_changes, highest
from eval import load_model
from eval.distributed import parallel_ranks
from eval.loss.loss_by_position import token_losses
from recipes.checkpoints.marker import checkpoint_facts, newest_checkpoint


def analyse(
    store: str,
    before: str,
    after: str,
    *,
    length: int,
    documents: int = 24,
    share: float = 0.2,
    split: SplitName = "train",
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
) -> None:
    """Write `impactful_tokens.json` of a store; runs on every rank of a torchrun job.

    `share` is the share of the occurring types that are impactful. Raises ValueError if the split
    has no document of `length` + 1 tokens or a stage has no complete checkpoint, and StoreError if
    one was trained with another tokenizer than the store's.
    """
    manifest = Manifest.load(store)
    for stage in (before, after):
        require_trained(Path(stage), manifest)
    with parallel_ranks(tensor_parallel, context_parallel, device):
        windows = windows_of(manifest, split, length=length, documents=documents)
        place = torch.device("cuda", torch.cuda.current_device())
        sums, counts = torch.zeros(2, manifest.tokenizer.vocab_size, dtype=torch.float64).to(place)
        first = losses_of(Path(before), windows, bf16=device == "cuda")
        second = losses_of(Path(after), windows, bf16=device == "cuda")
        for (tokens, old), (_, new) in zip(first, second, strict=True):
            add_changes(sums, counts, tokens.to(place), (old - new).to(place))
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(counts, group=group)
        if dist.get_rank() == 0:
            ImpactfulTokens(
                tokens=tuple(highest(sums.cpu(), counts.cpu(), share)),
                share=share,
                split=split,
                sha256=manifest.split(split).sha256,
                before=checkpoint_name(Path(before)),
                after=checkpoint_name(Path(after)),
                places=int(counts.sum()),
            ).write(manifest.root)


def require_trained(stage: Path, manifest: Manifest) -> None:
    """Raise ValueError unless the stage has a checkpoint, trained with the store's tokenizer."""
    newest = newest_checkpoint(stage / "checkpoints")
    facts = None if newest is None else checkpoint_facts(newest)
    if facts is None:
        raise ValueError(f"{stage} has no complete checkpoint; train the stage first")
    require_tokenizer(manifest, facts, of=f"{stage} was trained with")


def windows_of(
    manifest: Manifest, split: SplitName, *, length: int, documents: int
) -> list[Tensor]:
    """Return a window [1, length + 1] of each of the first long documents, with random start."""
    starts = np.random.default_rng(0)
    texts = islice(long_documents(manifest, min_tokens=length + 1, split=split), documents)
    windows = []
    for text in texts:
        start = starts.integers(0, len(text) - length)
        window = with_first(text, start, length + 1, manifest.first_tokens)
        windows.append(torch.from_numpy(window[None]))
    if not windows:
        raise ValueError(
            f"{manifest.root} has no document of {length + 1:,} tokens in its {split} split; take "
            "a shorter length"
        )
    return windows


def losses_of(stage: Path, windows: Sequence[Tensor], *, bf16: bool) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and their losses, each [n], of this rank's shards of its windows, on the CPU.

    Windows are distributed over data ranks.
    """
    length = windows[0].shape[1] - 1
    model = load_model.load(stage, seq_length=length, bf16=bf16)
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for window in windows[rank::size]:
        losses, positions = token_losses(model, window.to(device))
        at = positions.flatten().cpu() + 1  # the loss at a position is that of the next token
        found.append((window[0, at], losses.flatten().cpu()))
    return found


def checkpoint_name(stage: Path) -> str:
    """Return the name of a stage's newest checkpoint: recipe and step."""
    newest = newest_checkpoint(stage / "checkpoints")
    assert newest is not None  # it has been loaded
    return f"{stage.resolve().name} {newest.name}"


def main() -> None:
    """Read the command line and analyse."""
    parser = argparse.ArgumentParser(prog="eval.loss.impactful_tokens", description=__doc__)
    for name in ("store", "before", "after"):
        parser.add_argument(name)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    analyse(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
