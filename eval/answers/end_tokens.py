# SPDX-License-Identifier: Apache-2.0
"""The tokens that end a generation, besides the tokenizer's end-of-sequence token.

    of the model      `eos_token_id` of its generation_config.json, one id or a list
    of the template   what the chat template writes after a turn of the assistant

A chat model ends its turn by a token that need not end a sequence: `<end_of_turn>` (Gemma),
`<|end|>` (Phi-3). That of the template counts for prompts that the template wrote.

Nothing here imports torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
REPLY = "reply-of-the-assistant"
"""Content of the assistant's turn by which the end of a turn is found."""


@dataclass(frozen=True)
class EndTokens:
    """Ids of tokens that end a generation, in rising order, without the tokenizer's own."""

    of_model: tuple[int, ...] = ()
    of_template: tuple[int, ...] = ()

    def after(self, *, by_template: bool) -> tuple[int, ...]:
        """Return those that count after a prompt; `by_template` if a chat template wrote it."""
        return tuple(sorted({*self.of_model, *(self.of_template if by_template else ())}))


def end_tokens(tokenizer: "PreTrainedTokenizerBase", folder: Path | None) -> EndTokens:
    """Return the end tokens of a model with this tokenizer.

    Args:
        folder: with the model's generation_config.json; None, or a folder without one, if the
            tokenizer alone is known.
    """
    own = {tokenizer.eos_token_id}
    of_model = () if folder is None else _of_model(folder / GENERATION_CONFIG)
    turn = end_of_turn(tokenizer)
    return EndTokens(
        of_model=tuple(sorted({*of_model} - own)),
        of_template=() if turn is None else tuple({turn} - own),
    )


def end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that a chat template writes after a turn of the assistant.

    None if there is no template, and if it writes text there that is not a token of its own.
    """
    if not tokenizer.chat_template:
        return None
    from jinja2 import TemplateError

    turns = [("user", "a"), ("assistant", REPLY), ("user", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, ValueError):  # it refuses such turns, or none of several is the default
        return None
    after = text.partition(REPLY)[2].lstrip()
    found = [
        (len(token.content), at)
        for at, token in tokenizer.added_tokens_decoder.items()
        if token.content and after.startswith(token.content)
    ]
    return max(found)[1] if found else None


def _of_model(file: Path) -> Sequence[int]:
    if not file.is_file():
        return ()
    try:
        stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if not all(type(each) is int and each >= 0 for each in ids):
            raise TypeError(f"eos_token_id is {stated}; expected an id or a list of ids")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} does not state the model's end tokens ({reason})") from None
    return ids
