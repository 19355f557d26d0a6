# SPDX-License-Identifier: Apache-2.0
"""Turns of a task in a chat template: the system's message is kept, a missing template refused."""

import pytest

from eval.harness.chat import rendered, template_sha256
from tests.eval.chat_tokenizers import saved, tokenizer

TURNS = [
    {"role": "system", "content": "Answer in a word.\n\n"},
    {"role": "user", "content": "Hot?"},
    {"role": "assistant", "content": "Cold"},
    {"role": "user", "content": "Left?"},
]


def test_a_system_message_is_put_before_the_first_question_where_it_is_refused():
    text = rendered(tokenizer("phi3"), TURNS, begin_reply=True)
    assert text.startswith("<|system|>\nAnswer in a word.<|end|>\n<|user|>\nHot?<|end|>\n")
    text = rendered(tokenizer("gemma"), TURNS, begin_reply=True)
    assert text == (
        "<bos><start_of_turn>user\nAnswer in a word.\n\nHot?<end_of_turn>\n"
        "<start_of_turn>model\nCold<end_of_turn>\n"
        "<start_of_turn>user\nLeft?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_the_beginning_of_a_reply_is_left_open():
    turns = [*TURNS, {"role": "assistant", "content": "It is"}]
    text = rendered(tokenizer("chatml"), turns, begin_reply=False)
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_a_template_that_refuses_the_turns_is_told():
    made = tokenizer("chatml")
    made.chat_template = "{{ raise_exception('not like\n this') }}"
    with pytest.raises(ValueError, match=r"refuses the messages of a task \(not like this\)"):
        rendered(made, TURNS, begin_reply=True)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    first, other = (template_sha256(saved(name, tmp_path / name)) for name in ("phi3", "gemma"))
    assert first != other
    made = tokenizer("phi3")
    made.chat_template = None
    made.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"none has no chat template .* without --chat-template"):
        template_sha256(tmp_path / "none")
