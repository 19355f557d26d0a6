# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU over NCCL: steps of every layout, and the tests that need a device.

    ranks(sizes, layouts="two")   steps of one recipe under layouts of two ranks, against one rank
    parity(sizes)                 the tests marked `parity` on ranks of the device, in float64

All layouts start from the same weights, which one rank has drawn and saved, and train on the same
sequences, of which a data rank takes its share; initialisation by itself differs with TP. So losses
and gradient norms agree to rounding. Messages go through sockets of the loopback interface
(`benchmarks.harness.kept_ranks`): seconds say nothing of NVLink or a network.

On a CPU ranks join by gloo, models are small, and everything else is the same.
"""

import logging
import math
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from nemo.lightning.megatron_parallel import MegatronParallel

from benchmarks.gpu.sizes import Device, Sizes, layered
from benchmarks.harness.kept_ranks import KeptSets
from benchmarks.harness.machine import TREE
from custom_modules.checkpoints.results_queue import end_results_queue_with_rank
from custom_modules.cpu.backend import cpu_backend
from custom_modules.patching import patched
from custom_modules.profiling.step_memory import whole_step
from recipes.nemo2.cpu import on_cpu, plain_kernels
from recipes.notation.layout import layout_from
from recipes.pretrain import PretrainRecipe, pretrain
from recipes.resolved import single_step
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K

STEPS, SEQUENCES = 3, 2
"""Steps of each layout, and sequences of each: one for each of two data ranks."""
LAYERS: dict[Device, int] = {"cuda": 4, "cpu": 2}
LENGTH: dict[Device, int] = {"cuda": 8 * K, "cpu": 64}
EXPERTS = 4
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-3, 1e-2
"""Relative, of each step: bf16 is rounded in another order under each layout."""
DENSE = {
    "one": {"one rank": ""},
    "two": {
        "TP 2": "tp2",
        "CP 2, ring": "ring2",
        "CP 2, Ulysses": "ulysses2",
        "CP 2, head-chunked": "head_chunked2",
        "PP 2": "pp2",
        "optimizer sharded over DP 2": "dp2",
        "parameters sharded over DP 2": "dp2 zero3",
    },
    "four": {"CP 4, hybrid 2x2": "hybrid2x2"},
}
WITH_EXPERTS = {"one": {"one rank, experts": ""}, "two": {"EP 2": "dp2 ep2"}}
"""Layouts of the two models by what they are called."""
MOST_SECONDS: dict[Device, float] = {"cuda": 90.0, "cpu": 400.0}
"""Of one layout, with the imports of its ranks."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A card, and what trains it in every layout."""

    card: ModelCard
    device: Device
    length: int
    weights: str
    """Folder of the checkpoint that the layout of one rank writes and all others start from."""

    def recipe(self, words: str) -> PretrainRecipe:
        """Return the recipe of a layout, each rank of which is a node of one GPU.

        It is made for GPUs: on a CPU the same layout trains, and one that could not save its
        weights there is not refused.
        """
        tiled = "zero3" not in words.split()  # it reads the LM head's weight behind FSDP's back
        layout = layout_from(f"{words} kept_attention" + " tile-loss" * tiled)
        recipe = pretrain(self.card, self._ladder(), self.length, layout, nodes=layout.world_size)
        if self.device == "cpu":
            on_cpu(recipe)
            recipe.trainer.plugins.precision, recipe.optim.config.bf16 = "32", False
        elif find_spec("transformer_engine") is None:
            plain_kernels(recipe.model.config)
            recipe.model.config.use_cpu_initialization = False
        return recipe

    def _ladder(self) -> Ladder:
        tokens = SEQUENCES * self.length
        stage = Stage(
            seq_length=self.length, rope="native", tokens=STEPS * tokens, tokens_per_batch=tokens,
            lr=Cosine(peak=1e-4), start="scratch",
        )  # fmt: skip
        return Ladder(name="ranks", source="ours", stages=(stage,))


