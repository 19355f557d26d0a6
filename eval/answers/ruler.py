# SPDX-License-Identifier: Apache-2.0
"""Answer RULER's samples with a stage or an export, on every rank of a torchrun job.

`longhaul ruler predict` launches it. Data-parallel ranks share out the samples by length; the first
rank of those that share a model appends an answer to the file as soon as it is complete. Nothing is
communicated between data-parallel ranks after the start: a long answer of one is not a timeout of
another.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from custom_modules.gpt.model import LongContextGPT
from data.tokenization.tokenizer import load
from eval import load_model
from eval.answers.end_tokens import end_tokens
from eval.answers.generation import recomputing, would_generate
from eval.distributed import parallel_ranks, shared_out
from eval.ruler.length import RulerError
from eval.ruler.predictions import answered, append, first_samples
from eval.ruler.samples import Sample
from eval.ruler.scoring import score_of
from eval.ruler.tokens import Tokens
from recipes.hugging_face.source_checkpoint import published_folder

Answer = Callable[[Sample], str]
"""Returns the text that a model generates greedily for a sample."""


def answer_by_stage(
    stage: str,
    checkpoint: str,
    tokenizer: str,
    files: Sequence[str],
    out: str,
    seq_length: int,
    limit: int | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
) -> None:
    """Append the answers of a stage's checkpoint to `out`; `seq_length` is that of the longest."""
    with parallel_ranks(tensor_parallel, context_parallel, device):
        paths = [Path(file) for file in files]
        own = own_samples(paths, unanswered(paths, [Path(out)], limit), limit)
        model = load_model.load(
            Path(stage),
            seq_length=seq_length,
            bf16=device == "cuda",
            verify=verify,
            start=Path(checkpoint),
        )
        read = Tokens(load(tokenizer))
        ends = end_tokens(read.tokenizer.hugging_face, published_folder(Path(checkpoint)))
        write_answers(own, by_stage(model, read, ends.of_model), Path(out))


def answer_by_export(
    export: str,
    files: Sequence[str],
    out: str,
    limit: int | None = None,
    device: str = "cpu",
) -> None:
    """Append the answers of a Hugging Face folder to `out`; each rank has the whole model."""
    with parallel_ranks(1, 1, device):
        paths = [Path(file) for file in files]
        own = own_samples(paths, unanswered(paths, [Path(out)], limit), limit)
        write_answers(own, by_export(Path(export), device), Path(out))


def unanswered(
    files: Sequence[Path], outs: Sequence[Path], limit: int | None
) -> list[tuple[str, int]]:
    """Return the ids and lengths of the samples that no file of predictions has.

    The first rank reads those files and tells the others, since each writes to one later.
    """
    told: list[set[str]] = [set()]
    if dist.get_rank() == 0:
        told = [set().union(*(answered(out) for out in outs))]
    dist.broadcast_object_list(told)
    return [
        (sample.id, sample.length)
        for path in files
        for sample in first_samples(path, limit)
        if sample.id not in told[0]
    ]


def own_samples(
    files: Sequence[Path], left: Sequence[tuple[str, int]], limit: int | None
) -> Iterator[Sample]:
    """Return the samples that this rank answers of those that are `left`."""
    size = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    of_sample = shared_out([length for _, length in left], size)
    own = {name for (name, _), of in zip(left, of_sample, strict=True) if of == rank}
    return (sample for path in files for sample in first_samples(path, limit) if sample.id in own)


def write_answers(samples: Iterator[Sample], answer: Answer, out: Path) -> None:
    """Append the answer to each sample, on the first rank of those that share a model."""
    first = not (
        parallel_state.get_tensor_model_parallel_rank()
        or parallel_state.get_context_parallel_rank()
    )
    for sample in samples:
        prediction = answer(sample)
        if first:
            append(out, sample.id, prediction)


def by_stage(model: LongContextGPT, tokens: Tokens, others: Sequence[int]) -> Answer:
    """Return the answers of a Megatron model.

    One forward tells whether the model begins with the field `expected` of a sample. If so, and if
    it scores 1, it is the answer: what follows cannot lower the score. Otherwise the answer is
    generated.

    `others` are tokens that end it besides the tokenizer's end of sequence.
    """

    generate = recomputing(model, ends=[tokens.tokenizer.eod_id, *others])

    def answer(sample: Sample) -> str:
        prompt = prompt_ids(tokens, sample)
        expected = tokens.continuation(sample.prompt, sample.expected)
        text = text_of(tokens, expected)
        full = score_of(sample, text) == 1 and len(expected) <= sample.max_new_tokens
        if full and would_generate(model, prompt, expected):
            return text
        return text_of(tokens, generate(prompt, sample.max_new_tokens))

    return answer


def by_export(folder: Path, device: str) -> Answer:
    """Return the answers of a Hugging Face folder, in fp32 on cpu and in bf16 on cuda.

    No code of the folder runs, and only its safetensors are read.
    """
    tokens = Tokens(load(str(folder)))
    others = end_tokens(tokens.tokenizer.hugging_face, folder).of_model
    ends = [tokens.tokenizer.eod_id, *others]
    generate = cached(folder, device)

    def answer(sample: Sample) -> str:
        return text_of(tokens, generate(prompt_ids(tokens, sample), sample.max_new_tokens, ends))

    return answer


def cached(folder: Path, device: str) -> Callable[[Sequence[int], int, list[int]], list[int]]:
    """Return greedy generation by transformers, which keeps keys and values in its cache.

    It takes a prompt, the most new tokens and the tokens before which it ends. Other settings of
    the folder's generation_config.json do not count.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    model = model.to(device).eval()
    model.generation_config = GenerationConfig()

    def generate(prompt: Sequence[int], max_new_tokens: int, ends: list[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=device)
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=ends[0]
        )
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
        new = [int(token) for token in made[0, len(prompt) :]]
        return new[:-1] if new and new[-1] in ends else new

    return generate


def prompt_ids(tokens: Tokens, sample: Sample) -> list[int]:
    """Return the ids of a sample's prompt; raise RulerError if they are not as many as it says."""
    ids = tokens.prompt(sample.prompt)
    if len(ids) != sample.prompt_tokens:
        raise RulerError(
            f"the prompt of sample {sample.id} has {len(ids):,} tokens here and "
            f"{sample.prompt_tokens:,} in its file; make the samples again with this version of "
            "tokenizers"
        )
    return ids


def text_of(tokens: Tokens, ids: Sequence[int]) -> str:
    """Return the text of generated ids, without special tokens."""
    return str(
        tokens.tokenizer.hugging_face.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )
