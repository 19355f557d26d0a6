# SPDX-License-Identifier: Apache-2.0
"""The keys of a line of `metrics.jsonl`: unit, meaning, and the name that trackers get.

Trackers get torchtitan's names (components/metrics.py), or Megatron-LM's where torchtitan has none,
so that runs of several frameworks share a chart; units that these names state are converted. The
table of docs/metrics.md is compared with this one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GIB, TERA, PERCENT = 2.0**-30, 1e-12, 100.0


@dataclass(frozen=True)
class Metric:
    """One key of a line."""

    key: str
    unit: str
    meaning: str
    tracked: str = ""
    """Name in a tracker; empty if trackers do not get it."""
    factor: float = 1.0
    """From our unit to that of the tracker's name."""


METRICS = (
    Metric("step", "", "optimizer steps taken, this one included"),
    Metric("time", "seconds", "Unix time of the line by the wall clock; never part of a duration"),
    Metric("loss", "nats", "mean loss of all tokens that count", "loss_metrics/global_avg_loss"),
    Metric("lr", "", "learning rate of this step", "lr"),
    Metric("grad_norm", "", "norm of the gradient before clipping", "grad_norm"),
    Metric("tokens", "tokens", "tokens of the step over all ranks, padding included"),
    Metric("samples", "", "first and last sample of the step"),
    Metric(
        "seconds", "seconds", "the step, until the device has finished it",
        "time_metrics/end_to_end(s)",
    ),
    Metric("tokens_per_second_per_rank", "tokens/s", "throughput of a GPU", "throughput(tps)"),
    Metric(
        "model_flops_per_second_per_rank", "FLOPs/s", "causal model FLOPs of a GPU", "tflops", TERA
    ),
    Metric("mfu", "share", "causal MFU", "mfu(%)", PERCENT),
    Metric(
        "mfu_documents", "share", "MFU with attention within documents, without padding",
        "mfu_documents(%)", PERCENT,
    ),
    Metric("mfu_6n", "share", "MFU of 6 FLOPs per weight and token", "mfu_6n(%)", PERCENT),
    Metric(
        "data_wait_seconds", "seconds", "waiting for the next batch",
        "time_metrics/data_loading(s)",
    ),
    Metric("forward_seconds", "seconds", "forward of rank 0, data apart", "forward-compute-time"),
    Metric("backward_seconds", "seconds", "backward, recomputation included",
           "backward-compute-time"),
    Metric(
        "communication_seconds", "seconds", "exposed communication of pipeline and data ranks",
        "time_metrics/communication(s)",
    ),
    Metric("optimizer_seconds", "seconds", "update and clipping", "time_metrics/optimizer(s)"),
    Metric(
        "copy_seconds", "seconds", "batch to the device, gradients and weights between copies",
        "time_metrics/copies(s)",
    ),
    Metric(
        "peak_memory_bytes", "bytes", "tensors at the peak, fullest rank",
        "memory/max_active(GiB)", GIB,
    ),
    Metric(
        "reserved_memory_bytes", "bytes", "reserved by the allocator at the peak, fullest rank",
        "memory/max_reserved(GiB)", GIB,
    ),
    Metric(
        "device_memory_bytes", "bytes",
        "taken of the GPU, with CUDA's context and NCCL's buffers, fullest rank",
        "memory/device(GiB)", GIB,
    ),
    Metric(
        "host_memory_bytes", "bytes", "resident in host memory now, fullest rank",
        "memory/host(GiB)", GIB,
    ),
    Metric("peak_memory_bytes_by_rank", "bytes", "the same of each rank"),
    Metric("reserved_memory_bytes_by_rank", "bytes", "the same of each rank"),
    Metric("device_memory_bytes_by_rank", "bytes", "the same of each rank"),
    Metric("host_memory_bytes_by_rank", "bytes", "the same of each rank"),
    Metric("gpu_utilization", "%", "time with a kernel, mean of the GPUs", "gpu/utilization(%)"),
    Metric("gpu_utilization_by_rank", "%", "the same of each rank"),
    Metric("gpu_power_watts", "W", "power, mean of the GPUs", "gpu/power(W)"),
    Metric("gpu_clock_mhz", "MHz", "clock of the multiprocessors, slowest GPU", "gpu/clock(MHz)"),
    Metric("documents", "", "documents and pieces of documents in the step", "data/documents"),
    Metric(
        "sum_squared_lengths", "tokens^2", "squared lengths that tokens attend within, added up",
        "data/sum_squared_lengths",
    ),
    Metric(
        "sum_squared_lengths_max_over_mean", "", "the same of the data rank with the most, "
        "relative to the mean", "data/sum_squared_lengths_max_over_mean",
    ),
    Metric("padding_tokens", "tokens", "tokens of padding", "data/padding_tokens"),
    Metric(
        "sum_squared_lengths_in_window", "tokens^2", "squared lengths, of layers with a window "
        "what their pairs of tokens add up to; absent of models without them",
        "data/sum_squared_lengths_in_window",
    ),
    Metric("loss_by_position", "nats", "loss by the position of the token", "loss_by_position"),
    Metric("loss_by_source", "nats", "loss by the source of the row", "loss_by_source"),
    Metric(
        "micro_batch_loss_std", "nats", "spread of the loss of micro-batches",
        "loss_metrics/micro_batch_std",
    ),
    Metric("rows_by_source", "", "rows of a mix by what they are of"),
    Metric("seq_length", "tokens", "of a step of a mix with another length"),
    Metric(
        "work_max_over_mean", "", "attention of the data rank with the most, by plan of the mix"
    ),
    Metric("heldout_loss", "nats", "held-out loss (`--eval-every`)", "validation_metrics/loss"),
    Metric("heldout_by_quarter", "nats", "the same in each quarter of the window"),
    Metric(
        "heldout_by_length", "nats", "loss of whole documents by their length",
        "validation_metrics/loss_by_length",
    ),
    Metric(
        "passkey_nats", "nats", "loss of a passkey's answer", "validation_metrics/passkey(nats)"
    ),
    Metric("evaluation_seconds", "seconds", "the evaluation, not in `seconds`"),
    Metric("clock_jump_seconds", "seconds", "only where the wall clock jumped: by how much"),
)  # fmt: skip
TOKENS_SEEN = "n_tokens_seen"
"""Tokens of all steps so far, in trackers alone."""


def tracked(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what a tracker gets of a line: numbers under its names, those that are known."""
    found = {TOKENS_SEEN: float(line["step"]) * line["tokens"]}
    for metric in METRICS:
        if metric.tracked and metric.key in line:
            for name, value in _numbers(metric.tracked, line[metric.key]):
                found[name] = value * metric.factor
    return found


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{name}/{key}", each)
    elif value is not None and math.isfinite(value):
        yield name, float(value)
