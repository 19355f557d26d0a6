# SPDX-License-Identifier: Apache-2.0
"""`longhaul import`: convert a Hugging Face checkpoint to one that a stage starts from."""

import math
from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import NativeContext, NoVerify, stated_at
from longhaul.terminal.console import loading
from longhaul.terminal.messages import next_command, note
from recipes.spec.naming import length_shown
from recipes.spec.suggest import lookup


def import_model(
    source: Annotated[
        str, typer.Option("--from", help="Hugging Face folder, or a name on its hub.")
    ],
    card: Annotated[
        str | None, typer.Option(help="The model card that it must match, such as llama31_8b.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="models/CARD or /NAME")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub.")
    ] = None,
    native_context: NativeContext = "",
    no_verify: NoVerify = False,
) -> None:
    """Import published weights, bit for bit, with their config and tokenizer."""
    from data.files.appearing import require_free
    from data.hub import OF_THE_HUB
    from recipes.hugging_face.checksums import unverified
    from recipes.hugging_face.config import card_of, read_config, require_same, require_weights
    from recipes.hugging_face.hub import FETCHED, local_folder
    from recipes.hugging_face.safetensors_files import BYTES, stored_tensors
    from recipes.models import CARDS
    from recipes.spec.naming import MODELS

    if card is not None:
        lookup("card", card, CARDS)
    if Path(source).is_dir():
        name = Path(source).resolve().name
    else:
        source = source.removeprefix(OF_THE_HUB) or source
        name = Path(source).name
    to = to or MODELS / (card or name)
    require_free(to)
    config = read_config(local_folder(source, revision, weights=False))
    found = stated_at(card_of(config, name), native_context)
    for words in found.notes:
        note(f"note: {words}")
    if card is not None:
        require_same(CARDS[card], found, f"the model of {source}")
    folder = local_folder(source, revision, weights=True)
    read = ("*",) if Path(source).is_dir() else FETCHED
    if why := unverified(folder, verify=not no_verify, patterns=read):
        note(f"note: {why}")
    stored = stored_tensors(folder)
    require_weights(found, stored)
    require_free(to, room=sum(BYTES[one.dtype] * math.prod(one.shape) for one in stored.values()))
    with loading("Megatron-Core"):
        from recipes.hugging_face.import_ import write_checkpoint
    note(f"importing {len(stored):,} tensors of the model family {found.family}")
    write_checkpoint(to, folder, found, stored, origin=source)
    typer.echo(to)
    if card is not None:
        next_command(["longhaul", "recipes", "--cards", card], "list the ladders for it")
    else:
        new = ["longhaul", "ladders", "new", "ladder.yaml", "--card", to, "--seq"]
        longer = length_shown(2 * found.native_context).replace(",", "")
        next_command([*new, longer], "write a ladder of your own for it")
