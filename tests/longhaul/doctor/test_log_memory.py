# SPDX-License-Identifier: Apache-2.0
"""Sentences of memory that ran out, as each library writes them."""

import pytest

from longhaul.doctor.logs.lines import BATCH, LONGEST
from longhaul.doctor.logs.reader import read, read_text

GIB, MIB = 2**30, 2**20

UP_TO_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 14.76 GiB "
    "total capacity; 11.35 GiB already allocated; 13.75 MiB free; 13.85 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
OF_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a "
    "total capacty of 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in "
    "use. Of the allocated memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by "
    "PyTorch but unallocated."
)
FROM_2_2 = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 3 has a "
    "total capacity of 31.47 GiB of which 1.73 GiB is free. Process 7 has 2.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 27.73 GiB memory in use. 30.00 GiB allowed; Of "
    "the allocated memory 9.08 GiB is allocated by PyTorch, with 1.20 GiB allocated in private "
    "pools (e.g., CUDA Graphs), and 17.35 GiB is reserved by PyTorch but unallocated."
)


def only(text: str):
    (one,) = read_text(text).faults
    return one


def test_the_form_in_brackets():
    assert only(UP_TO_2_0).kind == "device"
    one = only(UP_TO_2_0).sizes
    assert (one.gpu, one.asked) == (1, 2 * GIB)
    assert one.capacity == 14.76 * GIB
    assert one.free == 13.75 * MIB
    assert one.allocated == 11.35 * GIB
    assert one.unallocated == pytest.approx(2.5 * GIB)
    assert one.fragmented


def test_the_form_with_a_misspelt_capacity_where_the_process_goes_by_its_number():
    one = only(OF_2_1).sizes
    assert one.capacity == 14.75 * GIB
    assert one.in_use == 14.52 * GIB
    assert one.others == 0
    assert one.outside == pytest.approx(14.52 * GIB - 14.06 * GIB - 330.42 * MIB)
    assert not one.fragmented
    assert one.needed == pytest.approx(14.06 * GIB + 496 * MIB)


def test_the_form_with_pools_limits_and_another_process():
    one = only(FROM_2_2).sizes
    assert (one.gpu, one.allowed, one.others) == (3, 30 * GIB, 2 * GIB)
    assert one.in_use == 27.73 * GIB
    assert one.allocated == 9.08 * GIB
    assert not one.fragmented  # 17.35 GiB would not have held 22.78


def test_of_many_ranks_the_one_that_asked_for_most_is_taken_and_all_are_counted():
    one = only("\n".join([OF_2_1, UP_TO_2_0, OF_2_1]))
    assert (one.sizes.asked, one.number, one.count) == (2 * GIB, 2, 3)


