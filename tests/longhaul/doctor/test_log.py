# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor log`: faults as libraries, drivers and Slurm write them, broken or not."""

import json
import os
import textwrap

import pytest

from longhaul.doctor.logs.kinds import KINDS
from longhaul.doctor.logs.reader import read_text
from tests.longhaul.commands.test_status import make_run
from tests.longhaul.doctor.test_spike_checks import a_run

WATCHDOG = (
    "[E626 05:06:30.929096625 ProcessGroupNCCL.cpp:632] [PG ID 4 PG GUID 9(cp) Rank 2] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=120049, OpType=_ALLGATHER_BASE, "
    "NumelIn=16384000, NumelOut=131072000, Timeout(ms)=1800000) ran for 1800065 milliseconds "
    "before timing out."
)
STUCK = (
    "[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring "
    "enqueued collectives."
)
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process "
    "exited or there was a network error, NCCL version 2.21.5"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 4.31 GiB is free. Including non-PyTorch memory, this process "
    "has 74.79 GiB memory in use. Of the allocated memory 70.02 GiB is allocated by PyTorch, and "
    "1.11 GiB is reserved by PyTorch but unallocated."
)
NAN = (
    " iteration      120/    1000 | consumed samples:          960 | lm loss: {} | loss scale: 1.0 "
    "| grad norm: {} | number of skipped iterations:   0 | number of nan iterations:   {} |"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-03-15T18:00:46 DUE TO TIME LIMIT ***"
)
LINES = (
    ("device", OOM),
    ("device", "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED"),
    ("device", "cuDNN Error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("device", "RuntimeError: Triton Error [CUDA]: out of memory"),
    ("device", "cublaslt_gemm.cu:450 in function cublas_gemm: cuBLAS Error: the resource "
     "allocation failed"),
    ("device", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB."),
    ("device", "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory trying to allocate 42 bytes."),
    ("device", "terminate called after throwing an instance of 'c10::OutOfMemoryError'"),
    ("library", "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
     "`cublasCreate(handle)`"),
    ("library", "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    ("kernel", "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
     "147456, Hardware limit: 101376."),
    ("nccl_memory", "n1:2314:2410 [5] transport/nvls.cc:160 NCCL WARN Cuda failure 2 'out of "
     "memory'"),
    ("pinned", "could not allocate pinned host memory of size: 34359738368"),
    ("host", "pyarrow.lib.ArrowMemoryError: malloc of size 8589934592 failed"),
    ("host", "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array"),
    ("shared", "RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)"),
    ("killed", "The node was low on resource: memory. Container trainer was using 90Gi"),
    ("killed", "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4242,uid=0"),
    ("library", "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at Allocator.cpp"),
    ("illegal", "RuntimeError: CUDA error: the launch timed out and was terminated"),
    ("illegal", "RuntimeError: CUDA error: an illegal instruction was encountered"),
    ("hardware", "NVRM: GPU at 0000:0e:00: a double-bit ECC error was detected"),
    ("killed", "slurmstepd: error: Exceeded job memory limit at some point."),
    ("killed", "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit."),
    ("shared", "OSError: [Errno 28] No space left on device: '/dev/shm/nccl-abc'"),
    ("timeout", WATCHDOG),
    ("timeout", "[E ProcessGroupNCCL.cpp:456] [Rank 3] Watchdog caught collective operation "
     "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1808499 "
     "milliseconds before timing out."),
    ("timeout", "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
     "1800000ms for recv operation to complete"),
    ("timeout", "RuntimeError: Rank 3 failed to pass monitoredBarrier in 1800000 ms"),
    ("stuck", STUCK),
    ("stuck", "[F620 PG.cpp:1536] [PG ID 0 PG GUID 0(default_pg) Rank 0] Terminating the process "
     "after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."),
    ("peer", REMOTE),
    ("peer", "n1:2314:2410 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by "
     "remote peer n2.local<40932>"),
    ("peer", "[E socket.cpp:922] [c10d] The client socket has timed out after 60s while trying "
     "to connect to (n1, 29500)."),
    ("network", "n1:2314:2500 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from "
     "peer 10.0.0.7<4242> with status=12 opcode=0 len=0 vendor err 129 (Recv)"),
    ("not_finite", NAN.format("nan", "nan", 0)),
    ("not_finite", NAN.format("2.5E+00", "1.2", 1)),
    ("not_finite", "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3 at "
     "iteration #3 invocation #2 (message='found NaN in local grad norm for bucket #0')"),
    ("not_finite", "step 12/40  loss nan  lr 1.00e-05  2,000 tokens/s/rank  1.00 s"),
    ("not_finite", "LossBrokeError: step 12: the norm of the gradient is inf; run again"),
    ("not_finite", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.1}"),
    ("not_finite", "RuntimeError: The total norm of order 2.0 for gradients is non-finite, so it "
     "cannot be clipped."),
    ("disk", "error: /data/x: the file system is full; make room, or name a place on another"),
    ("disk", "OSError: [Errno 122] Disk quota exceeded: '/data/ckpt'"),
    ("files", "OSError: [Errno 116] Stale file handle: '/nfs/ckpt/a'"),
    ("illegal", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("illegal", "NVRM: Xid (PCI:0000:0e:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault"),
    ("assertion", "Indexing.cu:1292: indexSelectLargeIndex: block: [33,0,0], thread: [64,0,0] "
     "Assertion `srcIndex < srcSelectDimSize` failed."),
    ("hardware", "NVRM: Xid (PCI:0000:0e:00): 79, pid='<unknown>', GPU has fallen off the bus."),
    ("hardware", "RuntimeError: CUDA error: uncorrectable NVLink error detected during execution"),
    ("hardware", "nvidia-fabricmanager: detected NVSwitch fatal error SXid (PCI:0000:c4:00.0): "
     "20034, LTSSM Fault Up"),
    ("time_limit", TIME_LIMIT),
    ("preempted", TIME_LIMIT.replace("TIME LIMIT", "PREEMPTION")),
    ("node_lost", TIME_LIMIT.replace("TIME LIMIT", "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")),
    ("cancelled", TIME_LIMIT.replace(" DUE TO TIME LIMIT", "")),
    ("nccl", "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, internal error - please "
     "report this issue to the NCCL developers, NCCL version 2.18.5"),
    ("nccl", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"),
    ("driver", "CUDA error: no kernel image is available for execution on the device"),
    ("driver", "RuntimeError: CUDA error: invalid device ordinal"),
    ("crash", "srun: error: n1: task 3: Segmentation fault (core dumped)"),
    ("mismatch", "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
     "collective: CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE)"),
)  # fmt: skip


def word_wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, break_on_hyphens=False)


def hard_wrapped(line: str, width: int) -> list[str]:
    return [line[at : at + width] for at in range(0, len(line), width)]


WRITTEN = {
    "whole": lambda line: [line],
    "with a time": lambda line: [f"2025-06-26 05:14:36,393 {line}"],
    "in colours": lambda line: ["\x1b[31m" + line.replace(" ", "\x1b[0m \x1b[1m", 1)],
    "broken between words": lambda line: word_wrapped(line, 80),
    "broken within words": lambda line: hard_wrapped(line, 80),
    "broken below a rank": lambda line: [f"[rank3]: {one}" for one in hard_wrapped(line, 80)],
    "broken below srun's task": lambda line: [f" 3: {one}" for one in word_wrapped(line, 80)],
    "broken in a box": lambda line: [f"\u2502 {one:<80} \u2502" for one in word_wrapped(line, 80)],
    "broken below a container's time": lambda line: [
        f"2025-06-26T05:14:36.123456Z stderr F {one}" for one in word_wrapped(line, 80)
    ],
}


@pytest.mark.parametrize("way", WRITTEN)
def test_each_fault_is_known_in_whatever_way_its_line_is_written(way):
    unknown = []
    for kind, line in LINES:
        lines = WRITTEN[way](line)
        log = read_text("\n".join(["step 1/10  loss 2.5", *lines, "step 2/10  loss 2.4", ""]))
        if [fault.kind for fault in log.faults] != [kind]:
            unknown.append((kind, line, log.faults))
        elif not 2 <= log.faults[0].number < 2 + len(lines):
            unknown.append((kind, line, log.faults[0].number))
    assert unknown == []
    assert {kind for kind, _ in LINES} == {kind.name for kind in KINDS} - {"sigkill"}


@pytest.mark.parametrize(
    "line",
    [
        NAN.format("2.5E+00", "1.2", 0),
        "check_for_nan_in_loss_and_grad ........ True",
        "Epoch 0: 3%| 5/20 [2:12:19<76:15:08, loss=nan, v_num=, reduced_train_loss=3.910]",
        "best_val_loss: inf",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "To avoid out of memory errors set --micro-batch-size",
        "ECC: enabled; Uncorrectable errors: 0",
        "Requeue on preemption: enabled",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800",
        "signal handler for SIGTERM installed",
    ],
)
def test_an_ordinary_line_is_not_a_fault(line):
    assert read_text(line).faults == ()


def test_the_watchdog_s_group_sequence_number_operation_rank_and_times_are_shown(answer, tmp_path):
    log = tmp_path / "a log.out"
    log.write_text(f"[rank7]:{STUCK}\n[rank10]:{WATCHDOG}\n")
    said = answer("doctor", "log", log).out
    assert said.startswith("line 2, rank 10: a collective reached its timeout")
    stated = "group cp (ID 4), sequence number 120049, operation _ALLGATHER_BASE, elapsed 1,800 s, "
    assert stated + "timeout 1,800 s" in said
    assert "`longhaul doctor hang --run RUN`" in said
    assert "follows from it: line 1, rank 7: NCCL's monitor ended a rank" in said
    assert "memory" not in said


def test_the_group_is_that_of_the_rank_s_next_line_where_the_first_has_none(answer, tmp_path):
    older = WATCHDOG.replace("[PG ID 4 PG GUID 9(cp) Rank 2]", "[Rank 2]")
    (tmp_path / "log").write_text(
        f"[rank2]:{older}\n[rank2]:[E626 05:06:31.1 ProcessGroupNCCL.cpp:1664] [PG 5 Rank 2] "
        "Exception (either an error or timeout) detected by watchdog at work: 120049, last "
        "enqueued NCCL work: 120051, last completed NCCL work: 120048.\n"
    )
    (fault,) = json.loads(answer("doctor", "log", tmp_path / "log", "--json").out)["faults"]
    assert (fault["details"]["group"], fault["ranks"]) == ("5", [2])
    assert fault["details"]["last completed"] == "120048"


def test_the_cause_is_first_and_what_follows_from_it_is_said_as_that(answer, tmp_path):
    log = tmp_path / "job.out"
    log.write_text(
        f"[rank0]: {REMOTE}\n[rank1]: {REMOTE}\n[rank3]: {OOM}\n[rank2]:{WATCHDOG}\n"
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-03-15T18:00:46 ***\n"
    )
    said = [line for line in answer("doctor", "log", log).out.splitlines() if "line " in line]
    assert [line.partition(": ")[0] for line in said] == [
        "line 3, rank 3",
        *["follows from it"] * 3,
    ]
    assert "line 1, ranks 0-1, 2 times: another rank ended" in said[2]
    assert f"`longhaul doctor oom --factory NAME --log {log}`" in answer("doctor", "log", log).out


@pytest.mark.parametrize(
    ("lines", "kinds", "relation"),
    [
        ([NAN.format("nan", "nan", 0), OOM], ["not_finite", "device"], "apart from it"),
        ([NAN.format("nan", "nan", 0), REMOTE], ["not_finite", "peer"], "may follow from it"),
        ([WATCHDOG, TIME_LIMIT], ["timeout", "time_limit"], "follows from it"),
        ([TIME_LIMIT, WATCHDOG], ["time_limit", "timeout"], "follows from it"),
        (["NVRM: Xid (PCI:0000:0e:00): 48, pid=9, name=python, DBE",
          "CUDA error: an illegal memory access was encountered"],
         ["hardware", "illegal"], "follows from it"),
    ],
)  # fmt: skip
def test_of_two_faults_the_earlier_is_the_cause_unless_it_can_only_follow(lines, kinds, relation):
    faults = read_text("\n".join(lines)).faults
    assert [fault.kind for fault in faults] == kinds
    assert faults[1].relation(faults[0]) == relation


def test_rank_iteration_file_and_number_of_a_fault_are_shown():
    text = "\n".join(
        [
            NAN.format("nan", "nan", 0),
            "[rank5]: OSError: [Errno 28] No space left on device: '/data/step=8/model.pt'",
            "NVRM: Xid (PCI:0000:0e:00): 79, pid=1, GPU has fallen off the bus.",
            TIME_LIMIT,
        ]
    )
    faults = {fault.kind: fault for fault in read_text(text).faults}
    assert faults["not_finite"].details == {"iteration": "120"}
    assert faults["disk"].details == {"file": "/data/step=8/model.pt"}
    assert faults["disk"].ranks == (5,)
    assert faults["hardware"].details["Xid"] == "79 (the GPU has fallen off the bus)"
    assert faults["time_limit"].details["job"] == "7"


def test_a_log_without_a_known_fault_shows_its_last_errors_and_no_remedy(answer, tmp_path):
    log = tmp_path / "job.out"
    log.write_text("step 1/10  loss 2.5\nKeyError: 'text'\nbye\n")
    said = answer("doctor", "log", log)
    assert said.code == 0, said.err
    assert said.out == (
        "no known fault in 3 lines\nthe last lines that look like an error:\n"
        "  line 2: KeyError: 'text'\n"
    )
    log.write_text("step 1/10  loss 2.5\n")
    assert "no line looks like an error" in answer("doctor", "log", log).out
    assert "`longhaul doctor log` reads logs" in answer("doctor", "hang", log).error()
    assert "is not a file" in answer("doctor", "log", tmp_path).error()


def test_of_several_logs_the_cause_is_found_in_the_other_rank_s(answer, tmp_path):
    first, second = tmp_path / "rank_0.log", tmp_path / "rank_1.log"
    first.write_text(f"{REMOTE}\n")
    second.write_text(f"starting\n{OOM}\n")
    said = answer("doctor", "log", first, second).out
    assert said.startswith(f"{second}: line 2: GPU memory ran out")
    assert f"follows from it: {first}: line 1: another rank ended" in said


def launched(run, stage: str, text: str):
    folder = run / "launch" / "experiments" / "title" / "title_1" / stage / "nemo_run" / "0"
    folder.mkdir(parents=True)
    (folder / "combined.log").write_text(text)
    return run


def test_the_doctor_of_a_run_reads_the_output_of_a_stage_that_failed(answer, tmp_path):
    run = launched(make_run(tmp_path / "run"), "tiny_2k", f"[rank1]: {OOM}\n")
    (run / "stages" / "tiny_2k" / "outcome").write_text("failed rank 1 ended\n")
    said = answer("doctor", "run", run)
    assert said.code == 1
    assert "line 1, rank 1: GPU memory ran out" in said.out
    stages = json.loads(answer("doctor", "run", run, "--json").out)["stages"]
    assert [stage["log"] and stage["log"]["faults"][0]["kind"] for stage in stages] == [
        None, "device",
    ]  # fmt: skip


def test_the_doctor_of_a_run_reads_what_nccl_wrote_to_files_of_the_stage(answer, tmp_path):
    run = launched(make_run(tmp_path / "run"), "tiny_2k", "starting\n")
    folder = run / "stages" / "tiny_2k"
    (folder / "outcome").write_text("failed rank 1 ended\n")
    network = dict(LINES)["network"]
    now, before = folder / "nccl_n1_77.log", folder / "nccl_n1_66.log"
    now.write_text(f"{network}\n")
    before.write_text(f"{OOM}\n")
    os.utime(before, (0, 0))  # of an earlier job
    stages = json.loads(answer("doctor", "run", run, "--json").out)["stages"]
    faults = stages[1]["log"]["faults"]
    assert [(fault["kind"], fault["log"]) for fault in faults] == [("network", str(now))]


def test_the_doctor_of_hangs_reads_the_output_where_no_rank_wrote_a_dump(answer, tmp_path):
    run = launched(a_run(tmp_path / "run"), "long", f"[rank2]:{WATCHDOG}\n")
    said = answer("doctor", "hang", run).out
    assert "line 1, rank 2: a collective reached its timeout" in said
    assert "sequence number 120049" in said
    assert "has no dump in its folder" in said
