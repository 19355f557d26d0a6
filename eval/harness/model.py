# SPDX-License-Identifier: Apache-2.0
"""Models of lm-evaluation-harness: a Megatron checkpoint on any TP and CP, and an export.

Both refuse a request that is too long, with its task, document and numbers. The harness's own types
drop the beginning of such a prompt, and the score is near 0 without any message.

All ranks are given the same requests in the same order. Ranks that share a model compute a request
together; data-parallel ranks share out the requests, and each rank returns all answers.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from megatron.core import parallel_state

from custom_modules.gpt.model import LongContextGPT
from eval.answers.generation import next_tokens

GENERATED = 256
"""Tokens that are generated, at most, for a task that states no number; the harness's default."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class OverlongError(ValueError):
    """Raised for a request that has more tokens than the model may read."""


class RefusesOverlong(TemplateLM):
    """A type of model that refuses requests of more than `longest` tokens, generation included."""

    longest: int
    most = 0
    """Tokens of the longest request so far."""
    other_ends: tuple[int, ...] = ()
    """Tokens that end a generation, besides the end of a text."""

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        for request in requests:
            context, continuation = request.args
            tokens = len(self.tok_encode(context + continuation)) + (context == "")
            self._require_room(request, tokens, 0)
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy continuation of each prompt up to one of its stop sequences."""
        for request in requests:
            prompt, kwargs = request.args
            settings = normalize_gen_kwargs(kwargs, GENERATED)
            if settings.get("do_sample") or settings.get("num_beams", 1) != 1:
                raise ValueError(
                    f"task {request.task_name} samples or searches (do_sample: "
                    f"{settings.get('do_sample')}, num_beams: {settings.get('num_beams', 1)}); "
                    "this command generates greedily only"
                )
            self._require_room(request, len(self.tok_encode(prompt)), settings["max_gen_toks"])
        return self._generated(requests)

    def _generated(self, requests: list[Instance]) -> list[str]:
        return list(super().generate_until(requests))

    def _require_room(self, request: Instance, tokens: int, generated: int) -> None:
        self.most = max(self.most, tokens + generated)
        if tokens + generated > self.longest:
            more = f" and {generated:,} to generate" if generated else ""
            raise OverlongError(
                f"task {request.task_name}, document {request.doc_id}: {tokens:,} tokens{more} do "
                f"not fit in {self.longest:,}, the longest that this model reads here; evaluate a "
                "model of a longer context, or take a task with shorter documents"
            )


class Megatron(RefusesOverlong):
    """A Megatron model, loaded by every rank under the current parallel state."""

    chat_template_args: Mapping[str, Any] = {}
    tokenizer_name = HFLM.tokenizer_name

    def __init__(self, model: LongContextGPT, tokenizer: Any, *, longest: int) -> None:
        """Take a loaded model, its Hugging Face tokenizer and the most tokens of a request."""
        super().__init__()
        if (pp := parallel_state.get_pipeline_model_parallel_world_size()) > 1:
            raise ValueError(
                f"the harness evaluates with tensor and context parallelism only, not with PP={pp};"
                " a checkpoint loads under any layout, so leave pipeline parallelism out"
            )
        self.model, self.tokenizer, self.longest = model, tokenizer, longest
        self._device = torch.device("cuda", torch.cuda.current_device())

    def apply_chat_template(self, *history: Any, **how: Any) -> str:
        """Return a conversation as the harness writes it: without a system message if need be.

        Raises ValueError if the template refuses the other turns.
        """
        try:
            return str(HFLM.apply_chat_template(self, *history, **how))
        except TemplateError as error:
            raise ValueError(
                f"the chat template of this model refuses the turns of a task ({error}); evaluate "
                "it without --chat-template"
            ) from error

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """The most tokens of a request."""
        return self.longest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a string as the harness's type `hf` has them."""
        begins = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        if add_special_tokens is None and begins:
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._shared_out([(before, after) for _, before, after in requests], self._score)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each text, read in windows of the longest request."""
        scores = self._shared_out([request.args[0] for request in requests], self._rolling)
        self.most = max([self.most, *(tokens for _, tokens in scores)])
        return [score for score, _ in scores]

    def _generated(self, requests: list[Instance]) -> list[str]:
        return self._shared_out([request.args for request in requests], self._generate)

    def _score(self, request: tuple[list[int], list[int]]) -> tuple[float, bool]:
        before, after = request
        if not after:
            return 0.0, True
        tokens = [*before, *after]
        told = next_tokens(self.model, tokens, len(before) - 1, len(tokens) - 1)
        return -float(told.nats.sum()), told.likeliest.tolist() == after

    def _rolling(self, text: str) -> tuple[float, int]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.longest,
            context_len=1,
        )
        pairs = [make_disjoint_window(window) for window in windows]
        longest = max((len(before) + len(after) - 1 for before, after in pairs), default=0)
        return sum(self._score(pair)[0] for pair in pairs), longest

    def _generate(self, request: tuple[str, dict[str, Any]]) -> str:
        prompt, kwargs = request
        settings = normalize_gen_kwargs(kwargs, GENERATED)
        end = self.tokenizer.decode(self.eot_token_id)
        stops = handle_stop_sequences(list(settings["until"]), eos=end)
        tokens = self.tok_encode(prompt)
        given = len(tokens)
        text = ""
        while len(tokens) < given + settings["max_gen_toks"]:
            told = next_tokens(self.model, tokens, len(tokens) - 1, len(tokens))
            token = int(told.likeliest)
            if token == self.eot_token_id or token in self.other_ends:
                break
            tokens.append(token)
            text = self.tokenizer.decode(tokens[given:], skip_special_tokens=True)
            if any(stop and stop in text for stop in stops):
                break
        return str(postprocess_generated_text(text, stops, None))

    def _shared_out(
        self, requests: Sequence[Asked], answer: Callable[[Asked], Answer]
    ) -> list[Answer]:
        """Return the answer to each request; each data-parallel rank computes a part of them."""
        _require_same(requests)
        rank = parallel_state.get_data_parallel_rank()
        size = parallel_state.get_data_parallel_world_size()
        own = [answer(request) for request in requests[rank::size]]
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, own, group=parallel_state.get_data_parallel_group())
        answers: list[Any] = [None] * len(requests)
        for at, part in enumerate(parts):
            answers[at::size] = part
        return answers


class Export(RefusesOverlong, HFLM):
    """A Hugging Face folder through the harness's type `hf`; runs no code of the folder."""

    def __init__(self, folder: Path, *, longest: int, device: str) -> None:
        """Load in fp32 on cpu and in bf16 on cuda, as checkpoints are."""
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        alone = {"trust_remote_code": False, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32, **alone
        )
        # Without penalties and other settings of the folder: a checkpoint is asked greedily too.
        model.generation_config = GenerationConfig()
        HFLM.__init__(
            self,
            pretrained=model.to(device).eval(),
            tokenizer=AutoTokenizer.from_pretrained(folder, **alone),
            backend="causal",
            max_length=longest,
            batch_size=1,
        )
        self.longest = longest

    def _model_generate(self, context: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return prompt and continuation of the one request of a batch, without the end token."""
        ends = [self.eot_token_id, *self.other_ends]
        made: torch.Tensor = super()._model_generate(context, eos_token_id=ends, **given)
        ended = made.shape[1] > context.shape[1] and int(made[0, -1]) in ends
        return made[:, :-1] if ended else made

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each text, read in windows of the longest request."""
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        self.most = max([self.most, *(min(length, self.longest) for length in lengths)])
        return list(HFLM.loglikelihood_rolling(self, requests, disable_tqdm=disable_tqdm))


def _require_same(requests: Sequence[Any]) -> None:
    """Raise RuntimeError unless all ranks have the same requests in the same order."""
    digest = hashlib.sha256(repr(requests).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        raise RuntimeError(
            "the ranks have different requests, so the task draws its documents at random without "
            "a seed; seed it, or evaluate it on one rank"
        )
