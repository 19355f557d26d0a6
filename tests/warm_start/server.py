# SPDX-License-Identifier: Apache-2.0
"""Import NeMo once, and fork from it the processes that the tests start.

    python tests/warm_start/server.py FOLDER LISTENER

`hook/longhaul_warm_start.py` sends a starting process over the socket: its words, environment,
signal mask, working folder and open descriptors. A fork becomes that process: it imports modules
by that process's own path, so the code that is tested is the tree's (or a clone's), never this
server's. The server imports what `FOLDER/modules` lists, libraries alone. It ends with the process
that `FOLDER/owner` names, and kills what it has forked.
"""

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import time
import types
from contextlib import suppress
from pathlib import Path

OURS = {"longhaul", "recipes", "custom_modules", "data", "slurm", "eval", "tests", "benchmarks"}
PIECE = 1 << 16
PR_SET_PDEATHSIG = 1
OWN = "tests/warm_start/server.py"
"""In the place of a test: what this process computes for all."""
CLIENTS, BETWEEN = 600, 700
"""Descriptors below the first are clients'; above the second they are on their way to one."""
FORKED_THREADS = {"jemalloc_bg_thd"}
"""Threads whose library starts them anew in a forked process."""


class Forked:
    """What a client sent, in the process that becomes it."""

    def __init__(self, request: dict, folder: int, descriptors: list[int]) -> None:
        self.request, self.folder, self.descriptors = request, folder, descriptors


