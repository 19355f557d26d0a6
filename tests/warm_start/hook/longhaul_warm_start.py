# SPDX-License-Identifier: Apache-2.0
"""Hand a starting Python process over to one that is forked from the warm-start server.

The server (`tests/warm_start/server.py`) has imported NeMo and Megatron-Core. This process keeps
its process number, its parent and its environment, which torchrun, srun and the tests look at: it
forwards the signals that it receives and ends as the forked process ends. When it is killed, the
server kills the forked process.

Only the standard library, and of that only what is used: this runs at the start of every Python.
"""

import os
import sys

FOLDER = "LONGHAUL_WARM_START"
"""Environment variable: the folder of the server's socket, log and lock."""
MORE = "LONGHAUL_WARM_START_MORE"
"""Environment variable: what imports torch alone is forked too."""
NO_SERVER = 70
"""Exit code where the server has ended; its log is in the message."""

RUNNER = "nemo_run.core.runners.fdl_runner"
SUB_COMMANDS = ("run", "pretrain", "evaluate")
"""What of the command line starts ranks; the rest is tested as it starts, in what it loads too."""
LOAD_TORCH = (
    "adopt", "export", "import", "mix", "prepare", "probe", "rehearse", "rope", "ruler",
    "tokenizers",
)  # fmt: skip
"""Commands that import torch or transformers; for one that does not, a fork takes longer."""
LOAD_TORCH_TOO = ("torch", "transformers", "recipes.shipped", "rope.rotary")
"""Names of modules by which code that is given on the command line is known to do so."""
READ_AT_IMPORT = ("NEMORUN_HOME", "HF_HOME")
"""Variables that libraries read when they are imported: the server has none of them."""
MULTIPROCESSING = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")


def hand_over() -> None:
    """Replace this process by a forked one if it would import NeMo; then it does not return."""
    words = _after_options(sys.orig_argv[1:])
    # The folder is removed at the end of the tests: what outlives them starts by itself.
    if _imports_nemo(words) and os.path.isdir(os.environ[FOLDER]):
        _stand_in()


def _after_options(words: list[str]) -> list[str]:
    """Return the words from `-m`, `-c` or the script on."""
    for at, word in enumerate(words):
        if word in ("-m", "-c") or not word.startswith("-"):
            before = words[at - 1] if at else ""
            if before in ("-W", "-X"):
                continue
            return words[at:]
    return []


def _imports_nemo(words: list[str]) -> bool:
    """Whether a process is a rank, a command, or what `multiprocessing` starts for them."""
    if not words or any(name in os.environ for name in READ_AT_IMPORT):
        return False
    if MORE in os.environ and _loads_torch(words):
        return True
    if words[0] == "-c":
        return words[1].startswith(MULTIPROCESSING)
    if words[0] == "-m" and words[1] == "longhaul.cli":
        return words[2:3] != [] and words[2] in SUB_COMMANDS
    if os.path.basename(words[0]) == "longhaul":
        return words[1:2] != [] and words[1] in SUB_COMMANDS
    return "LOCAL_RANK" in os.environ or words[:2] == ["-m", RUNNER]


def _loads_torch(words: list[str]) -> bool:
    """Whether a process is a command, or runs code of a page, that would import torch."""
    if words[0] == "-c":
        return any(name in words[1] for name in LOAD_TORCH_TOO)
    command = words[2:3] if words[:2] == ["-m", "longhaul.cli"] else words[1:2]
    if words[0].endswith("/longhaul") or words[0] == "-m":
        return command != [] and command[0] in LOAD_TORCH
    return words[0].endswith(".py")


def _stand_in() -> None:
    """Send the server all that makes this process; wait for the forked one's end, and end so."""
    import contextlib
    import json
    import select
    import signal
    import socket

    folder = os.environ[FOLDER]
    forwarded = {
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT,
    }  # fmt: skip
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    ignored = {number for number in forwarded if signal.getsignal(number) == signal.SIG_IGN}
    server = _connect(folder)
    descriptors = sorted(
        int(name) for name in os.listdir("/proc/self/fd")
        if _is_open(int(name)) and int(name) != server.fileno()
    )  # fmt: skip
    request = json.dumps(
        {
            "process": os.getpid(),
            "argv": sys.orig_argv,
            "unbuffered": "-u" in sys.orig_argv or "PYTHONUNBUFFERED" in os.environ,
            "environment": dict(os.environ),
            "descriptors": descriptors,
            "mask": sorted(mask),
            "ignored": sorted(ignored),
        }
    ).encode()
    reply = server.makefile("rb")
    try:
        here = os.open(".", os.O_PATH)
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [here, *descriptors])
        server.sendall(request)
        forked = int(reply.readline())
    except (OSError, ValueError):
        _no_server(folder)
    group = "SLURM_STEP_ID" in os.environ  # Slurm signals every process of a step

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(forked, number) if group else os.kill(forked, number)

    for number in forwarded:  # one that is ignored too: the program may handle it after all
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    # Python runs a handler between its own steps: one whose signal comes just before a wait runs
    # after it, so no wait is long.
    while not select.select([server], [], [], 0.2)[0]:
        pass
    try:
        status = int(reply.readline())
    except (OSError, ValueError):
        _no_server(folder)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connect(folder: str):
    """Return a connection to the server; the first to ask starts it."""
    import fcntl
    import socket

    connection = socket.socket(socket.AF_UNIX)
    address = os.path.join(folder, "socket")
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            _start(folder, address)
    try:
        connection.connect(address)
    except OSError:
        _no_server(folder)
    return connection


def _start(folder: str, address: str) -> None:
    """Start the server, which takes over a socket that already listens.

    The socket gets its address when the server runs: a start that was killed is begun anew.
    """
    import contextlib
    import socket
    import subprocess

    plain = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    kept = (
        "HOME", "PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONDONTWRITEBYTECODE",
        "TORCH_CUDA_ARCH_LIST",  # the server imports Megatron-Core too (data.cuda_extension)
    )  # fmt: skip
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {**plain, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Of its own: torch would wait for ever for the lock that a killed process left elsewhere.
    environment["TORCH_EXTENSIONS_DIR"] = os.path.join(folder, "extensions")
    program = os.path.join(os.path.dirname(os.path.dirname(__file__)), "server.py")
    part = f"{address}.part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)
    with socket.socket(socket.AF_UNIX) as listener, open(os.path.join(folder, "log"), "wb") as log:
        listener.bind(part)
        listener.listen(64)
        # By a child that ends: who kills this process and all below it does not mean the server.
        # It has the lock too, and holds it to its end.
        between = os.fork()
        if between == 0:
            try:
                subprocess.Popen(
                    [sys.executable, program, folder, str(listener.fileno())],
                    env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=[listener.fileno()], start_new_session=True,
                )  # fmt: skip
                os.rename(part, address)
            except BaseException as error:
                log.write(f"it did not start: {type(error).__name__}: {error}\n".encode())
                log.flush()
                os._exit(1)
            os._exit(0)
        if os.waitpid(between, 0)[1] != 0:
            _no_server(folder)


def _is_open(descriptor: int) -> bool:
    """Whether a descriptor is one that this process was started with, not of a listing just read.

    Those that Python opens itself are closed at an exec.
    """
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _no_server(folder: str) -> None:
    """End this process with the end of the server's log."""
    try:
        with open(os.path.join(folder, "log"), "rb") as log:
            said = log.read()[-2000:].decode(errors="replace")
    except OSError as error:
        said = str(error)
    sys.stderr.write(f"the warm-start server of the tests has ended; the end of its log:\n{said}\n")
    sys.stderr.flush()
    os._exit(NO_SERVER)
