# SPDX-License-Identifier: Apache-2.0
import json
import logging
import signal
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data.cuda_extension import prepare_process
from longhaul import cli
from longhaul.terminal.messages import set_verbosity
from tests import ranks, suite_time, warm_start
from tests.ranks import one_rank

METER = suite_time.Meter()
PYTEST = "_pytest.logging"
"""Module of the handlers by which pytest captures log lines."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the Makefile says of the suite's time."""
    parser.addoption("--budget-minutes", type=float, help="Report CPU time against this budget.")
    parser.addoption("--write-durations", action="store_true", help="Rewrite tests/durations.json.")
    parser.addoption("--nightly", action="store_true", help="Run further cases of each test too.")
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu",
        help="cuda: run the tests marked parity, on ranks of one GPU over NCCL; with --nightly "
        "every case of each, not a seventh.",
    )  # fmt: skip
    parser.addoption(
        "--kept-ranks", action="store_true",
        help="Run the tests marked parity on ranks that stay for all of them, as on a GPU.",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Let processes that import NeMo be forked; workers inherit what the first process sets."""
    # A shell has background jobs (nohup make test &) ignore Ctrl-C, and what they start does too:
    # a test that interrupts a command would wait in vain. A signal with a handler is not inherited.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_process()  # tests import Megatron-Core without a command
    device = config.getoption("--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch finds no GPU on this machine")
    if not hasattr(config, "workerinput") and device == "cpu":  # CUDA does not survive a fork
        warm_start.set_up()
    if _on_kept_ranks(config):
        few = device == "cuda" and not config.getoption("--nightly")
        config.add_cleanup(ranks.keep(device, stride=7 if few else 1))


def _on_kept_ranks(config: pytest.Config) -> bool:
    return config.getoption("--device") == "cuda" or config.getoption("--kept-ranks")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what was set up."""
    if not hasattr(config, "workerinput"):
        warm_start.tear_down()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs nightly, unless asked for, and begin with the files that take longest."""
    recorded = suite_time.read()
    suite_time.mark_slow(items, recorded)
    if not config.getoption("--nightly"):
        suite_time.leave_out_nightly(config, items)
    if _on_kept_ranks(config):
        others = [item for item in items if not item.get_closest_marker("parity")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("parity")]
        return
    suite_time.longest_first(items, recorded)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> suite_time.Scheduling:
    """Keep a file's tests on one worker, where they share what they trained."""
    return suite_time.Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Count what a test computes from its beginning."""
    METER.lap()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[pytest.TestReport]:
    """Give the report of a test's setup, call or teardown the CPU seconds that it took."""
    report = yield
    report.cpu = METER.lap()
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the CPU time by file and in all against the budget; rewrite the record if asked."""
    minutes = config.getoption("--budget-minutes")
    if minutes is None and not config.getoption("--write-durations"):
        return
    reports = [report for of in terminalreporter.stats.values() for report in of]
    forked = warm_start.computed()
    seconds, recorded = suite_time.by_file(reports, forked), suite_time.read()
    total = METER.total() + sum(took for _, took in forked)  # the workers have ended
    terminalreporter.section("CPU time by file")
    budget = None if minutes is None else minutes * 60
    for line in suite_time.page(seconds, recorded, total, budget):
        terminalreporter.write_line(line)
    if config.getoption("--write-durations"):
        suite_time.write(seconds)


@pytest.fixture
def megatron_rank() -> Iterator[None]:
    """Run the test as the only rank of Megatron's groups, on CPU."""
    from megatron.core import parallel_state  # here, since most tests do without it

    from custom_modules.cpu.backend import cpu_backend

    with one_rank(), cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="session")
def small_store(tmp_path_factory) -> Path:
    """Return a store of the standard library's `asyncio` and a few long modules."""
    from data.prepare import prepare

    source = tmp_path_factory.mktemp("source")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in [*stdlib.glob("asyncio/*.py"), *stdlib.glob("[a-f]*.py")]:
        (source / f"{path.parent.name}_{path.name}.txt").write_text(path.read_text())
    store = tmp_path_factory.mktemp("stores") / "tiny"
    prepare(str(source), store, vocab_size=512)
    return store


@pytest.fixture(scope="session")
def store_of_lengths(tmp_path_factory, small_store) -> Path:
    """Return a store of documents of each power of two of tokens, from 64 to 2,048."""
    from data.prepare import prepare
    from data.store import Manifest

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text() for path in sorted(stdlib.glob("asyncio/*.py")))
    source, at = tmp_path_factory.mktemp("source") / "pieces.jsonl", 0
    with source.open("w") as file:
        while at < len(text) - 8192:
            for characters in (256, 512, 1024, 2048, 4096, 8192):
                file.write(json.dumps({"text": text[at : at + characters]}) + "\n")
                at += characters
    store = tmp_path_factory.mktemp("stores") / "lengths"
    tokenizer = str(Manifest.load(small_store).tokenizer_path)
    prepare(str(source), store, tokenizer=tokenizer, heldout_fraction=0.2)
    return store


@pytest.fixture(autouse=True)
def normal_verbosity() -> Iterator[None]:
    """Let no command that a test runs or parses, such as one with `-q`, silence later tests."""
    yield
    set_verbosity("normal")


class Answered(NamedTuple):
    """What the command line left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """Return the one line that a mistake is told in."""
        assert self.code == 2, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def answer(monkeypatch, capfd, tmp_path) -> Callable[..., Answered]:
    """Return a function that runs the command line in this process, in a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):  # the pipe is no terminal
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its ranks

    def run(*words: object) -> Answered:
        monkeypatch.setattr("sys.argv", ["longhaul", *map(str, words)])
        # Libraries that earlier tests imported print every log line; a command starts without.
        ours = [each for each in logging.root.handlers if type(each).__module__ == PYTEST]
        with monkeypatch.context() as patch:
            patch.setattr(logging.root, "handlers", ours)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        return Answered(ended.value.code, *capfd.readouterr())

    return run