class Server:
    """Forks a process for each client, and tells the client how that process ended."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder, self._listener = folder, listener
        self._selector = selectors.DefaultSelector()
        self._owner = os.pidfd_open(int((folder / "owner").read_text()))
        self._running: dict[int, tuple[int, socket.socket, dict]] = {}
        """Process: its descriptor, its client's connection, the client's request."""

    def serve(self) -> Forked | None:
        """Serve until the owner ends; return None then, and in a forked process what it becomes."""
        self._selector.register(self._owner, selectors.EVENT_READ, "owner")
        self._selector.register(self._listener, selectors.EVENT_READ, "client")
        while True:
            for key, _ in self._selector.select():
                if key.data == "owner":
                    return self._end_all()
                if key.data == "client":
                    if (forked := self._fork()) is not None:
                        return forked
                elif key.data in self._running:
                    self._end(key.data, killed=key.fileobj == self._running[key.data][1])

    def _fork(self) -> Forked | None:
        connection, _ = self._listener.accept()
        try:
            request, folder, descriptors = _received(connection)
        except (OSError, ValueError, EOFError):
            connection.close()  # the client was killed
            return None
        if threads := sorted(_threads() - FORKED_THREADS):
            raise RuntimeError(f"threads that a fork does not have: {', '.join(threads)}")
        reads, writes = os.pipe()
        server, process = os.getpid(), os.fork()
        if process == 0:
            os.setsid()
            _die_with(server)
            os.write(writes, b"1")
            os.close(reads)
            os.close(writes)
            self._close(connection)
            return Forked(request, folder, descriptors)
        for descriptor in (writes, folder, *descriptors):
            os.close(descriptor)
        # The client is told of a process whose group is there to be signalled, and so is `_end`.
        os.read(reads, 1)
        os.close(reads)
        ended = os.pidfd_open(process)
        self._running[process] = ended, connection, request
        self._place(request).write_text(str(process))
        self._selector.register(ended, selectors.EVENT_READ, process)
        self._selector.register(connection, selectors.EVENT_READ, process)
        with suppress(OSError):
            connection.sendall(f"{process}\n".encode())
        return None

    def _close(self, connection: socket.socket) -> None:
        """Close what is the server's, in a forked process.

        An object that is left behind would close its descriptor when it is collected: by then that
        number may be somebody else's.
        """
        connection.close()
        for ended, other, _ in self._running.values():
            os.close(ended)
            other.close()
        os.close(self._owner)
        self._listener.close()
        self._selector.close()

    def _place(self, request: dict) -> Path:
        """Return the file from which `tests.ranks.kill_tree` reads a client's forked process."""
        return self._folder / f"{request['process']}.forked"

    def _end(self, process: int, *, killed: bool) -> None:
        """Tell a client that its process has ended; end the process where the client was killed."""
        ended, connection, request = self._running.pop(process)
        if killed:
            # Slurm, which kills every process of a step, would have found those it had started.
            kill = os.killpg if "SLURM_STEP_ID" in request["environment"] else os.kill
            with suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
        _, status, usage = os.wait4(process, 0)
        test = request["environment"].get("PYTEST_CURRENT_TEST", OWN)
        _account(self._folder, test, usage.ru_utime + usage.ru_stime)
        self._selector.unregister(ended)
        self._selector.unregister(connection)
        self._place(request).unlink(missing_ok=True)
        os.close(ended)
        with suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        connection.close()

    def _end_all(self) -> None:
        """End with the owner; where it was killed, its folder is still there."""
        for process in list(self._running):
            self._end(process, killed=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _account(folder: Path, test: str, seconds: float) -> None:
    """Record what a process computed, with what it waited for, under the test it ran for."""
    with suppress(OSError), (folder / "cpu").open("a") as file:  # the owner may have ended
        file.write(f"{seconds:.2f} {test}\n")


def _die_with(server: int) -> None:
    """Have the kernel kill this forked process when the server ends: it would hold pipes open."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server:  # it has ended meanwhile
        os._exit(1)


def _threads() -> set[str]:
    """Return the names of this process's threads but for the main one."""
    tasks = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    return {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks}


def _taken_below(number: int) -> list[int]:
    """Open every free descriptor below a number; return them."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < number:
        taken.append(os.dup(taken[-1]))
    return taken


def _received(connection: socket.socket) -> tuple[dict, int, list[int]]:
    """Return a client's request, its working folder and its descriptors."""
    size, received, _, _ = socket.recv_fds(connection, 8, 250)
    try:
        folder, *descriptors = received
        left, pieces = int.from_bytes(size, "big"), []
        while left:
            pieces.append(connection.recv(min(left, PIECE)))
            if not pieces[-1]:
                raise EOFError
            left -= len(pieces[-1])
        return json.loads(b"".join(pieces)), folder, descriptors
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise


def become(forked: Forked, path: list[str], set_by_libraries: dict[str, str]) -> None:
    """Make this process the client's and run its program to the end.

    A signal that was forwarded meanwhile waits until the handlers and the streams are the client's.
    """
    request, environment = forked.request, forked.request["environment"]
    _take_descriptors(forked)
    os.environ.clear()
    os.environ.update(set_by_libraries | environment)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, unbuffered=request["unbuffered"])
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, unbuffered=request["unbuffered"])
    _take_rank(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    _run(request["argv"], path, environment)


def _take_descriptors(forked: Forked) -> None:
    """Give the client's descriptors the numbers that they have there."""
    import fcntl

    os.fchdir(forked.folder)
    moved = [fcntl.fcntl(received, fcntl.F_DUPFD, BETWEEN) for received in forked.descriptors]
    for received in (forked.folder, *forked.descriptors, 0, 1, 2):
        os.close(received)
    for here, there in zip(moved, forked.request["descriptors"], strict=True):
        os.dup2(here, there, inheritable=True)
        os.close(here)


def _stream(before: io.TextIOWrapper, *, unbuffered: bool) -> io.TextIOWrapper:
    """Return a stream to a descriptor as it is now; the one before knows the server's log file.

    Handlers of libraries write to that one, which is made to keep nothing back.
    """
    before.reconfigure(write_through=True, line_buffering=True)
    number = before.fileno()
    return io.TextIOWrapper(
        open(number, "wb", buffering=0 if unbuffered else -1, closefd=False),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=os.isatty(number) or before.errors == "backslashreplace",  # stderr always
        write_through=unbuffered,
    )


def _take_rank(environment: dict[str, str]) -> None:
    """Set what libraries, where they are imported, have read of the environment."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # not the server's in every process
    if torch := sys.modules.get("torch"):
        threads = environment.get("OMP_NUM_THREADS")
        torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    if rank_zero := sys.modules.get("lightning.fabric.utilities.rank_zero"):
        rank = environment.get("RANK", environment.get("SLURM_PROCID", 0))
        rank_zero.rank_zero_only.rank = int(rank)


def _run(argv: list[str], path: list[str], environment: dict[str, str]) -> None:
    """Run the program of a command line as the interpreter does, in this process."""
    words = argv[1:]
    while words[0] not in ("-m", "-c") and words[0].startswith("-"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    sys.orig_argv[:] = argv
    given = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    safe = bool(environment.get("PYTHONSAFEPATH"))
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[:] = [*([] if safe else [""]), *given, *path]
        exec(compile(words[1], "<string>", "exec"), program.__dict__)
        return
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[:] = [*([] if safe else [os.getcwd()]), *given, *path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    sys.path[:] = [*([] if safe else [os.path.dirname(os.path.realpath(words[0]))]), *given, *path]
    runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Import, listen, and in a forked process run what the client would have run."""
    folder, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    path = [part for part in sys.path if part != str(Path(__file__).parent)]
    sys.path[:] = path
    # A forked process inherits it: what is forwarded before it has its handlers is kept for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    before = dict(os.environ)
    low = _taken_below(CLIENTS)  # a library that opens a file gets a number that no client has
    for name in (folder / "modules").read_text().split():
        importlib.import_module(name)
    for descriptor in low:
        os.close(descriptor)
    if ours := OURS & set(sys.modules):
        raise RuntimeError(f"{sorted(ours)} would be this server's in every process, not its own")
    _account(folder, OWN, time.process_time())
    gc.collect()
    gc.freeze()  # a collection in a forked process does not copy the libraries' pages
    forked = Server(folder, listener).serve()
    if forked is not None:
        changed = dict(os.environ.items() - before.items())
        become(forked, path, changed)


if __name__ == "__main__":
    main()
