# SPDX-License-Identifier: Apache-2.0
"""What a result depends on besides its recipe: versions, machine, code and environment.

Read from metadata, `/proc` and git, so nothing large is imported: a rank records it, and a command
compares it on another machine. No secret is recorded: of the environment only the variables below
are, none of whose names speaks of a key, and a text in which a line looks like a secret is withheld
and named instead.
"""

import os
import platform
import re
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[2]
PACKAGES = (
    "longhaul-recipes", "torch", "nemo_toolkit", "megatron-core", "nemo_run", "lightning",
    "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "triton", "transformer-engine",
    "flash-attn", "flash-attn-3", "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
)  # fmt: skip
"""Distributions that can change what is computed; those that are not installed are left out."""
ROOMS = ("custom_modules", "data", "eval", "longhaul", "recipes", "slurm")
VARIABLES = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_DISABLE_ADDR2LINE",
    "TORCH_DISTRIBUTED_DEBUG",
})  # fmt: skip
PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_", "UCX_")
SET_BY_MEGATRON = frozenset({"NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"})
"""Set from the recipe's attention backend when a model is built; it refuses any other value."""
NEVER = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[baprs]-|sk-)[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|://[^/\s:@]+:[^/\s@]+@"
    r"|(api_?key|secret|passw(or)?d|(access|auth|bearer)_?token)[\"']?\s*[:=]\s*[\"']?[^\s\"']{6,}",
    re.IGNORECASE,
)
"""A line that looks like a secret: known forms of keys, and values under such a name."""
LARGEST_DIFF = 2**20
"""Bytes of changes that are kept; of larger ones the SHA-256 and the names of the files are."""
GIT_SECONDS = 60
CHANGES_UNKNOWN = "git could not say what has changed"
"""Why the changes are withheld if git fails, or takes longer than `GIT_SECONDS`."""


def surroundings() -> tuple[dict[str, Any], bytes]:
    """Return versions, machine, code and environment, and the text of the code's changes."""
    found, changes = code()
    return {
        "versions": versions(),
        "machine": machine(),
        "code": found,
        "environment": environment(),
    }, changes


of_this_process = cache(surroundings)
"""The surroundings at the first call: while a process trains, its files may be edited."""


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, the driver and the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if cuda := _cuda_of_torch():
        found["cuda"] = cuda
    if driver := _first(r"NVRM version:.*?\s(\d+\.\d[\d.]*)", Path("/proc/driver/nvidia/version")):
        found["nvidia driver"] = driver
    return found


def machine() -> dict[str, Any]:
    """Return processor, cores and GPUs, each model with how many there are."""
    gpus: dict[str, int] = {}
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = _first(r"Model:\s*(.+)", file) or "unknown"
        gpus[model] = gpus.get(model, 0) + 1
    cpu = _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.machine()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "gpus": gpus,
    }


def environment() -> dict[str, str]:
    """Return the variables that change what is computed or how; never one that may be a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in VARIABLES or name.startswith(PREFIXES))
        and name not in SET_BY_MEGATRON
        and not NEVER.search(name)
        and not SECRET.search(value)
    }


def code(tree: Path = TREE) -> tuple[dict[str, Any], bytes]:
    """Return the commit of a checkout and how its files differ from it, and the changes.

        commit           empty without git, or if the folder is not a git checkout of its own
        changes_sha256   of `git diff` against the commit; empty if no tracked file differs
        changed_files    names of the tracked files that differ
        new_files        names and SHA-256 of files of the packages that git does not track
        withheld         why the text of the changes is not kept; empty if it is

    The changes are as `git apply` takes them. The installed files of a wheel have none of these:
    its version tells what it is.
    """
    found: dict[str, Any] = {
        "commit": "", "changes_sha256": "", "changed_files": [], "new_files": {}, "withheld": "",
    }  # fmt: skip
    if shutil.which("git") is None or not (tree / ".git").exists():
        return found, b""
    found["commit"] = (_git(tree, "rev-parse", "HEAD") or b"").decode().strip()
    if not found["commit"]:
        return found, b""
    changes = _git(tree, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
    names = _git(tree, "diff", "HEAD", "--name-only", "-z")
    new = _git(tree, "ls-files", "--others", "--exclude-standard", "-z", "--", *ROOMS)
    if changes is None or names is None or new is None:
        return found | {"withheld": CHANGES_UNKNOWN}, b""
    withheld = withheld_text("the changes", changes.decode(errors="replace"))
    if len(changes) > LARGEST_DIFF:
        withheld = f"the changes have {len(changes):,} bytes, and {LARGEST_DIFF:,} are kept"
    found |= {
        "changes_sha256": sha256(changes).hexdigest() if changes else "",
        "changed_files": [name for name in names.decode(errors="replace").split("\0") if name],
        "new_files": {
            name: sha256((tree / name).read_bytes()).hexdigest()
            for name in sorted(new.decode(errors="replace").split("\0"))
            if name.endswith((".py", ".yaml", ".jinja")) and (tree / name).is_file()
        },
        "withheld": withheld,
    }
    return found, b"" if withheld else changes


def withheld_text(what: str, text: str) -> str:
    """Return why a text is not recorded, with the line; empty if nothing in it looks secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        if SECRET.search(line):
            return f"line {number} of {what} looks like a secret"
    return ""


def _git(tree: Path, *words: str) -> bytes | None:
    """Return what git prints, None if it refuses or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *words],
            capture_output=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cuda_of_torch() -> str:
    """Return the CUDA release that the installed torch is built for, from its file of versions."""
    try:
        file = Path(str(distribution("torch").locate_file("torch/version.py")))
    except PackageNotFoundError:
        return ""
    return _first(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file)


def _first(pattern: str, file: Path) -> str:
    """Return the first match of a group in a file, empty if there is none or no such file."""
    try:
        found = re.search(pattern, file.read_text(errors="replace"), flags=re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