@pytest.mark.parametrize(
    ("line", "kind", "asked"),
    [
        ("n1:7:9 [2] alloc.h:178 NCCL WARN Cuda failure 'out of memory'", "nccl_memory", None),
        ("n1:7:9 [3] NCCL WARN Cuda failure 2 'out of memory'", "nccl_memory", None),
        ("alloc.h:185 NCCL WARN Failed to CUDA calloc async 6291456 bytes", "nccl_memory", 6291456),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 "
         "bytes. Error code 12 (Cannot allocate memory)", "host", 8192),
        ("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you tried to "
         "allocate 4096 bytes.", "host", 4096),
        ("MemoryError", "host", None),
        ("RuntimeError: CUDA error: cudaHostAlloc failed: out of memory", "pinned", None),
        ("MemoryError: offload could not lock 0.50 GiB of host memory (CUDA error 2)", "pinned",
         None),
        ("MemoryError: offload needs 70 GiB of host memory or more, and its cap_gib is 64",
         "pinned", None),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "killed", None),
        ("kernel: Out of memory: Killed process 4242 (python) total-vm:1kB", "killed", None),
        ("failed (exitcode: -9) local_rank: 4 (pid: 24905) of binary: python", "sigkill", None),
        ("srun: error: n1: task 0: Exited with exit code 137", "sigkill", None),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", "sigkill", None),
        ("ERROR: Unexpected bus error: insufficient shared memory (shm)", "shared", None),
        ("RuntimeError: CUDA error: out of memory", "device", None),
        ("srun: error: node1: task 3: Killed", "sigkill", None),
        ("srun: error: n2: tasks 0-3,7: Killed", "sigkill", None),
        ("srun: error: n1: task 0: Out Of Memory", "killed", None),
        ("/var/spool/slurmd/job7/script: line 9: 4242 Killed     python x.py", "sigkill", None),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in StepId=1.0.", "killed", None),
        ("kernel: python invoked oom-killer: gfp_mask=0xcc0", "killed", None),
        ("kernel: Memory cgroup out of memory: Killed process 42 (python)", "killed", None),
        ("Cuda failure 2 'out of memory'", "nccl_memory", None),
        ("CUDA Error: out of memory", "device", None),
        ("RuntimeError: CUDA out of memory.", "device", None),
        ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
         "memory)", "device", None),
        ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory.", "device",
         None),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "device", None),
    ],
)  # fmt: skip
def test_what_other_allocators_write(line, kind, asked):
    one = only(f"step 1/10 loss 2.5\n{line}\n")
    assert (one.kind, one.sizes.asked, one.number) == (kind, asked, 2)


@pytest.mark.parametrize(
    "line",
    [
        "step 9/137  loss 2.5",
        "the job ended with exit code 0",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "NCCL INFO Channel 01 : 2[1040] -> 0[1020] via SHM/direct/direct",
        "pin_memory: true",
        "WARNING: oom_kill_group disabled by config",
        "memory.events: oom_kill 0",
        "srun: error: n1: task 0: Exited with exit code 1",
        "INFO: the validation killed no sample",
        "NCCL INFO Using /dev/shm for shared memory",
    ],
)
def test_an_ordinary_line_is_no_failure(line):
    assert read_text(line).faults == ()


FILLER = "step 1/10  loss 2.5\n"


@pytest.mark.parametrize("before", [BATCH - 3, BATCH - 25, 3 * BATCH + 17])
def test_a_failure_is_found_once_wherever_a_batch_of_lines_ends(before):
    text = FILLER * before + FROM_2_2 + "\n" + FILLER * 9
    one = only(text)
    assert (one.number, one.count, one.sizes.asked) == (before + 1, 1, 22.78 * GIB)
    assert only(text + FILLER * BATCH + UP_TO_2_0).count == 2


def test_a_failure_in_the_middle_of_a_very_long_line_is_found_and_the_line_is_cut():
    long = "0.5, " * LONGEST
    one = only(f"{FILLER}{long}{FROM_2_2}{long}\n{FILLER}")
    assert (one.number, one.count, one.sizes.asked, one.sizes.gpu) == (2, 1, 22.78 * GIB, 3)
    assert len(one.line) < LONGEST


def test_a_progress_bar_that_returns_to_its_line_hides_nothing():
    bar = "".join(f"\r{n}%|###   | exit" for n in range(100))
    one = only(f"{bar}\rRuntimeError: CUDA error: out of memory\n")
    assert (one.line, one.number) == ("RuntimeError: CUDA error: out of memory", 1)


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_an_empty_log_is_told_from_one_without_failures(tmp_path, content):
    log = tmp_path / "output.log"
    log.write_text(content)
    assert read([log]).empty
    log.write_bytes(b"\x00\xff garbage \xfe\n")
    assert not read([log]).empty
    assert read([log]).faults == ()


@pytest.mark.parametrize(("frames", "kind"), [(0, "pinned"), (3, "pinned"), (30, "device")])
def test_an_error_of_cuda_below_a_call_that_locks_memory_is_one_of_the_host(frames, kind):
    call = "    buffer = torch.empty(n, pin_memory=True)\n"
    one = only(call + "    a frame\n" * frames + "RuntimeError: CUDA error: out of memory")
    assert one.kind == kind