def ranks(
    sizes: Sizes, *, layouts: str, note: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Return losses, gradient norms and seconds of every layout of `layouts` ("two" or "four").

    One rank comes first, with which the others are compared: `agrees` says whether all losses are
    the same to `LOSS_TOLERANCE` and all norms to `NORM_TOLERANCE`. A layout that could not run has
    a `reason` instead. `note` gets the result after each layout.
    """
    found: dict[str, dict[str, Any]] = {}
    size = {"two": 2, "four": 4}[layouts]
    with (
        tempfile.TemporaryDirectory() as folder,
        KeptSets(sizes.device, quiet, sizes=(1, size)) as sets,
    ):
        for card, named in _cards(sizes):
            if layouts not in named:
                continue
            model = Model(
                card=card, device=sizes.device, length=LENGTH[sizes.device],
                weights=str(Path(folder) / card.name),
            )  # fmt: skip
            right: dict[str, Any] = {}
            for name, words in (named["one"] | named[layouts]).items():
                if right.get("reason"):
                    break  # nothing to compare with
                found[name] = _layout(sets, model, words)
                right = right or found[name]
                found[name] |= _compared(found[name], right)
                note({"layouts": found})
    return {"layouts": found}


def _cards(sizes: Sizes) -> Iterator[tuple[ModelCard, dict[str, dict[str, str]]]]:
    dense = sizes.card_named(layered(sizes.whole, LAYERS[sizes.device]))
    dense = replace(dense, tied_embeddings=True)
    yield dense, DENSE
    experts = replace(
        dense, name=f"{dense.name}_experts", family="mixtral", ffn_hidden=dense.ffn_hidden // 4,
        experts=EXPERTS, experts_per_token=2, tied_embeddings=False,
        config_class="nemo.collections.llm.gpt.model.mixtral.MixtralConfig",
    )  # fmt: skip
    yield experts, WITH_EXPERTS


def _layout(sets: KeptSets, model: Model, words: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        size = layout_from(words).world_size
        answers = sets.run(trained, size, model, words, timeout_seconds=MOST_SECONDS[model.device])
        result = answers[-1]  # of the last pipeline stage, which has the loss
        result["reason"] = ""
    except (RuntimeError, TimeoutError, ValueError) as error:
        result = {"losses": [], "gradient_norms": [], "reason": str(error).splitlines()[-1]}
        print(error, file=sys.stderr, flush=True)
    return {**result, "seconds": time.perf_counter() - start}


def _compared(result: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Return the largest relative differences of a layout from one rank, and the verdict."""
    if result["reason"] or right["reason"]:
        return {"agrees": False}
    away = {
        name: max(
            abs(ours - theirs) / abs(theirs)
            for ours, theirs in zip(result[name], right[name], strict=True)
        )
        for name in ("losses", "gradient_norms")
    }
    if not all(map(math.isfinite, [*result["losses"], *result["gradient_norms"]])):
        return {"away": dict.fromkeys(away, math.inf), "agrees": False}
    agrees = away["losses"] <= LOSS_TOLERANCE and away["gradient_norms"] <= NORM_TOLERANCE
    return {"away": away, "agrees": agrees}


def quiet() -> None:
    """Leave NeMo's pages of groups out of the log; importing this imports what a rank needs."""
    logging.getLogger("nemo_logger").setLevel(logging.WARNING)
    torch.compiler.set_stance("force_eager")  # every layout would compile its shapes anew


def trained(model: Model, words: str) -> dict[str, Any]:
    """Return what steps of a layout give on this rank: losses, gradient norms, seconds of each."""
    recipe = model.recipe(words)
    found: dict[str, Any] = {"losses": [], "gradient_norms": [], "step_seconds": []}
    with ExitStack() as around:
        if model.device == "cpu":
            around.enter_context(cpu_backend(force=True))
        around.enter_context(
            patched(MegatronParallel, "init_ddp", _with_weights(Path(model.weights)))
        )
        around.enter_context(patched(single_step, "_batches", _batches))
        around.enter_context(patched(single_step, "micro_batches", _micro_batches))
        made = single_step.training(recipe, rank=dist.get_rank(), local_rank=0)
        for _ in range(STEPS):
            start = time.perf_counter()
            loss, norm = whole_step(made)
            found["losses"].append(float(loss))
            found["gradient_norms"].append(float(norm))
            found["step_seconds"].append(time.perf_counter() - start)
    return found


def _with_weights(folder: Path) -> Callable[[Any], None]:
    """Return NeMo's `init_ddp`, before which weights are read, or saved where there are none.

    Data parallelism and FSDP copy the parameters that they wrap into buffers of their own.
    """
    wrap = MegatronParallel.init_ddp

    def init_ddp(parallel: MegatronParallel) -> None:
        torch.cuda.synchronize()  # NeMo calls it in a stream of its own, and waits for nothing
        saved = folder.is_dir()
        for chunk in parallel:
            module = unwrap_model(chunk.module)
            state = module.sharded_state_dict()
            if saved:
                module.load_state_dict(dist_checkpointing.load(state, str(folder)))
            else:
                folder.mkdir()
                end_results_queue_with_rank()
                dist_checkpointing.save(state, str(folder))
        wrap(parallel)
        torch.cuda.synchronize()

    return init_ddp


def _micro_batches(recipe: PretrainRecipe) -> tuple[int, int]:
    """Return how many micro-batches a data rank has: all of them are run."""
    of_step = SEQUENCES // parallel_state.get_data_parallel_world_size()
    return of_step, of_step


def _batches(recipe: PretrainRecipe) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this data rank's micro-batches of the sequences that every layout trains on."""
    length = recipe.data.seq_length
    draw = torch.Generator().manual_seed(1)
    vocabulary = recipe.model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (SEQUENCES, length), generator=draw)
    rank, size = (
        parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    )  # fmt: skip
    for sequence in tokens.chunk(size)[rank].split(1):
        yield {
            "tokens": sequence,
            "labels": sequence.roll(-1, 1),
            "loss_mask": torch.ones(1, length),
            "sample_id": torch.arange(1),
            "position_ids": torch.arange(length)[None],
        }


