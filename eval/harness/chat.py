# SPDX-License-Identifier: Apache-2.0
"""Prompts of the harness's tasks in a tokenizer's chat template.

The question is a turn of the user, each example of few-shot a turn of the user and one of the
assistant, the task's description the system's message. Where a template refuses a message of the
system, it is put before the first turn of the user; the harness's own types leave it out.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, str]
"""A chat message: `role` and `content`."""


@cache
def tokenizer_in(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in a folder; runs no code of the folder."""
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return found


def template_sha256(folder: Path) -> str:
    """Return the SHA-256 of the chat template of the tokenizer in a folder.

    Raises:
        ValueError: if it has none, or several and none is the default.
    """
    try:
        template = tokenizer_in(folder).get_chat_template()
    except ValueError:
        raise ValueError(
            f"--chat-template: the tokenizer in {folder} has no chat template (no "
            "chat_template.jinja, and no chat_template in tokenizer_config.json, or several without"
            " a default); evaluate a base model without --chat-template"
        ) from None
    return hashlib.sha256(template.encode()).hexdigest()


def rendered(
    tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Turn], *, begin_reply: bool
) -> str:
    """Return the text of turns; `begin_reply` adds the beginning of the assistant's turn.

    Otherwise the last turn is the beginning of a reply, and is left open.

    Raises:
        ValueError: if the chat template refuses the turns.
    """
    from jinja2 import TemplateError

    refused = ""
    for messages in (turns, _without_system(turns)):
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=begin_reply,
                    continue_final_message=not begin_reply,
                )
            )
        except TemplateError as error:
            refused = refused or " ".join(str(error).split())[:200]
    raise ValueError(
        f"the tokenizer's chat template refuses the messages of a task ({refused}); evaluate it "
        "without --chat-template"
    )


def _without_system(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return the turns with a first message of the system as the beginning of the next one."""
    if len(turns) < 2 or turns[0]["role"] != "system":
        return turns
    system, first, *others = turns
    content = f"{system['content'].rstrip()}\n\n{first['content']}"
    return [{**first, "content": content}, *others]
