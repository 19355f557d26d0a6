# SPDX-License-Identifier: Apache-2.0
"""The page of the real model: its tables hold what was measured, and transformers is asked."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import real_model_page
from custom_modules.rope.config import RopeScaling
from eval.measurements import ContextGain, ShortLoss
from eval.provenance import Provenance
from eval.ruler.results import RulerResult
from eval.ruler.scoring import ScoredFile, Scores, average, task_score
from tests.eval.report.test_base_model import BASE, STRETCHED, TRAINED

EVALUATIONS = (BASE, STRETCHED, TRAINED)
LENGTH = 2048


def test_losses_have_their_standard_errors_and_rotations():
    lines = real_model_page.loss_section(EVALUATIONS).splitlines()
    assert (
        "| base | default | 3.000 \N{PLUS-MINUS SIGN} 0.577 | 5.000 \N{PLUS-MINUS SIGN} 0.577 |"
        in lines
    )
    assert any(line.startswith("| base_with_yarn_x4 | yarn x4 | 3.100") for line in lines)
    assert "| weights | rotation | 0-512 | 512-1K |" in lines


def test_differences_are_to_each_base_model_and_of_documents():
    lines = real_model_page.gain_section(EVALUATIONS).splitlines()
    assert lines[-1].startswith("| tiny_2k | to base_with_yarn_x4 | ")
    assert lines[-1].endswith("| -0.133 \N{PLUS-MINUS SIGN} 0.033 |")
    assert lines[-2].startswith("| tiny_2k | to base | +0.100")


def test_passkeys_are_counted_by_length_and_depth():
    lines = real_model_page.passkey_section(EVALUATIONS).splitlines()
    assert "| base | 20% | 1/1 (0.50) | 0/1 (2.00) |" in lines
    none = [replace(each, passkey=None) for each in EVALUATIONS]
    assert real_model_page.passkey_section(none) == "## Passkeys\n\nNo prompt was tried."


def with_context(evaluation, last, short):
    """Return an evaluation of two documents with a gain from context and short documents."""
    gain = ContextGain(
        scored=512, contexts=(1024, 2048), loss=(3.0, last), standard_error=(0.1, 0.2),
        by_document=((3.5, last + 0.5), (2.5, last - 0.6)),
    )  # fmt: skip
    loss = ShortLoss(1024, short, 0.1, short, (short - 0.1, short + 0.1), (900, 1000))
    return replace(evaluation, context_gain=gain, short=loss)


def test_gain_from_context_and_short_documents_are_shown_where_they_were_measured():
    both = [with_context(BASE, 2.5, 2.0), with_context(TRAINED, 2.0, 2.3)]
    [gain] = real_model_page.context_section(both)
    shown = "3.000 \N{PLUS-MINUS SIGN} 0.100 | 2.000 \N{PLUS-MINUS SIGN} 0.200"
    assert f"| tiny_2k | {shown} | 1.050 \N{PLUS-MINUS SIGN} 0.050 |" in gain.splitlines()
    [short] = real_model_page.short_section(both)
    assert "| tiny_2k | 2 | 1,024 | 2.300 \N{PLUS-MINUS SIGN} 0.100 |" in short.splitlines()
    assert "the loss of short documents is +0.300 +- 0.000 nats from base" in short
    assert not [*real_model_page.context_section(EVALUATIONS)]
    other = replace(both[1], context_gain=replace(both[1].context_gain, scored=256))
    with pytest.raises(SystemExit, match="tiny_2k has other contexts than base"):
        next(real_model_page.context_section([both[0], other]))


def test_scores_of_ruler_are_by_task_and_length_in_the_order_of_the_models():
    def result(model, *rows):
        lengths = sorted({row.length for row in rows})
        scores = Scores(
            suite="ruler-offline", scores=list(rows), effective_length=None,
            averages=[average(length, [row for row in rows if row.length == length])
                      for length in lengths],
            not_stated_because="few tasks",
        )  # fmt: skip
        return RulerResult(model=model, scores=scores, provenance=Provenance())

    def row(task, length, *values):
        file = ScoredFile(file=f"{task}-{length}.jsonl", sha256="0")
        return replace(task_score(task, length, values), files=(file,))

    trained = result("tiny_2k", row("vt", 512, 1.0, 0.0), row("niah_single_1", 1024, 1.0, 1.0))
    [section] = real_model_page.ruler_section(
        [trained, result("base", row("vt", 512, 0.0, 0.0))], ["base", "tiny_2k"]
    )
    lines = section.splitlines()
    assert "| weights | vt, 512 | niah_single_1, 1K |" in lines
    assert lines[-2:] == [
        "| base | 0 (0 to 66) | - |", "| tiny_2k | 50 (9 to 91) | 100 (34 to 100) |"
    ]  # fmt: skip
    assert not [*real_model_page.ruler_section([], ["base"])]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Return a small Llama that was published, and tokens to read."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(real_model_page, "PUBLISHED", tmp_path)
    return model, torch.randint(0, 64, (1, LENGTH + 1))


def test_transformers_computes_the_losses_with_the_rotation_that_is_asked_for(published):
    model, tokens = published
    own = RopeScaling.base_change(10_000)
    found = real_model_page.transformers_losses(tokens[0].tolist(), own)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    assert found == pytest.approx(losses.view(-1, 64).mean(1).tolist(), rel=1e-4)
    yarn = RopeScaling.yarn(base=10_000, factor=2.0, original_length=1024)
    stretched = real_model_page.transformers_losses(tokens[0].tolist(), yarn)
    assert len(stretched) == len(found) == LENGTH // 64
    assert stretched != pytest.approx(found, rel=1e-3)
