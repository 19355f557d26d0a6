# SPDX-License-Identifier: Apache-2.0
"""The faults that a log may tell of: how each is written, what it means, what to do.

A pattern ignores case, and is matched with a sentence on one line whose words have one space
between them. Hints are in lower case without white space and digits: a line in which a pattern is
found contains one of them. The order matters: a line is of the first kind that fits.
"""

import re
from typing import NamedTuple

from recipes.planner.timeouts import ALLOCATOR

_NEAR = r".{0,300}?"
"""Text between two words of one sentence."""
_XID = r"\bS?Xid\b(?: ?\([^)]*\))?:?(?: errors?)?:? ?"
OOM = "`longhaul doctor oom --factory NAME --log FILE` compares it with the plan of the layout"
HANG = "`longhaul doctor hang --run RUN` reads the stacks and last collectives of all ranks"
HARDWARE = "`longhaul preflight` checks GPUs and links of a node"
STATUS = "`longhaul status RUN` shows what is saved; the same command resumes the stage"
SET_ALLOCATOR = f"PYTORCH_CUDA_ALLOC_CONF={ALLOCATOR}"


class Kind(NamedTuple):
    """One kind of fault."""

    name: str
    what: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    remedy: str
    more: str = ""
    """The command that sees more."""
    depth: int = 0
    """0 for a cause; a fault of a greater depth follows from one of a smaller."""
    ends: bool = True
    """Whether it ends the rank that wrote it."""


def _kind(name: str, what: str, hints: str, pattern: str, remedy: str, more: str = "",
          *, depth: int = 0, ends: bool = True) -> Kind:  # fmt: skip
    compiled = re.compile(pattern.replace("NEAR", _NEAR), re.IGNORECASE)
    return Kind(name, what, tuple(hints.split()), compiled, remedy, more, depth, ends)


