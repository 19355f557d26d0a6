# SPDX-License-Identifier: Apache-2.0
"""Seconds of one optimizer step by cause.

Work of a micro-batch on one rank, t tokens of a TP group, S the sequence, e bytes a number:

    matmul      2 P t forward, 4 P t backward, P the rank's weights in products (LM head apart);
                2 P t more where a layer is rebuilt
    attention   2 A S t forward, causal, A = heads x D / TP; 5/2 of that backward (a flash backward
                executes 5 products where the forward has 2); once more where it runs again
    memory      norms, rotation, activations, residuals, logits: bytes through device memory
    TP          4 messages of t h e (TP - 1)/TP forward, 6 backward (the gathered inputs come once
                more for the weights' gradients): sequence parallelism, arXiv 2205.05198
    CP          all-to-all: (u - 1)/u (2 H + 2 K) head slices each way, waited for (arXiv
                2309.14509); ring: (c - 1) 2 K forward, twice that and fp32 gradients backward,
                under attention (arXiv 2310.01889)
    PP          a bubble of (PP - 1)/m of the step's compute (1F1B, arXiv 2104.04473)
    DP          gradients fp32 and parameters once a step, or each micro-batch under FSDP, under
                compute as far as it reaches
    copies      what offload moves, under compute as far as it reaches
    optimizer   Adam's traffic, on the device or on the host

Throughput is tokens/s/GPU, MFU the causal one: `6 P_mm + 6 L (H D) S` FLOPs a token over the bf16
peak, recompute not counted.
"""

from dataclasses import dataclass

from recipes.cluster import GB, Cluster
from recipes.planner.efficiency import HOPPER, Efficiency
from recipes.planner.job import Job

TERA = 1e12
ADAM_BYTES = 30
"""Read and written of a parameter's gradient, moments, fp32 and bf16 weight in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Seconds of a step."""

    causes: dict[str, float]
    """They add up to the step."""
    tokens_per_gpu_second: float
    mfu: float
    """Causal, of the bf16 peak."""
    micro_batch: float
    """Seconds of one micro-batch, forward and backward, on a rank."""

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.causes.values())


def time(job: Job, cluster: Cluster, efficiency: Efficiency = HOPPER) -> Time:
    """Return the seconds of a job's step on a cluster."""
    work = _Work(job, cluster, efficiency)
    m, pp = job.micro_batches, job.layout.pp
    each = work.micro_batch()
    busy = sum(each.values())
    compute = each["matmul"] + each["attention"] + each["memory"] + each["recompute"]
    causes = {name: m * seconds for name, seconds in each.items()}
    causes["PP"] = (pp - 1) * busy
    causes["DP"] = work.data_parallel(compute)
    causes["optimizer"] = work.optimizer()
    step = sum(causes.values())
    rate = job.tokens_per_batch / step / job.layout.world_size
    flops = job.card.flops_per_token(job.seq_length)
    return Time(
        causes=causes,
        tokens_per_gpu_second=rate,
        mfu=rate * flops / (cluster.gpu.bf16_tflops * TERA),
        micro_batch=busy,
    )


