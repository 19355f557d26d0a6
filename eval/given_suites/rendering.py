# SPDX-License-Identifier: Apache-2.0
"""Chat messages as the text of one prompt.

With a chat template, that of the tokenizer, with the beginning of the assistant's turn. Where a
template refuses two messages in a row of the same role, such messages are joined by an empty line.
Without one (base models):

    User:
    <message>

    Assistant:
    <message>

    User:
    <message>

    Assistant:
    <the answer follows here, without a blank before it>
"""

import hashlib
import json
from itertools import groupby
from typing import TYPE_CHECKING

from eval.given_suites.row import Message
from eval.ruler.length import RulerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}


class Rendering:
    """How a tokenizer's prompts are written."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Find the chat template and the special tokens."""
        self._tokenizer = tokenizer
        self.by_template = bool(tokenizer.chat_template)
        self.joined = 0
        """Prompts whose messages had to be joined."""
        self._special = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]

    @property
    def sha256(self) -> dict[str, str]:
        """Sum of the chat template by the words "chat template"; empty without one."""
        if not self.by_template:
            return {}
        text = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        return {"chat template": hashlib.sha256(text.encode()).hexdigest()}

    def special_token_in(self, messages: list[Message]) -> bool:
        """Return whether a template's special token is written out in a message."""
        return self.by_template and any(
            token in message["content"] for message in messages for token in self._special
        )

    def prompt(self, messages: list[Message]) -> str:
        """Return the text of a prompt.

        Raises:
            RulerError: if the chat template refuses the messages.
        """
        if not self.by_template:
            turns = [f"{SPEAKERS[one['role']]}:\n{one['content']}\n\n" for one in messages]
            return "".join(turns) + f"{SPEAKERS['assistant']}:\n"
        from jinja2 import TemplateError

        try:
            return self._by_template(messages)
        except TemplateError:
            pass
        try:
            text = self._by_template(_joined(messages))
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise RulerError(
                f"the tokenizer's chat template refuses the messages of a prompt ({reason}); "
                "remove the template from a copy of the tokenizer for a plain form"
            ) from None
        self.joined += 1
        return text

    def _by_template(self, messages: list[Message]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )


def _joined(messages: list[Message]) -> list[Message]:
    """Return the messages with those in a row of the same role joined."""
    return [
        {"role": role, "content": "\n\n".join(one["content"] for one in run)}
        for role, run in groupby(messages, key=lambda message: message["role"])
    ]
