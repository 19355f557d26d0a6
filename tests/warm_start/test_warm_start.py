# SPDX-License-Identifier: Apache-2.0
"""A process that is forked in the place of a starting one is, to whoever looks, that one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm_start
from tests.conditions import until
from tests.ranks import kill_tree
from tests.slurm.support.processes import running

SEES = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"),
    "warm": "wave" in sys.modules, "main": sys.modules["__main__"].__name__,
    "read": sys.stdin.read(), "rank": os.environ["LOCAL_RANK"], "parent": os.getppid(),
}))
sys.stderr.write("said")
sys.exit(7)
"""
WAITS = """
import os, signal, sys, time
def told(*_):
    os.write(1, b"told\\n")  # a print that comes into another one raises
    sys.exit(3)
signal.signal(signal.SIGTERM, told)
print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)
while True:
    time.sleep(0.1)
"""
SLOW = """
import os, runpy, sys, time
begins = os.setsid
os.setsid = lambda: (time.sleep(1), begins())
sys.argv[:] = [{program!r}, *sys.argv[1:]]
sys.path[0] = os.path.dirname({program!r})
runpy.run_path({program!r}, run_name="__main__")
"""
"""A server whose forked processes take a second to begin a session."""
STARTS = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import longhaul_warm_start
def fail(*_, **__):
    {then}
subprocess.Popen = fail
longhaul_warm_start._connect(sys.argv[2])
"""
"""A process that would start the server and does not come to it."""
KILLED = "[os.kill(process, 9) for process in (os.getppid(), os.getpid())]"
NO_MEMORY = "raise OSError(12, 'no memory')"


@contextmanager
def a_folder(*modules: str):
    """Yield the folder of a server of the test's own, which may still write there at the end."""
    folder = warm_start.make_folder(modules or ["wave"])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server():
    """Return the folder of a server that has imported a module nobody else does."""
    with a_folder() as folder:
        yield folder


@pytest.fixture
def slow_server():
    """Return the folder of a server whose forked processes begin late."""
    program = str(Path(warm_start.__file__).with_name("server.py"))
    with a_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        serving = subprocess.Popen(
            [sys.executable, "-c", SLOW.format(program=program), folder, str(listener.fileno())],
            env=warm_start.cold(), pass_fds=[listener.fileno()],
        )  # fmt: skip
        yield folder
        serving.kill()
        serving.wait()