KINDS = (
    _kind(
        "nccl_memory", "NCCL found no GPU memory",
        "outofmemory failedtocudac failedtocudam failedtocudah cumemcreate ncclunhandled "
        "unhandledcudaerror",
        r"Cuda failure (?:\d+ )?'out of memory'|NCCL WARN Failed to CUDA (?:host )?[cm]?alloc"
        r"|NCCL(?:NEAR)(?:UnhandledCudaError|unhandled cuda error)NEARout of memory"
        r"|NCCL WARNNEAR(?:cuMemCreate|cuMem\w+)NEARout of memory",
        "its buffers are outside PyTorch's memory, for each group of ranks: fewer groups, or "
        "NCCL_BUFFSIZE=2097152 (half of the default)",
        OOM,
    ),
    _kind(
        "pinned", "host memory could not be locked",
        "offloadcouldnotlock offloadneeds cudahostalloc cudahostregister pinmemory pin_memory "
        "pinnedmemory pinned_memory pinnedhostmemory page-lock pagelock cumemhostalloc "
        "cumemallochost mlock",
        r"offload (?:could not lock|needs NEARhost memory)"
        r"|cu(?:da|Mem)(?:HostAlloc|HostRegister|AllocHost)NEAR(?:fail|error|out of memory|invalid)"
        r"|(?:fail|error|out of memory)NEARcu(?:da|Mem)(?:HostAlloc|HostRegister|AllocHost)"
        r"|(?:pin|pinned)[ _](?:host )?memoryNEAR(?:fail|out of memory|cannot|error)"
        r"|(?:fail|cannot|could not)NEAR(?:pin|pinned)[ _](?:host )?memory"
        r"|page-?lockNEAR(?:fail|cannot)|(?:fail|cannot|could not)NEARpage-?lock"
        r"|\bmlock(?:all)?\b.{0,40}fail",
        "lift the limit of locked memory (ulimit -l unlimited, --ulimit memlock=-1), or pin less: "
        "model.config.offload.tensors=inputs, data.num_workers=0",
        OOM,
    ),
    _kind(
        "killed", "the kernel or the batch system killed a process: host memory ran out",
        "outofmemory lowonresource oom_kill oom-kill oomkill out_of_memory memorylimit "
        "memorycgroup term_memlimit",
        r"out of memory: Kill(?:ed)? process|\boom[-_]kill event|invoked oom-killer"
        r"|oom-kill:constraint|OOM ?Killed|(?<![_A-Z])OUT_OF_MEMORY\b|cgroup out[- ]of[- ]memory"
        r"|exceeded (?:job |step )?memory limit|srun: error: .{0,300}\btasks? [^:]+: Out Of Memory"
        r"|TERM_MEMLIMIT|exceeded memory limit|tasks have been OOM Killed|low on resource: memory",
        "request the node's whole memory (--mem=0 under Slurm), fewer loader processes "
        "(data.num_workers), and no asynchronous checkpoint "
        "(trainer.strategy.ckpt_async_save=false); `dmesg` on the node names the process",
        OOM,
    ),
    _kind(
        "shared", "shared memory (/dev/shm) ran out",
        "insufficientsharedmemory </torch_ /dev/shm buserror sigbus",
        r"insufficient shared memory|/dev/shmNEAR(?:No space|to \d+ bytes)"
        r"|No space leftNEAR/dev/shm|(?:object|file) </torch_"
        r"|\bBus error\b|Signal 7 \(SIGBUS\)|exit ?code *:? *\(?-7\b",
        "give the container more (--shm-size=16g, --ipc=host), or set data.num_workers=0",
    ),
    _kind(
        "kernel", "a kernel needs more shared memory or registers than the GPU has",
        "outofresource toomanyresources",
        r"OutOfResources?: |out of resource: |too many resources requested for launch",
        "the memory of the GPU is not the cause: take smaller blocks or fewer stages in that "
        "kernel, or another back end of attention",
    ),
    _kind(
        "host", "host memory ran out",
        "defaultcpuallocator notenoughmemory memoryerror bad_alloc [errno] cannotallocatememory "
        "unabletoallocate mallocofsize allocofsize allocation_failed",
        r"DefaultCPUAllocator: (?:can't|not enough)|not enough memory: you tried"
        r"|\bMemoryError\b|ArrowMemoryError|std::bad_alloc(?!: (?:out_of_memory|CUDA))"
        r"|\[Errno 12\]|Cannot allocate memory|Unable to allocate [\d.]+ [KMGT]iB"
        r"|m?alloc of size \d+ failed|HOST_ALLOCATION_FAILED",
        "request the node's whole memory (--mem=0 under Slurm), fewer loader processes "
        "(data.num_workers), and no asynchronous checkpoint "
        "(trainer.strategy.ckpt_async_save=false)",
        OOM,
    ),
    _kind(
        "device", "GPU memory ran out",
        "outofmemory out_of_memory triedtoallocate exceedallowed alloc_failed allocation_failed "
        "memoryallocation resource_exhausted insufficient_resources cudamalloc "
        "resourceallocationfailed failedtoallocat status_internal_error",
        r"\b(?:CUDA|HIP|Triton)\b[ \w]*(?:error|failure)\b.{0,80}?out of memory"
        r"|(?:CUDA|HIP) out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
        r"|OutOfMemoryError|Tried to allocate [\d.]+ \w+iB"
        r"|(?:CUBLAS|CUDNN|CUFFT|CUSOLVER|CUSPARSE|CURAND|CUBLASLT|NVSHMEM)\w*_ALLOC(?:ATION)?_FAILED"
        r"|DEVICE_ALLOCATION_FAILED|the resource allocation failed"
        r"|Allocation on device .{0,20}would exceed allowed memory"
        r"|bad_alloc: (?:out_of_memory|CUDA)|RESOURCE_EXHAUSTED|cuMemCreateNEARout of memory"
        r"|error: out of memory|cudaMalloc\w*.{0,40}(?:out of memory|fail)"
        r"|CU\w+_INSUFFICIENT_RESOURCES"
        r"|failed to allocateNEAR(?:device memory|GPU memory|from device)",
        "make the job smaller: recompute, tiled loss and MLP, more CP or TP, offload; set "
        f"{SET_ALLOCATOR}; end other programs on the GPU",
        OOM,
    ),
    _kind(
        "library", "a CUDA library failed, most often because GPU memory had run out",
        "not_initialized librarywasnotinitialized status_internal_error cufft_internal_error "
        "nvml_success",
        r"CU(?:BLAS|DNN|FFT|SOLVER|SPARSE|RAND)\w*_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b"
        r"|library was not initialized|NVML_SUCCESS == ",
        "see with nvidia-smi what holds the GPU's memory and make the job smaller; if memory is "
        "free, an earlier failed kernel or a wrong driver is the cause: CUDA_LAUNCH_BLOCKING=1",
        OOM,
    ),
    _kind(
        "hardware", "a GPU, its memory or a link failed",
        "xid uncorrectable nvlink ecc fallenoffthebus gpuislost hardwarestackerror",
        rf"{_XID}(?!(?:13|31|43|45)\b)\d+|uncorrectable (?:ECC|NVLink)"
        r"|ECCUncorrectable|fallen off the bus|GPU is lost|\bNVLink\b.{0,60}\b(?:error|fail|fatal)"
        r"|double[- ]bit ECC|ECC errorNEAR(?:detected|encountered)|hardware stack error",
        "leave the node out (`exclude` of the cluster file) and report it with this line; a "
        "stage resumes on others from its last checkpoint",
        HARDWARE,
    ),
    _kind(
        "assertion", "an index on the GPU is out of range",
        "device-sideasserttriggered indexoutofbounds cudaerrorassert ]assertion",
        r"device-side assert triggered|cudaErrorAssert|thread: ?\[[\d, ]+\] Assertion"
        r"|index out of bounds",
        "most often a token id that the model has no row for: compare the tokenizer of the store "
        "with the model's; CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    _kind(
        "illegal", "a kernel failed: it read or wrote memory that is not its own",
        "illegalmemory illegaladdress misalignedaddress launchfailure launch_failed launchfailed "
        "execution_failed illegalinstruction xid warpillegal launchtimedout "
        "unknownerror",
        r"illegal memory access|ILLEGAL_ADDRESS|IllegalAddress|misaligned address"
        r"|MISALIGNED_ADDRESS|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED"
        r"|cudaErrorLaunchFailure|CU(?:BLAS|DNN|FFT)\w*_EXECUTION_FAILED|an illegal instruction"
        r"|Warp Illegal|the launch timed out|CUDA error: unknown error"
        rf"|{_XID}(?:13|31|43|45)\b",
        "run once with CUDA_LAUNCH_BLOCKING=1: the traceback then names the kernel that failed; "
        "the same node each time means hardware, each node a kernel",
        HARDWARE,
    ),
    _kind(
        "driver", "the GPU, its driver and the software do not fit together",
        "kernelimage driverversionisinsufficient nocuda-capable invaliddeviceordinal "
        "driveronyoursystemistooold nonvidiadriver",
        r"no kernel image is available|driver version is insufficient|driver on your system is too"
        r"|no CUDA-capable device|invalid device ordinal|no NVIDIA driver",
        "compare the driver, the GPU and the CUDA release of torch; fewer GPUs may be visible than "
        "ranks were started (CUDA_VISIBLE_DEVICES)",
        HARDWARE,
    ),
    _kind(
        "mismatch", "ranks called different collectives",
        "mismatchbetweencollectives",
        r"mismatch between collectives",
        "compare what the named ranks call: a branch that only some ranks take",
        HANG,
    ),
    _kind(
        "not_finite", "the loss or a gradient is not finite",
        "foundnan foundinf unexpectedresult losstensorisnan isnanorinf naniterations "
        "loss:nan loss:inf loss:-inf loss=nan loss=inf lossnan lossinf lossisnan lossisinf "
        "loss':nan loss':inf loss\":nan loss\":inf loss:nan norm:nan norm:inf norm=nan norm=inf "
        "normnan norminf norm':nan norm':inf norm\":nan norm\":inf gradientisnan gradientisinf "
        "non-finite nonfinite alreadyatminimum becamenan becameinf tensor(nan "
        "nanloss nangrad nandetected returnednan",
        r"found (?:NaN|Inf)\b|Unexpected result (?:nan|inf)|\bnan iterations: *[1-9]"
        r"|(?<!best_)(?<!best )(?<!min_)(?<!max_)\b(?!best|min_|max_)\w*(?:loss|norm)['\"]?"
        r" ?(?:[:=]| is| became|) ?['\"]?(?:tensor\()?-?(?:nan|inf)(?:inity)?\b(?!, v_num| check)"
        r"|norm of the gradient is -?(?:nan|inf)|returned nan values|is nan or inf"
        r"|non-?finite (?:loss|grad|norm)|is non-?finite|loss scale already at minimum"
        r"|\bnan (?:loss|grad)|\bnan detected",
        "find the first step at which it broke; a lower learning rate, the documents of that step, "
        "or the rotation are the usual causes. Single skipped iterations of fp16 are normal",
        "`longhaul doctor spike --run RUN` checks the stage's loss, gradients and rotation",
        ends=False,
    ),
    _kind(
        "disk", "the disk is full, or the quota is used up",
        "nospaceleft systemisfull quotaisused [errno] quotaexceeded enospc diskfull filetoolarge",
        r"No space left on device|\[Errno (?:28|122|27)\]|quota exceeded|\bENOSPC\b"
        r"|(?:disk|file system) is full|quota is used up"
        r"|File too large",
        "make room, or set another --out; a file that was being written is not complete, and the "
        "checkpoint before it is",
        "`longhaul checkpoint list RUN` shows what is complete; `prune` removes others",
        ends=False,
    ),
    _kind(
        "files", "the file system failed",
        "[errno] stalefilehandle input/outputerror read-onlyfilesystem transportendpoint "
        "pytorchstreamwriter unexpectedpos remotei/oerror",
        r"\[Errno (?:5|30|107|116|121)\]|Stale file handle|Input/output error|Read-only file system"
        r"|Transport endpoint is not connected|PytorchStreamWriter failed|unexpected pos \d+",
        "look at the mount on that node, and at the room left there",
        "`longhaul checkpoint list RUN` shows what is complete",
        depth=1,
        ends=False,
    ),
    _kind(
        "time_limit", "the batch system ended the job at its time limit",
        "cancelled duetotimelimit term_runlimit exceededlimit walltime",
        r"DUE TO TIME LIMIT|TERM_RUNLIMIT|walltime \S+ exceeded limit",
        "nothing is broken: submit it again; `time` of the cluster file is the limit",
        STATUS,
        depth=1,
    ),
    _kind(
        "preempted", "the batch system preempted the job",
        "cancelled duetopreemption preempted",
        r"DUE TO PREEMPTION|\bpreempted\b",
        "nothing is broken: it resumes when Slurm requeues it, or submit it again",
        STATUS,
        depth=1,
    ),
    _kind(
        "node_lost", "a node is lost",
        "cancelled nodefailure node_fail notresponding nodefail",
        r"DUE TO NODE FAILURE|\bNODE_FAIL\b|srun: error: Node failure|\bnode failure\b"
        r"|Nodes? \S+ (?:are |is )?not responding",
        "leave the node out (`exclude` of the cluster file) until it is repaired; the "
        "stage resumes on others",
        STATUS,
    ),
    _kind(
        "crash", "a process crashed in native code",
        "segmentationfault sigsegv",
        r"Segmentation fault|SIGSEGV|exit ?code *:? *\(?(?:-11|139)\b",
        "the stack below the line names the library; PYTHONFAULTHANDLER=1 adds Python's",
        depth=1,
    ),
    _kind(
        "timeout", "a collective reached its timeout, or failed",
        "timeout(::)! watchdogcaught detectedbywatchdog timedoutwaiting monitoredbarrier "
        "failedortimedout worknccl( collectiveoperationtimeout collectivetimeout",
        r"^Timeout \(\d+:\d\d:\d\d\)!|Watchdog caught collective operation timeout"
        r"|detected by watchdog at work"
        r"|Timed out waiting \d+ ?ms for (?:send|recv)|failed to pass monitoredBarrier"
        r"|WorkNCCL\(\w+=.*before timing out|NCCL operations have failed or timed out"
        r"|collective timeout from (?:this local|another)? ?rank",
        "a rank did not come to this collective: it failed, hangs elsewhere, or called another; "
        "look first at a rank that did not write this line",
        HANG,
        depth=1,
    ),
    _kind(
        "sigkill", "a process was ended by SIGKILL, most often because host memory ran out",
        "exit sigkill killed",
        r"exit ?code *:? *\(?(?:-9|137)\b|Signal 9 \(SIGKILL\)|killed by signal: (?:9|Killed)"
        r"|^Killed$"
        r"|srun: error: .{0,300}\btasks? [^:]+: Killed|: line \d+: +\d+ Killed\b|ended by SIGKILL"
        r"|DataLoader worker .{0,80}exited unexpectedly",
        "`dmesg` on the node says whether the kernel ended it for memory (then --mem=0 and fewer "
        "loader processes); otherwise the batch system or a person did",
        OOM,
        depth=1,
    ),
    _kind(
        "stuck", "NCCL's monitor ended a rank whose watchdog was stuck",
        "watchdoggotstuck heartbeatmonitor watchdoghang toprocessgroupncclwatchdog",
        r"watchdog got stuck|Heartbeat monitor timed out|due to ProcessGroupNCCL watchdog hang",
        "a call of CUDA or NCCL did not return: most often another rank had failed before or a "
        "link is down; look at the other ranks' logs for the time before",
        HANG,
        depth=2,
    ),
    _kind(
        "nccl", "NCCL failed",
        "ncclinternalerror ncclinvalid ncclunhandled unhandledcudaerror duplicategpu "
        "pleasereportthisissuetothenccl",
        r"ncclInternalError|ncclInvalid\w+|ncclUnhandledCudaError|unhandled cuda error"
        r"|Duplicate GPU detected|report this issue to the NCCL",
        "the line after 'Last error:' has the reason; NCCL_DEBUG=WARN writes more",
        HARDWARE,
        depth=1,
    ),
    _kind(
        "network", "a link between nodes, or a system call of NCCL, failed",
        "completionfrompeer gotcompletion ibv_ asyncfatal vendorerr noroutetohost "
        "networkisunreachable ncclsystemerror unhandledsystemerror",
        r"Got completion (?:from peer|with)NEARstatus|ibv_\w+NEARfail|async fatal event"
        r"|No route to host|Network is unreachable|vendor err \d+|ncclSystemError"
        r"|unhandled system error",
        "if a rank of the other node failed before, that is the cause; otherwise look at the "
        "adapter and the switch of the nodes in this line",
        HARDWARE,
        depth=2,
    ),
    _kind(
        "peer", "another rank ended or cannot be reached",
        "ncclremoteerror remoteprocess remotepeer connectionclosed connectionreset socket "
        "tcpstore brokenpipe clientsjoined waittimeout connectionrefused "
        "storebasedbarrier connecttimeout recvvalue sendbytes diststoreerror networkerror "
        "rendezvous lostthe connectfullmesh lostcommunication",
        r"ncclRemoteError|remote process (?:exited|has terminated)|remote peer"
        r"|Connection (?:closed|reset|refused)|socket ?timeout|socket has timed out"
        r"|SocketTimeout|Broken pipe|clients joined|wait timeout after|Dist(?:Store|Network)Error"
        r"|store based barrier|TCPStoreNEAR(?:fail|timed? ?out|closed)|failed to recv, got 0 bytes"
        r"|Socket\w*: .*(?:timed out|fail)|lost the connection to another rank"
        r"|connectFullMesh failed|lost communication|Rendezvous(?:Connection|Timeout|Closed)Error",
        "this is not the cause: look at the other rank's log first, at the one that ended before",
        HANG,
        depth=3,
    ),
    _kind(
        "cancelled", "the job or its step was cancelled",
        "cancelled duetosignal duetotaskfailure duetojobrequeue terminated notending "
        "receivedsigterm receivingsigterm gotsignal",
        r"\*\*\* (?:JOB|STEP) .*CANCELLED AT(?: \S+)? ?\*\*\*|CANCELLED by \d+|State: CANCELLED"
        r"|DUE TO (?:SIGNAL|TASK FAILURE|JOB REQUEUE|JOB NOT ENDING)"
        r"|srun: error: .{0,300}\btasks? [^:]+: Terminated"
        r"|(?:received|receiving) SIGTERM|got signal: 15",
        "a person or a script cancelled it, or Slurm did because a task had failed: "
        "`sacct -j JOB --format=JobID,State,ExitCode,Reason` says which",
        STATUS,
        depth=4,
    ),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
ON_THE_GPU = ("device", "library", "nccl_memory")
ON_THE_HOST = ("pinned", "host", "killed", "sigkill", "shared")
ERROR_LIKE = ("error", "exception", "fatal", "abort", "critical", "failed", "traceback")
"""In a line that is shown where no kind fits."""