PARITY = (
    "context_parallel/test_attend",
    "context_parallel/test_ulysses",
    "context_parallel/test_head_chunked",
    "context_parallel/test_window",
    "context_parallel/test_exchange_order",
    "tiling/test_cross_entropy_ranks",
    "gpt/test_expert_parallel",
    "gpt/test_output_layer",
    "gpt/test_families_ranks",
    "tiling/test_mlp",
    "gpt/test_param_gather",
    "gpt/test_sharding",
    "rope/test_layouts",
    "gpt/test_layouts",
)
"""Files of `tests/custom_modules` with parity tests, in the order of their worth."""
ON_CPU = ("context_parallel/test_ulysses",)
KERNELS = ("attention/test_gpu_kernels", "tiling/test_cross_entropy")
TEST_SECONDS = 80.0
"""After which pytest is interrupted; what it has run by then counts."""
END_SECONDS = 20.0
MOST_WORDS = 300


def parity(sizes: Sizes) -> dict[str, Any]:
    """Return how many of the parity tests passed and failed on ranks of the device.

    A failure has its first test's name and its error; the same error of other tests of a file is
    not repeated. `complete` is False if time ran out.
    """
    names = PARITY if sizes.device == "cuda" else ON_CPU
    return _tested(names, "--device", sizes.device, "--kept-ranks", "-m", "parity")


def kernels(sizes: Sizes) -> dict[str, Any]:
    """Return the same of the tests of attention kernels and loss that need a GPU."""
    return _tested(KERNELS, "-m", "gpu")


def _tested(names: Iterable[str], *words: str) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words,
            f"--junitxml={report}", *(f"tests/custom_modules/{name}.py" for name in names),
        ]  # fmt: skip
        pytest = subprocess.Popen(command, cwd=TREE, stdin=subprocess.DEVNULL)
        try:
            complete = _ended(pytest, TEST_SECONDS)
            if not complete:
                pytest.send_signal(signal.SIGINT)  # it writes its report
                _ended(pytest, END_SECONDS)
        finally:
            pytest.kill()
            pytest.wait()
        if not report.exists():
            raise RuntimeError(f"pytest ended with {pytest.returncode} and wrote no report")
        found = _read_report(report)
    return {**found, "complete": complete, "seconds": time.perf_counter() - start}


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def _read_report(report: Path) -> dict[str, Any]:
    """Return what a JUnit file says of its tests."""
    passed = skipped = 0
    failed: dict[str, str] = {}
    seen = set()
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [*case.iter("failure"), *case.iter("error")]
        if case.find("skipped") is not None:
            skipped += 1
        elif not wrong:
            passed += 1
        else:
            lines = wrong[0].get("message", "").strip().splitlines() or ["failed"]
            line = " ".join(dict.fromkeys((lines[0], lines[-1])))[:MOST_WORDS]
            if (case.get("classname"), line) not in seen:
                seen.add((case.get("classname"), line))
                failed[f"{case.get('classname')}::{case.get('name')}"] = line
    return {"passed": passed, "failed": failed, "skipped": skipped}
