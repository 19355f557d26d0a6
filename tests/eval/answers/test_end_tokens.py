# SPDX-License-Identifier: Apache-2.0
"""A generation ends at the tokens of generation_config.json and at the template's end of a turn."""

import json

import pytest

from eval.answers.end_tokens import EndTokens, end_of_turn, end_tokens
from tests.eval.chat_tokenizers import FAMILIES, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_turn_is_the_token_after_the_assistants_reply(family):
    made = tokenizer(family)
    end = FAMILIES[family][2]
    assert end_of_turn(made) == made.convert_tokens_to_ids(end)
    own = () if end == made.eos_token else (end_of_turn(made),)
    assert end_tokens(made, None) == EndTokens((), own)
    assert end_tokens(made, None).after(by_template=False) == ()


def test_a_template_without_a_token_after_the_reply_has_no_end_of_a_turn():
    made = tokenizer("gemma")
    for template in (
        None,
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
        "{{ raise_exception('never') }}",
    ):
        made.chat_template = template
        assert end_of_turn(made) is None


@pytest.mark.parametrize(("stated", "ids"), [(7, (7,)), ([9, 7, 256], (7, 9)), (None, ())])
def test_the_model_states_one_end_token_or_several(tmp_path, stated, ids):
    made = tokenizer("gemma")
    assert made.eos_token_id == 256
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": stated}))
    found = end_tokens(made, tmp_path)
    assert found.of_model == found.after(by_template=False) == ids
    assert found.after(by_template=True) == tuple(sorted({*ids, end_of_turn(made)}))


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', "[]", "{"]
)
def test_a_damaged_generation_config_is_told_with_its_path(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json does not state the model's end"):
        end_tokens(tokenizer("phi3"), tmp_path)
