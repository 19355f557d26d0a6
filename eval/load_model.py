# SPDX-License-Identifier: Apache-2.0
"""Load a trained stage as a plain Megatron model under any layout, without NeMo's trainer.

The shape and the rotation come from the resolved recipe next to the checkpoints; the weights are
resharded from the checkpoint by Megatron's distributed checkpointing.
"""

from pathlib import Path
from typing import Any

import fiddle as fdl
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.model import LongContextGPT
from custom_modules.gpt.rotation import rotation_of
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from custom_modules.rope.rotary import stated_rotation
from recipes.checkpoints.marker import newest_checkpoint
from recipes.checkpoints.rotation import RotationError, require_recorded, rotation_before
from recipes.checkpoints.verified import verified
from recipes.nemo2 import model as gpt
from recipes.nemo2.cpu import plain_kernels
from recipes.nemo2.settings import as_config_node
from recipes.resolved import yaml_file
from recipes.spec import pipeline


def load(
    stage: Path,
    *,
    seq_length: int,
    bf16: bool = False,
    verify: bool = True,
    start: Path | None = None,
    rope: RopeScaling | None = None,
) -> LongContextGPT:
    """Return the model of the stage's newest checkpoint, for up to `seq_length` tokens.

    `start` is another checkpoint of the same shape, `rope` another rotation than the stage's.
    Megatron's parallel state must be initialised. This rank's shard is loaded: its tensor rank's
    part of the layers of its pipeline stage, whatever the layout of the training was. With `verify`
    the checksums of the checkpoint's files are verified. Raises ValueError if the stage has no
    complete checkpoint, or a damaged one, and RotationError if the built model does not rotate as
    the checkpoint was trained, or as `rope` states.
    """
    checkpoint = start or newest_checkpoint(stage / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{stage} has no complete checkpoint; train the stage first")
    tp = parallel_state.get_tensor_model_parallel_world_size()
    node = yaml_file.read(stage / "config.yaml").model.config
    if not bf16:
        plain_kernels(node)
    node.seq_length = seq_length
    node.tensor_model_parallel_size = tp
    node.context_parallel_size = parallel_state.get_context_parallel_world_size()
    node.sequence_parallel = tp > 1
    stages(node, parallel_state.get_pipeline_model_parallel_world_size())
    node.cp = ContextParallelKind()  # the stage's kind was chosen for its own ranks,
    node.attention_kernel = "auto"  # and its kernel for its own device
    node.recompute, node.offload = Recompute(), Offload()  # there is no backward
    node.tiling = Tiling(loss=True)  # the logits of 16K tokens and 50K words are 3 GiB
    if rope is not None:
        node.rope = as_config_node(rope)
    node.bf16 = bf16
    node.params_dtype = torch.bfloat16 if bf16 else torch.float32
    node.pipeline_dtype = torch.float32 if node.fp32_residual_connection else node.params_dtype
    model_parallel_cuda_manual_seed(0)
    config: gpt.LongContextMixin = fdl.build(node)
    before = rotation_before(checkpoint)
    model = config.configure_model(tokenizer=None)
    require_rotation(model, config.rope, seq_length, config.pattern)
    if rope is None:
        length = seq_length if before is None or before.length is None else before.length
        require_recorded(checkpoint, rotation_of(model, length), f"the model of {stage}")
    device = torch.device("cuda", torch.cuda.current_device())
    model = model.to(device).eval()
    with verified(checkpoint, verify=verify):
        weights = dist_checkpointing.load(
            model.sharded_state_dict(prefix="module."),
            str(checkpoint / "weights"),
            strict=StrictHandling.ASSUME_OK_UNEXPECTED,
        )
    model.load_state_dict(
        {name.removeprefix("module."): value for name, value in weights.items()
         if name.startswith("module.")},
        strict=True,
    )  # fmt: skip
    return model


def require_rotation(
    model: LongContextGPT, rope: RopeScaling, length: int, pattern: LayerPattern | None = None
) -> None:
    """Raise RotationError unless a built model rotates sequences of a length as stated."""
    stated = stated_rotation(rope, model.config.kv_channels, length, pattern)
    why = rotation_of(model, length).difference(stated)
    if why:
        raise RotationError(
            f"the built model does not rotate by {rope.method} as it should: {why}; what it "
            "computes would be another model's"
        )


def stages(node: fdl.Buildable[Any], count: int) -> None:
    """Divide the layers of a model's config into pipeline stages, without interleaving.

    As in training, embedding and LM head count as a layer each where the stages do not divide the
    layers.
    """
    uneven = pipeline.is_uneven(node.num_layers, count)
    node.pipeline_model_parallel_size = count
    node.virtual_pipeline_model_parallel_size = None
    node.account_for_embedding_in_pipeline_split = uneven
    node.account_for_loss_in_pipeline_split = uneven
