# SPDX-License-Identifier: Apache-2.0
"""An export through the harness's type `vllm`; vLLM itself is neither installed nor imported here.

The harness's type has these traps, each met below:

    its length is the engine's, and a longer prompt loses its beginning    refused before, by us
    a log-likelihood is asked with one token to generate                   counted as one
    special tokens are part of a generated text                            skipped, as by `hf`
    it ends at the end of a sequence                                       and at other end tokens

The engine starts processes of its own. They must not find torchrun's variables, by which torch
waits for a store that is not there, nor be forked from a process that has joined a group.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from eval.harness.model import RefusesOverlong

INSTALL = "pip install 'lm-eval[vllm]==0.4.13'"
SEED = 1234  # the harness's own
OF_TORCHRUN = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")
OF_ENGINE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables of the engine: new processes instead of forks, and no statistics sent."""


def require_vllm(tensor_parallel: int) -> None:
    """Raise ValueError if vLLM is not installed, or there are too few GPUs for it."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"--backend vllm needs vLLM, which is not installed; run {INSTALL}, or leave --backend "
            "out to evaluate the export by transformers"
        )
    import torch

    gpus = torch.cuda.device_count()
    if gpus < tensor_parallel:
        raise ValueError(
            f"--backend vllm with --tp {tensor_parallel} needs as many GPUs; this machine has "
            f"{gpus}; leave --backend out to evaluate the export by transformers"
        )


@contextmanager
def only_rank() -> Iterator[None]:
    """Be the only rank of a group that has no port, without the variables of torchrun."""
    import torch.distributed as dist

    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)]:
        del os.environ[name]
    os.environ.update(OF_ENGINE)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, and missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def arguments(folder: Path, *, longest: int, tensor_parallel: int) -> dict[str, Any]:
    """Return what the harness's type is given; each is one of its named arguments."""
    return {
        "pretrained": str(folder),
        "tokenizer": str(folder),
        "dtype": "bfloat16",
        "max_model_len": longest,
        "tensor_parallel_size": tensor_parallel,
        "data_parallel_size": 1,
        "batch_size": "auto",
        "seed": SEED,
        "trust_remote_code": False,
    }


def served(folder: Path, *, longest: int, tensor_parallel: int) -> "RefusesOverlong":
    """Return an export in an engine of vLLM that reads `longest` tokens, in bf16."""
    from lm_eval.models.vllm_causallms import VLLM

    made: RefusesOverlong = type_over(VLLM)(
        **arguments(folder, longest=longest, tensor_parallel=tensor_parallel)
    )
    made.longest = longest
    return made


def type_over(engine: Any) -> Any:
    """Return the type of models over the harness's type `vllm`."""
    from eval.harness.model import RefusesOverlong

    class Served(RefusesOverlong, engine):
        @property
        def max_length(self) -> int:
            """The most tokens of a request, which the engine has room for."""
            return self.longest

        def modify_gen_kwargs(self, *given: Any, **named: Any) -> tuple[dict[str, Any], Any, int]:
            """Return settings of a generation that ends at each end token, without their text."""
            settings, until, most = super().modify_gen_kwargs(*given, **named)
            ends = {"stop_token_ids": list(self.other_ends), "skip_special_tokens": True}
            return {**settings, **ends}, until, most

        def loglikelihood_rolling(
            self, requests: "list[Instance]", disable_tqdm: bool = True
        ) -> list[float]:
            """Return the log-likelihood of each text, read in windows of the longest request."""
            lengths = [len(self.tok_encode(request.args[0])) for request in requests]
            self.most = max([self.most, *(min(length, self.longest) for length in lengths)])
            return list(engine.loglikelihood_rolling(self, requests, disable_tqdm=disable_tqdm))

        def _require_room(self, request: "Instance", tokens: int, generated: int) -> None:
            super()._require_room(request, tokens, generated or 1)

    return Served
