# SPDX-License-Identifier: Apache-2.0
"""Seconds of one optimizer step, by category.

Work of a micro-batch on one rank, t tokens of a TP group, S the sequence, e bytes per number:

    matmul      2 P t forward, 4 P t backward, P the rank's weights in products (LM head separate);
                2 P t more if a layer is recomputed; head-chunked attention also recomputes q, k, v,
                and projects them in bf16 in an FP8 layer too
    attention   2 A S t forward, causal, A = heads x D / TP; 5/2 of that backward (a flash backward
                executes 5 products, the forward 2); forward once more if it is recomputed. In a
                layer with a window of W, 2 W - W^2 / S in place of S (`attention_time`)
    memory      norms, rotation, activations, residuals, logits: bytes moved through device memory
    TP          4 messages of t h e (TP - 1)/TP forward, 6 backward (inputs are gathered once more
                for the weights' gradients): sequence parallelism, arXiv 2205.05198. Experts
                gather every token once for each of its k experts over ETP: 4 k instead of 5
                (Megatron-Core's all-to-all dispatcher)
    EP          all-to-all of k t h e / TP to the experts and back, forward and backward, not
                overlapped
    CP          all-to-all: (u - 1)/u (2 H + 2 K) head slices each way, not overlapped (arXiv
                2309.14509), a stage of heads twice that backward; ring: (c - 1) 2 K forward, twice
                that and fp32 gradients backward, overlapped with attention (arXiv 2310.01889); of
                a layer with a window only the keys that it reaches
    PP          the last stage has the LM head and sets the pace, or one between if those have more
                layers; the pipeline fills and drains for a micro-batch of each other stage (1F1B,
                arXiv 2104.04473); t h e / TP to and from each neighbour, not overlapped.
                Interleaved in chunks of layers, it fills and drains for one chunk of each stage,
                and sends after each chunk
    DP          gradients fp32 and parameters once per step, or per micro-batch under FSDP,
                overlapped with compute as far as possible
    copies      offloaded bytes, overlapped with compute as far as possible
    optimizer   Adam's traffic, on the device or on the host
    waiting     for the data rank, and in a ring the context rank, with the longest documents
                (`recipes.planner.documents`)
    host        a layer's time that does not depend on its length, where the cluster file states one

Messages of a group use the fast link if it joins the whole group. Otherwise a rank has one network
port, a collective of several ranks of a node has all their ports (NCCL's rings, one per port), and
an all-to-all sends over the network only what is for other nodes. If the cluster file states blocks
of nodes with slower links between them, all-to-alls and pipeline messages beyond a block take
those; rings cross the end of a block from one node only, at the full rate of its ports.

Throughput is tokens/s/GPU. MFU is causal: `6 P_mm + 6 L (H D) S` FLOPs per token over the bf16
peak, in layers with a window its length in place of S; recompute is not counted.
"""

from dataclasses import dataclass

from recipes.planner.attention_time import TERA, Attention
from recipes.planner.documents import WHOLE, Attended
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster

GB = 1e9
ADAM_BYTES = 30
"""Bytes read and written per parameter and step: gradient, moments, fp32 and bf16 weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Seconds of a step."""

    categories: dict[str, float]
    """Seconds by category; their sum is the step time."""
    tokens_per_gpu_second: float
    mfu: float
    """Causal MFU, of the bf16 peak; within documents where their lengths are known."""
    attended: Attended = WHOLE
    """Attention within documents, of layers without a window."""
    micro_batch: float
    """Seconds of forward and backward of one micro-batch on a rank."""

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.categories.values())