class _Work:
    """Seconds of the parts of a micro-batch on one rank."""

    def __init__(self, job: Job, cluster: Cluster, efficiency: Efficiency) -> None:
        self.job, self.cluster, self.efficiency = job, cluster, efficiency
        self.layers, self.e = job.layers, job.element_bytes
        self.again = self._again()
        """Shares of a layer's forward that run again: products, attention, MLP."""

    def micro_batch(self) -> dict[str, float]:
        """Return seconds by cause, communication as far as nothing hides it."""
        matmul, rebuilt = self._matmul()
        forward, backward, repeated = self._attention()
        memory, memory_again = self._memory()
        exposed = self._context_parallel(forward, backward, repeated)
        compute = matmul + rebuilt + forward + backward + repeated + memory + memory_again
        return {
            "matmul": matmul,
            "attention": forward + backward,
            "recompute": rebuilt + repeated + memory_again,
            "memory": memory,
            "TP": self._tensor_parallel(),
            "CP": exposed,
            "copies": self._copies(compute),
        }

    def _again(self) -> tuple[float, float, float]:
        layout = self.job.layout
        recompute, tiled = layout.recompute, float(layout.tiling.mlp)
        kinds = {"none": (0.0, 0.0, tiled), "full": (1.0, 1.0, 1.0),
                 "kept_attention": (1.0, 0.0, 1.0)}  # fmt: skip
        if recompute.kind == "selective":
            mlp = 1.0 if "mlp" in recompute.modules else tiled
            return 0.0, float("core_attn" in recompute.modules), mlp
        if recompute.kind == "uniform":
            return 1.0, 1.0, 1.0 + tiled
        if recompute.kind == "block":
            share = min(1.0, recompute.layers / self.layers)
            return share, share, share + tiled
        own, others = kinds[recompute.kind], kinds[recompute.others]
        share = 1 / recompute.every
        mixed = [share * one + (1 - share) * other for one, other in zip(own, others, strict=True)]
        return mixed[0], mixed[1], mixed[2]

    def _matmul(self) -> tuple[float, float]:
        """Return seconds of the products, and of those that run again."""
        job, card, layout = self.job, self.job.card, self.job.layout
        attention = card.hidden * card.head_dim * 2 * (card.heads + card.kv_heads)
        mlp = (3 if card.facts.gated else 2) * card.hidden * card.ffn_hidden
        bf16 = self.cluster.gpu.bf16_tflops * TERA * self.efficiency.matmul
        rate = bf16
        if layout.fp8.recipe != "none":
            fp8 = self.cluster.gpu.fp8_tflops * TERA * self.efficiency.matmul_fp8
            in_bf16 = min(1.0, (layout.fp8.bf16_first + layout.fp8.bf16_last) / card.layers)
            rate = 1 / (in_bf16 / bf16 + (1 - in_bf16) / fp8)
        of_mlp = 2 * job.tokens * mlp / layout.tp * self.layers / rate
        if card.facts.experts:
            slower = self.efficiency.matmul / self.efficiency.experts
            of_mlp *= card.experts_per_token * slower
        of_attention = 2 * job.tokens * attention / layout.tp * self.layers / rate
        head = 2 * job.tokens * job.vocabulary_weights / bf16 / layout.pp
        again = self.again[0] * of_attention + self.again[2] * of_mlp
        return 3 * (of_attention + of_mlp + head), again

    def _attention(self) -> tuple[float, float, float]:
        """Return seconds of forward, backward, and of forwards that run again."""
        job = self.job
        width = job.card.heads * job.card.head_dim / job.layout.tp
        unit = width * job.seq_length * job.tokens * self.layers
        peak = self.cluster.gpu.bf16_tflops * TERA
        if job.degrees.ring > 1:  # a step's queries and keys: a chunk, half of a zigzag shard
            chunk = job.seq_length / job.degrees.ring / 2
            peak /= 1 + self.efficiency.ring_block / chunk
        forward = 2 * unit / (peak * self.efficiency.attention_forward)
        backward = 5 * unit / (peak * self.efficiency.attention_backward)
        return forward, backward, self.again[1] * forward

    def _memory(self) -> tuple[float, float]:
        """Return seconds through device memory, and of what runs again."""
        job, card, tp = self.job, self.job.card, self.job.layout.tp
        heads = (card.heads + 2 * card.kv_heads) * card.head_dim
        k = card.experts_per_token if card.facts.experts else 1
        layer = 8 * card.hidden + 4 * heads + 3 * k * card.ffn_hidden
        traffic = layer * job.tokens / tp * self.e * self.layers
        passes = 3 if job.layout.tiling.loss else 8
        logits = passes * job.tokens * card.vocab / tp * self.e / job.layout.pp
        rate = self.cluster.gpu.memory_gbps * GB * self.efficiency.memory
        return (3 * traffic + logits) / rate, self.again[0] * traffic / rate

    def _tensor_parallel(self) -> float:
        job, tp = self.job, self.job.layout.tp
        if tp == 1:
            return 0.0
        message = job.tokens * job.card.hidden * self.e * (tp - 1) / tp
        again = 2 * self.again[0] + 2 * min(1.0, self.again[2])
        head = 3 * message / job.layout.pp
        return ((10 + again) * message * self.layers + head) / self._link(tp)

    def _context_parallel(self, forward: float, backward: float, repeated: float) -> float:
        job, shape = self.job, self.job.attention
        u, c = job.degrees.ulysses, job.degrees.ring
        inner = max(shape.kv_heads, u)
        # Kept attention is sent home again; with a full recompute q, k and v as well.
        runs = 2 + self.again[0]
        exchanged = (u - 1) / u * (2 * shape.heads + 2 * inner) * shape.slice_bytes
        by_stage = 1.4 if job.degrees.heads_per_stage else 1.0  # q goes again in the backward
        waited = runs * by_stage * exchanged * self.layers / self._link(job.layout.tp * u)
        if c == 1:
            return waited
        keys: float = (c - 1) * 2 * inner * shape.slice_bytes * self.layers
        if (stage := job.degrees.heads_per_stage) is not None:  # once for each stage
            keys *= shape.heads // stage * min(stage, inner) / inner
        link = self._link(job.layout.tp * u * c)
        sums = max(4, self.e) / self.e
        hidden = max(0.0, keys / link - forward)
        hidden += max(0.0, keys * (1 + sums) / link - backward)
        hidden += max(0.0, self.again[1] * (keys / link - repeated))
        return waited + hidden

    def _copies(self, compute: float) -> float:
        """Return what copies to and from the host take beyond the compute that hides them."""
        job, layout = self.job, self.job.layout
        if layout.offload.tensors == "none":
            return 0.0
        x = job.tokens / layout.tp * job.card.hidden * self.e
        result = job.tokens * job.card.heads / layout.tp * (job.card.head_dim * self.e + 4)
        moved = x * layout.offload.inputs + result * layout.offload.attention
        moved *= self.layers / layout.offload.every
        seconds = moved / (self.cluster.host_link_gbps * GB)
        return max(0.0, seconds - compute / 3) + max(0.0, seconds - 2 * compute / 3)

    def data_parallel(self, compute: float) -> float:
        """Return seconds of a step that gradients and parameters take beyond compute."""
        job, layout, n = self.job, self.job.layout, self.job.replicas
        if n == 1:
            return 0.0
        share, weights = (n - 1) / n, max(job.weights(0), job.weights(layout.pp - 1))
        link = self._link(layout.tp * n)
        gradients, parameters = 4 * weights * share / link, self.e * weights * share / link
        under = self.efficiency.compute_overlapped * compute
        if layout.sharding == "parameters":  # each micro-batch: forward, backward, gradients
            return job.micro_batches * max(0.0, 2 * parameters + gradients - under)
        if layout.sharding == "none":
            gradients, parameters = 2 * gradients, 0.0
        return max(0.0, gradients + parameters - under)

    def optimizer(self) -> float:
        """Return seconds of Adam and its copies."""
        job, layout = self.job, self.job.layout
        weights = max(job.weights(0), job.weights(layout.pp - 1))
        mine = weights / (1 if layout.sharding == "none" else job.replicas)
        rate = self.cluster.gpu.memory_gbps * GB * self.efficiency.memory
        away = layout.optimizer_offload
        host = ADAM_BYTES / (self.efficiency.host_adam_gbps * GB)
        host += 6 / (self.cluster.host_link_gbps * GB)
        return mine * ((1 - away) * ADAM_BYTES / rate + away * host)

    def _link(self, ranks: int) -> float:
        """Return bytes a second of a GPU among so many neighbours."""
        if ranks <= self.cluster.gpus_per_node:
            return self.cluster.nvlink_gbps * GB * self.efficiency.nvlink
        return self.cluster.network_gbps * GB * self.efficiency.network
