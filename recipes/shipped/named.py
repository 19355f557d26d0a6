# SPDX-License-Identifier: Apache-2.0
"""Cards and ladders by the words of a command: a shipped name, or a folder or file of one's own."""

import re
from dataclasses import replace
from pathlib import Path

from data.files.nearest import near_path
from data.hub import OF_THE_HUB
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.rotation import for_card
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_from
from recipes.spec.stage import Ladder
from recipes.spec.suggest import list_of, lookup

FILES = (".yaml", ".yml", ".py")
"""Ends of the names of ladder files."""
OF_FILES = (*FILES, ".json", ".gguf", ".safetensors", ".nemo")
"""Ends of names that nobody gives a folder, which is what a card of one's own is."""


def card_named(word: str) -> ModelCard:
    """Return the card of a shipped name, of an import, of a Hugging Face folder or of `hf:NAME`.

    Raises ValueError for anything else, and for a model that Longhaul does not support.
    """
    if not word:
        raise ValueError(f"--card is missing; {list_of(CARDS, 'card')}")
    if word in CARDS:
        return CARDS[word]
    from recipes.checkpoints.files import HUGGING_FACE

    if word.startswith(OF_THE_HUB):
        from recipes.hugging_face.hub import local_folder

        hf_id = word.removeprefix(OF_THE_HUB)
        if not hf_id:
            raise ValueError(f"card {word} names no model; write hf:OWNER/NAME")
        folder = local_folder(hf_id, None, weights=False)
        card = _card(folder, hf_id.rpartition("/")[2], hf_id, word)
        return _unlike_shipped(replace(card, path=word), word)
    folder = Path(word)
    if folder.is_file():
        raise ValueError(
            f"card {word} is a file; name the folder of an import or of a Hugging Face model"
        )
    if not folder.is_dir():
        if "/" in word or word.startswith("."):
            raise ValueError(
                f"card {word}: there is no such folder{near_path(folder)}; name an import, a "
                "Hugging Face folder, hf:NAME, or a card that `longhaul recipes --cards` lists"
            )
        if folder.suffix in OF_FILES:
            raise ValueError(
                f"card {word}: there is no such file, and a card is a folder: that of an import or "
                "of a Hugging Face model"
            )
        return lookup("card", word, CARDS)
    imported = folder / HUGGING_FACE
    origin = imported if imported.is_dir() else folder
    card = _card(origin, folder.resolve().name, str(origin), word)
    card = replace(card, path=word, start=word if imported.is_dir() else "")
    return _unlike_shipped(card, word)


def _card(folder: Path, name: str, hf_id: str, word: str) -> ModelCard:
    """Return the card of a Hugging Face folder; raise ValueError, with the word that named it."""
    from recipes.hugging_face.source_checkpoint import card_in

    try:
        return card_in(folder, _name(name), hf_id)
    except ValueError as error:
        raise ValueError(f"card {word}: {error}") from None


def _name(word: str) -> str:
    """Return the name of a card: letters, digits, dots and underscores of its folder's name."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "_", word).strip("_.").lower()
    if not name:
        raise ValueError(f"a card's name is of letters and digits; rename the folder {word!r}")
    return name


def _unlike_shipped(card: ModelCard, word: str) -> ModelCard:
    """Return a user's card; raise ValueError if a shipped card of its name is another model."""
    if card.name not in CARDS:
        return card
    from recipes.hugging_face.config import require_same

    shipped = CARDS[card.name]
    try:
        require_same(shipped, card, f"the model of {word}")
    except ValueError as error:
        raise ValueError(
            f"card {word} has the name of the shipped card {shipped.name} and is another model "
            f"({error}); rename its folder"
        ) from None
    return replace(shipped, path=card.path, start=card.start)


def ladder_named(word: str, card: ModelCard | None = None) -> Ladder:
    """Return the ladder of a shipped name or of a file; a file may leave rotations to the card.

    Raises ValueError for anything else, and for a file that is not a ladder.
    """
    if not word:
        raise ValueError(f"--ladder is missing; {list_of(LADDERS, 'ladder')}")
    if word in LADDERS or not (word.endswith(FILES) or "/" in word or Path(word).exists()):
        return lookup("ladder", word, LADDERS)
    from recipes.notation import ladder_file  # here: it imports pydantic

    ladder = ladder_file.read(Path(word), card)
    if ladder.name in LADDERS:
        raise ValueError(
            f"{word}: name is {ladder.name!r}, which is a shipped ladder; choose another name"
        )
    return replace(ladder, path=word)


def cards_of(word: str) -> tuple[str, ...]:
    """Return the cards that a ladder is for, by its shipped name or its file."""
    if word in LADDERS or not word.endswith(FILES):
        return ladder_named(word).cards
    from recipes.notation import ladder_file  # here: it imports pydantic

    return ladder_file.cards(Path(word))


def combined(card: str, ladder: str, stage: str = "") -> tuple[ModelCard, Ladder, list[str]]:
    """Return card and ladder of two words, with rotations for the card, and notes on them.

    The card has the native context that the ladder states. With a stage, by its length, only the
    rotation of that one has to suit.
    """
    model = card_named(card)
    found = ladder_named(ladder, model)
    model = model.trained_at(found.native_context)
    climbed, said = for_card(found, model, length_from(stage) if stage else 0)
    return model, climbed, [*model.notes, *said]