def time(workload: Workload, cluster: Cluster) -> Time:
    """Return the step time of a workload on a cluster, at the efficiencies that its file states."""
    m, pp = workload.micro_batches, workload.layout.pp
    stages = [_Work(workload, cluster, stage) for stage in workload.unlike]
    parts = [one.micro_batch(head=one is stages[-1]) for one in stages]
    seconds = [sum(one.values()) for one in parts]
    busy = max(seconds)
    work, each = stages[seconds.index(busy)], parts[seconds.index(busy)]
    compute = each["matmul"] + each["attention"] + each["memory"] + each["recompute"]
    categories = {name: m * seconds for name, seconds in each.items()}
    vpp = workload.layout.vpp
    bubble = (sum(seconds) + (pp - len(seconds)) * seconds[-2:][0] - busy) / vpp
    if workload.documents is not None:
        categories["waiting"] = m * work.attention.waiting()
    categories["PP"] = bubble + m * vpp * work.pipeline()
    categories["DP"] = work.data_parallel(compute)
    categories["optimizer"] = work.optimizer()
    step = sum(categories.values())
    rate = workload.tokens_per_batch / step / workload.layout.world_size
    flops = work.attention.flops_per_token
    return Time(
        categories=categories,
        tokens_per_gpu_second=rate,
        mfu=rate * flops / (cluster.gpu.bf16_tflops * TERA),
        micro_batch=busy,
        attended=work.attention.attended,
    )