@pytest.fixture
def rank(server, tmp_path):
    """Return a function that starts a script as torchrun starts a rank."""
    started = []

    def start(code: str, *words: str, folder: Path = server, **given) -> subprocess.Popen:
        script = tmp_path / f"script{len(started) or ''}.py"
        script.write_text(code)
        variables = given.pop("variables", {})
        started.append(
            subprocess.Popen(
                [sys.executable, "-u", script, *words],
                env={**os.environ, "LOCAL_RANK": "1", warm_start.FOLDER: str(folder), **variables},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def forked_for(folder: Path, process: subprocess.Popen) -> int:
    """Return the process that was forked for a client."""
    place = folder / f"{process.pid}.forked"
    until(place.exists)
    return int(until(place.read_text))


def parent(process: int) -> int:
    """Return the process that started another, or took it over."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_program_sees_what_it_was_started_with(rank, tmp_path):
    started = rank(
        SEES, "a word", "--flag", cwd=tmp_path, stdin=subprocess.PIPE, variables={"VARIABLE": "x"}
    )
    shown, said = started.communicate("input", timeout=60)
    assert (started.returncode, said) == (7, "said")
    seen = json.loads(shown)
    assert seen.pop("parent") != os.getpid()
    assert seen == {
        "argv": [str(tmp_path / "script.py"), "a word", "--flag"], "folder": str(tmp_path),
        "variable": "x", "warm": True, "main": "__main__", "read": "input", "rank": "1",
    }  # fmt: skip


def test_a_module_is_found_by_the_path_of_the_process(rank, tmp_path):
    (tmp_path / "its").mkdir()
    (tmp_path / "its" / "recipes.py").write_text("print('its own')")
    path = warm_start.path_with(tmp_path / "its")
    started = rank("import recipes", variables={"PYTHONPATH": path})
    assert started.communicate(timeout=60) == ("its own\n", "")


def test_a_descriptor_that_is_handed_down_keeps_its_number(rank):
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    started = rank(f"import os; os.write({writes}, b'through')", pass_fds=[writes])
    os.close(writes)
    assert started.wait(timeout=60) == 0
    with open(reads, "rb") as file:
        assert file.read() == b"through"


def test_a_stream_is_as_its_descriptor_is_now(rank):
    """The server's own go to a file; that of a pipe cannot be sought."""
    started = rank("import sys; sys.stdout.reconfigure(errors='replace'); print(sys.stdout.errors)")
    assert started.communicate(timeout=60) == ("replace\n", "")


def started_with(interrupt, rank) -> subprocess.Popen:
    """Start a program where an interrupt is handled so; a shell's background jobs ignore it."""
    here = signal.signal(signal.SIGINT, interrupt)
    try:
        return rank(WAITS)
    finally:
        signal.signal(signal.SIGINT, here)


def test_a_signal_reaches_the_program(rank):
    started = started_with(signal.default_int_handler, rank)
    assert started.stdout.readline() == "False\n"
    started.terminate()
    assert started.communicate(timeout=60)[0] == "told\n"
    assert started.returncode == 3


def test_an_interrupt_that_is_ignored_stays_so(rank):
    started = started_with(signal.SIG_IGN, rank)
    assert started.stdout.readline() == "True\n"


def test_an_interrupt_reaches_a_program_that_no_longer_ignores_it(rank):
    handles = WAITS.replace("SIGTERM, told", "SIGINT, told")
    started = started_with(signal.SIG_IGN, lambda _: rank(handles))
    assert started.stdout.readline() == "False\n"
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=60)[0] == "told\n"
    assert started.returncode == 3


def test_the_program_dies_with_the_process_that_stands_for_it(rank, server):
    started = rank(WAITS)
    forked = forked_for(server, started)
    assert running(forked)
    started.kill()
    assert started.wait(timeout=60) == -signal.SIGKILL
    until(lambda: not running(forked))


def test_a_program_that_dies_of_a_signal_is_seen_to(rank):
    started = rank("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert started.wait(timeout=60) == -signal.SIGKILL


def test_what_a_program_starts_by_multiprocessing_is_forked_too(rank):
    code = """
import multiprocessing, sys
def child(queue):
    queue.put("wave" in sys.modules)
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
        print(process.exitcode)
"""
    assert rank(code).communicate(timeout=120)[0].split() == ["True", "0", "True", "0"]


def test_other_programs_start_by_themselves():
    code = "import sys; print('longhaul_warm_start' in sys.modules, 'nemo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_the_server_is_not_below_the_process_that_started_it(rank):
    with a_folder() as folder:
        started = rank(WAITS, folder=folder)
        serving = parent(forked_for(folder, started))
        kill_tree(started.pid)
        assert parent(serving) != started.pid
        assert running(serving)
        os.kill(serving, signal.SIGKILL)


def test_a_server_that_dies_ends_what_it_forked_and_is_not_waited_for(rank):
    with a_folder() as folder:
        started = rank(WAITS, folder=folder)
        forked = forked_for(folder, started)
        os.kill(parent(forked), signal.SIGKILL)
        assert "warm-start server of the tests has ended" in started.communicate(timeout=60)[1]
        assert started.returncode == 70
        until(lambda: not running(forked))
        again = rank(WAITS, folder=folder)
        assert "warm-start server of the tests has ended" in again.communicate(timeout=60)[1]
        assert again.returncode == 70


def test_nothing_is_left_of_an_owner_that_was_killed(rank):
    with a_folder() as folder, subprocess.Popen("cat", stdin=subprocess.PIPE) as owner:
        (folder / "owner").write_text(str(owner.pid))
        forked = forked_for(folder, rank(WAITS, folder=folder))
        owner.kill()
        until(lambda: not running(forked) and not folder.exists())


@pytest.mark.parametrize(
    ("module", "said"), [("no_such_module", "No module named"), ("eval", "would be this server's")]
)
def test_a_server_that_cannot_begin_says_why(rank, module, said):
    with a_folder(module) as folder:
        started = rank(WAITS, folder=folder, variables={"PYTHONPATH": warm_start.path_with()})
        assert said in started.communicate(timeout=60)[1]
        assert started.returncode == 70


def test_a_start_that_was_killed_on_the_way_is_begun_anew(rank):
    with a_folder() as folder:
        killed = [sys.executable, "-c", STARTS.format(then=KILLED), warm_start.HOOK, folder]
        done = subprocess.run(killed, check=False)
        assert done.returncode == -signal.SIGKILL
        assert rank("print('served')", folder=folder).communicate(timeout=60) == ("served\n", "")


def test_a_server_that_cannot_be_started_is_told_and_tried_again(rank):
    with a_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-c", STARTS.format(then=NO_MEMORY), warm_start.HOOK, folder],
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 70
        assert "it did not start: OSError: [Errno 12] no memory" in done.stderr
        assert rank("print('served')", folder=folder).communicate(timeout=60) == ("served\n", "")


def test_a_client_that_dies_while_it_asks_leaves_nothing_open(rank):
    with a_folder() as folder:
        opened = Path(f"/proc/{parent(forked_for(folder, rank(WAITS, folder=folder)))}/fd")
        before = len(os.listdir(opened))
        with open(os.devnull) as nothing, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "socket"))
            socket.send_fds(client, [(100).to_bytes(8, "big")], [nothing.fileno()] * 3)
        served = rank("print('served after it')", folder=folder)
        assert served.communicate(timeout=60)[0] == "served after it\n"
        until(lambda: len(os.listdir(opened)) == before, timeout_seconds=30)


def test_a_client_that_is_killed_at_once_is_not_waited_for(rank, slow_server):
    started = rank(WAITS, folder=slow_server, variables={"SLURM_STEP_ID": "0"})
    forked = forked_for(slow_server, started)
    started.kill()
    served = rank("print('served')", folder=slow_server)
    assert served.communicate(timeout=60) == ("served\n", "")
    until(lambda: not running(forked))


@pytest.mark.parametrize("variables", [{}, {"SLURM_STEP_ID": "0"}], ids=["alone", "in a step"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_at_once_is_not_lost(rank, slow_server, number, variables):
    def start(_: str) -> subprocess.Popen:
        return rank("import time; time.sleep(600)", folder=slow_server, variables=variables)

    started = started_with(signal.default_int_handler, start)
    forked_for(slow_server, started)
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == -number


def test_what_ends_with_its_worker_is_counted(tmp_path, monkeypatch):
    (tmp_path / "12.forked").write_text("13")

    def end() -> None:
        (tmp_path / "cpu").write_text("7.50 tests/a.py::one (call)\n")
        (tmp_path / "12.forked").unlink()

    monkeypatch.setenv(warm_start.FOLDER, str(tmp_path))
    later = threading.Timer(0.3, end)
    later.start()
    assert warm_start.computed() == [("tests/a.py::one (call)", 7.5)]
    monkeypatch.setattr(warm_start, "WAIT_SECONDS", 0.1)
    (tmp_path / "14.forked").write_text("15")  # one that does not end
    assert warm_start.computed() == [("tests/a.py::one (call)", 7.5)]