class _Work:
    """Seconds of the parts of a micro-batch on a rank of a pipeline stage."""

    def __init__(self, workload: Workload, cluster: Cluster, stage: int) -> None:
        self.workload, self.cluster, self.efficiency = workload, cluster, cluster.efficiency
        self.numbers = workload.stages[stage]
        self.layers, self.e = len(self.numbers), workload.element_bytes
        self.again = self._again()
        """Recomputed shares of a layer's forward: products, attention, MLP."""
        self.attention = Attention(workload, cluster, workload.stages[stage], self.again[1])

    def micro_batch(self, head: bool) -> dict[str, float]:
        """Return the seconds by category of a stage with or without the LM head.

        Only exposed communication counts.
        """
        matmul, rebuilt = self._matmul(head)
        full, local = self.attention.of_full(), self.attention.of_local()
        forward, backward, repeated = (sum(both) for both in zip(full, local, strict=True))
        memory, memory_again = self._memory(head)
        compute = matmul + rebuilt + forward + backward + repeated + memory + memory_again
        return {
            "matmul": matmul,
            "attention": forward + backward,
            "recompute": rebuilt + repeated + memory_again,
            "memory": memory,
            "TP": self._tensor_parallel(head),
            **self._expert_parallel(),
            "CP": self._context_parallel(),
            "copies": self._copies(compute),
            **self._host(),
        }

    def _host(self) -> dict[str, float]:
        each = self.efficiency.layer_seconds
        return {"host": each * self.layers * (1 + self.again[0] / 3)} if each else {}

    def _again(self) -> tuple[float, float, float]:
        layout = self.workload.layout
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

    def _matmul(self, head: bool) -> tuple[float, float]:
        """Return the seconds of the products, and of the recomputed ones."""
        workload, card, layout = self.workload, self.workload.card, self.workload.layout
        mlp = (3 if card.facts.gated else 2) * card.hidden * card.ffn_hidden
        bf16 = self.cluster.gpu.bf16_tflops * TERA * self.efficiency.matmul
        rate = bf16
        if layout.fp8.recipe != "none":
            fp8 = self.cluster.gpu.fp8_tflops * TERA * self.efficiency.matmul_fp8
            in_bf16 = 1 - sum(map(workload.in_fp8, self.numbers)) / self.layers
            rate = 1 / (in_bf16 / bf16 + (1 - in_bf16) / fp8)
        of_mlp = 2 * workload.tokens * mlp / layout.tp * self.layers / rate
        if card.facts.experts:
            width = card.ffn_hidden / layout.expert_tp
            reached = self.efficiency.experts * width / (width + self.efficiency.expert_width)
            of_mlp *= card.experts_per_token * self.efficiency.matmul / reached
            of_mlp *= workload.fullest_experts  # all ranks wait for it
        head_chunked = workload.degrees.heads_per_stage is not None
        of_qkv = 2 * workload.tokens * workload.qkv_weights * self.layers
        of_qkv /= bf16 if head_chunked else rate
        output = card.hidden * card.head_dim * card.heads
        of_attention = of_qkv + 2 * workload.tokens * output / layout.tp * self.layers / rate
        of_head = 2 * workload.tokens * workload.vocabulary_weights / bf16 * head
        again = self.again[0] * of_attention + self.again[2] * of_mlp
        if head_chunked:  # with kept attention, those of the recomputed layer
            only_kept = self.again[0] - self.again[1]
            again += (1 - only_kept) * of_qkv
        return 3 * (of_attention + of_mlp + of_head), again

    def _memory(self, head: bool) -> tuple[float, float]:
        """Return the seconds of device memory traffic, and of the recomputed part."""
        workload, card, tp = self.workload, self.workload.card, self.workload.layout.tp
        heads = (card.heads + 2 * card.kv_heads) * card.head_dim
        k = card.experts_per_token if card.facts.experts else 1
        layer = 8 * card.hidden + 4 * heads + 3 * k * card.ffn_hidden
        traffic = layer * workload.tokens / tp * self.e * self.layers
        passes = 3 if workload.layout.tiling.loss else 8
        logits = passes * workload.tokens * workload.vocabulary_rows * self.e * head
        rate = self.cluster.gpu.memory_gbps * GB * self.efficiency.memory
        merged, merged_back = self.attention.merged_bytes()
        moved = 3 * traffic + logits + merged + merged_back
        return moved / rate, (self.again[0] * traffic + self.again[1] * merged) / rate

    def _tensor_parallel(self, head: bool) -> float:
        workload, card, tp = self.workload, self.workload.card, self.workload.layout.tp
        attention, again = 5 + 2 * self.again[0], 2 * min(1.0, self.again[2])
        shard = workload.tokens / tp * card.hidden * self.e
        found = 0.0
        if tp > 1:
            mlp = 0.0 if card.facts.experts else 5 + again
            found = shard * (tp - 1) * ((attention + mlp) * self.layers + 3 * head) / self._link(tp)
        if card.facts.experts and (etp := workload.layout.expert_tp) > 1:
            mlp = (4 + again) * card.experts_per_token
            mlp *= workload.fullest_experts
            found += shard * (etp - 1) * mlp * self.layers / self._link(etp)
        return found

    def _expert_parallel(self) -> dict[str, float]:
        """Return the seconds of the all-to-alls that take tokens to their experts and back."""
        workload, card, layout = self.workload, self.workload.card, self.workload.layout
        if layout.ep == 1:
            return {}
        sent = workload.tokens / layout.tp * card.hidden * self.e * card.experts_per_token
        times = 4 + 2 * min(1.0, self.again[2])
        each = self._exchange(layout.ep, layout.expert_tp)
        times *= workload.fullest_experts  # its rank receives, and sends back, the most tokens
        return {"EP": times * sent * self.layers * each}

    def pipeline(self) -> float:
        """Return the seconds to send a micro-batch's tensors to the next stage and back."""
        workload, layout = self.workload, self.workload.layout
        if layout.pp == 1:
            return 0.0
        sent = 2 * workload.tokens * workload.card.hidden * self.e / layout.tp
        rate = self._link(layout.world_size)
        block, stage = self.cluster.block_gpus, layout.world_size // layout.pp
        if 0 < block < layout.world_size:  # all ranks of a stage send to the next block at once
            rate = min(rate, self._between_blocks * max(1.0, block / stage))
        return sent / rate

    def _context_parallel(self) -> float:
        workload, shape = self.workload, self.workload.attention
        u, c = workload.degrees.ulysses, workload.degrees.ring
        inner = max(shape.kv_heads, u)
        # Forward and backward; q, k, v and output once more if the layer is recomputed. In stages
        # of heads twice in the backward, and once more if attention is not kept.
        runs = 2 + self.again[0]
        if workload.degrees.heads_per_stage:
            runs = (3 + self.again[1]) / self.efficiency.staged
        slices = (2 * shape.heads + 2 * inner) * shape.slice_bytes
        waited = runs * slices * self.layers * self._exchange(u, workload.layout.tp)
        return waited + self.attention.ring(self._link(workload.layout.tp * u * c))

    def _copies(self, compute: float) -> float:
        """Return the exposed seconds of copies to and from the host."""
        workload, layout = self.workload, self.workload.layout
        if layout.offload.tensors == "none":
            return 0.0
        x = workload.tokens / layout.tp * workload.card.hidden * self.e
        result = (
            workload.tokens
            * workload.card.heads
            / layout.tp
            * (workload.card.head_dim * self.e + 4)
        )
        moved = x * layout.offload.inputs + result * layout.offload.attention
        moved *= self.layers / layout.offload.every
        seconds = moved / (self.cluster.host_link_gbps * GB)
        return max(0.0, seconds - compute / 3) + max(0.0, seconds - 2 * compute / 3)

    def data_parallel(self, compute: float) -> float:
        """Return the exposed seconds per step of gradient and parameter communication."""
        workload, layout = self.workload, self.workload.layout
        experts = self.layers * workload.expert_weights
        weights = workload.most(workload.weights) - experts
        seconds = self._reduced(weights, workload.replicas, layout.tp)
        seconds += self._reduced(experts, workload.expert_replicas, layout.expert_tp * layout.ep)
        if not seconds:
            return 0.0
        gradients, parameters = 4 * seconds, self.e * seconds
        under = self.efficiency.compute_overlapped * compute
        if layout.sharding == "parameters":  # each micro-batch: forward, backward, gradients
            return workload.micro_batches * max(0.0, 2 * parameters + gradients - under)
        if layout.sharding == "gradients":  # each micro-batch: gradients; parameters once
            earlier = (workload.micro_batches - 1) * max(0.0, gradients - under)
            return earlier + max(0.0, gradients + parameters - under)
        if layout.sharding == "none":
            gradients, parameters = 2 * gradients, 0.0
        return max(0.0, gradients + parameters - under)

    def _reduced(self, weights: float, ranks: int, stride: int) -> float:
        """Return the seconds per byte of a number to reduce-scatter weights over ranks."""
        return weights * (ranks - 1) / ranks / self._collective(ranks, stride)

    def optimizer(self) -> float:
        """Return the seconds of Adam and its copies."""
        workload, layout = self.workload, self.workload.layout
        held = workload.weights if layout.sharding == "none" else workload.shard
        mine = workload.most(held)
        rate = self.cluster.gpu.memory_gbps * GB * self.efficiency.memory
        away = layout.optimizer_offload
        host = ADAM_BYTES / (self.efficiency.host_adam_gbps * GB)
        host += 6 / (self.cluster.host_link_gbps * GB)
        return mine * ((1 - away) * ADAM_BYTES / rate + away * host)

    @property
    def _fast(self) -> float:
        return self.cluster.nvlink_gbps * GB * self.efficiency.nvlink

    @property
    def _port(self) -> float:
        return self.cluster.network_gbps * GB * self.efficiency.network

    def _joins(self, span: int) -> bool:
        return self.cluster.joins(span, self.workload.layout.world_size)

    def _link(self, span: int) -> float:
        """Return the bytes per second between neighbours of a group that spans `span` ranks."""
        return self._fast if self._joins(span) else self._port

    def _collective(self, size: int, stride: int) -> float:
        """Return the bytes per second of a rank in a ring over a group, by all ports of a node."""
        if self._joins(stride * size):
            return self._fast
        here = max(1, self.cluster.linked_gpus // stride)
        return min(self._fast, here * self._port)

    def _exchange(self, size: int, stride: int) -> float:
        """Return the seconds per byte of an all-to-all, without the part that stays on the rank."""
        if self._joins(stride * size):
            return (size - 1) / size / self._fast
        here = max(1, self.cluster.linked_gpus // stride)
        seconds = max((here - 1) / size / self._fast, (size - here) / size / self._port)
        of_block = max(1, self.cluster.block_gpus // stride)
        if self.cluster.block_gpus and size > of_block:
            seconds = max(seconds, (size - of_block) / size / self._between_blocks)
        return seconds

    @property
    def _between_blocks(self) -> float:
        return self.cluster.block_gbps * GB * self.efficiency.network
