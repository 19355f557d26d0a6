# SPDX-License-Identifier: Apache-2.0
"""What the sources of the shipped ladders state: figures of each stage, and total tokens.

`tests.recipes.support.ladder_table` makes docs/ladders.md of them and of the ladders.
"""

M4, M8 = 4_194_304, 8_388_608
PROLONG = {
    "method": "default", "peak": 1e-5, "end": 1e-6, "decay": 0.1, "beta2": 0.95,
    "documents": "within",
}  # fmt: skip
YARN = {
    "method": "yarn", "original": 4_096, "peak": 2e-5, "end": 0, "warmup": 20, "decay": 0,
    "beta2": 0.95,
}  # fmt: skip
LWM = {"method": "default", "batch": M4, "peak": 4e-5, "end": 4e-5}
ULTRALONG = {
    "method": "yarn", "base": 500_000, "original": 8_192, "beta_fast": 4, "peak": 3e-5,
    "documents": "across", "start": "card",
}  # fmt: skip
K2V2 = {
    "method": "default", "batch": 13_107_200, "peak": 6e-6, "end": 6e-6, "warmup": 0,
    "decay": 0.05, "beta2": 0.95,
}  # fmt: skip
APERTUS = {
    "method": "llama3", "original": 8_192, "decay": 0.1, "beta2": 0.999, "optimizer": "new",
}  # fmt: skip
APERTUS_8B = {**APERTUS, "batch": M8, "peak": 1.1e-5, "end": 1.1e-5}
APERTUS_70B = {**APERTUS, "batch": 2 * M8}
V1_8B = {**APERTUS_8B, "factor": 8, "warmup": 150}
V1_70B = {**APERTUS_70B, "factor": 8, "peak": 1e-6, "end": 1e-6, "warmup": 75}
V15_8B = {**APERTUS_8B, "documents": "within"}
V15_70B = {**APERTUS_70B, "documents": "within", "peak": 2e-6, "end": 2e-6}
SMOLLM3 = {
    "method": "default", "peak": 2e-5, "end": 0, "warmup": 1_000, "decay": 0.1, "beta2": 0.95,
    "documents": "within",
}  # fmt: skip
OLMO3 = {
    "method": "yarn", "base": 500_000, "original": 8_192, "factor": 8, "beta_fast": 32,
    "peak": 2.0712e-4, "end": 0, "warmup": 200, "decay": 0.1, "beta2": 0.95, "documents": "within",
}  # fmt: skip
DEEPSEEK = {
    "method": "yarn", "base": 10_000, "original": 4_096, "factor": 40, "beta_fast": 32,
    "steps": 1_000, "peak": 7.3e-6, "end": 7.3e-6, "decay": 0.1, "beta2": 0.95,
}  # fmt: skip
LONGRECIPE = {"warmup": 0, "peak": 5e-5, "end": 5e-5, "decay": 0.1, "beta2": 0.999}
LLAMA2_LONG = {
    "method": "default", "base": 500_000, "steps": 100_000, "batch": M4, "warmup": 2_000,
}  # fmt: skip
GENE = {"factor": 16, "original": 4_096, "peak": 2e-5, "end": 0, "decay": 0, "beta2": 0.999}
ABF = {"method": "default"}

STATED = [
    (
        "llama2_long_32k",
        {32_768: {**LLAMA2_LONG, "peak": 2e-5}},
        "2309.16039, sections 1, 2.1 and 4.1; batch: 2307.09288, section 2.2",
    ),
    (
        "llama2_long_16k",
        {16_384: {**LLAMA2_LONG, "peak": 1e-5}},
        "2309.16039, sections 1, 2.1 and 4.1; batch: 2307.09288, section 2.2",
    ),
    (
        "llama31",
        {
            **{k * 1024: {"base": 500_000, "documents": "within"} for k in (16, 32, 48, 64, 96)},
            131_072: {"base": 500_000, "documents": "within", "batch": 16_777_216},
        },
        "2407.21783, sections 3.2 and 3.4.2, table 4 (six stages, the last of 128K)",
    ),
    (
        "prolong",
        {
            65_536: {**PROLONG, "base": 8e6, "steps": 5_000, "batch": M4, "warmup": 500},
            524_288: {
                **PROLONG,
                "base": 1.28e8,
                "steps": 2_500,
                "batch": M8,
                "warmup": 250,
                "optimizer": "carried",
            },
        },
        "2410.02660, table 9; steps and sequences: train_64K.sh, train_512K.sh",
    ),
    (
        "qwen25_1m",
        {
            65_536: {**ABF, "base": 1e6},
            131_072: {**ABF, "base": 5e6},
            262_144: {**ABF, "base": 1e7},
        },
        "2501.15383, section 3 (its stages three to five)",
    ),
    ("ultralong_1m", {1_048_576: {**ULTRALONG, "factor": 128}}, "2504.06214, section 3.1, table 5"),
    ("ultralong_2m", {2_097_152: {**ULTRALONG, "factor": 256}}, "2504.06214, section 3.1, table 5"),
    (
        "ultralong_4m",
        {4_194_304: {**ULTRALONG, "factor": 512, "steps": 150, "sequences": 2}},
        "2504.06214, section 3.1, table 5; model card of UltraLong-4M",
    ),
    (
        "lwm",
        {
            32_768: {**LWM, "base": 1e6, "steps": 1_200, "warmup": 100},
            131_072: {**LWM, "base": 1e7, "steps": 3_000, "warmup": 200},
            262_144: {**LWM, "base": 1e7, "steps": 3_000, "warmup": 200},
            524_288: {**LWM, "base": 2.5e7, "steps": 720, "warmup": 50},
            1_048_576: {**LWM, "base": 5e7, "steps": 450, "warmup": 25},
        },
        "2402.08268, table 11",
    ),
    (
        "yarn",
        {
            65_536: {**YARN, "factor": 16, "steps": 400, "sequences": 64},
            131_072: {**YARN, "factor": 32, "steps": 200, "batch": 64 * 65_536},
        },
        "2309.00071, section 4.1; end: finetune.py and deepspeed/zero3.json of jquesnelle/yarn",
    ),
    (
        "longrope2",
        {
            131_072: {
                "method": "longrope",
                "factor": 16,
                "original": 8_192,
                "sequences": 64,
                "tokens": 10e9,
                "peak": 2e-5,
            }
        },
        "2502.20082, section 4.1",
    ),
    (
        "longrecipe_128k",
        {38_400: {**LONGRECIPE, "base": 131.5e6, "steps": 104, "sequences": 96, "target": 131_072}},
        "2409.00509, appendix A, table 4; zero3_offload.json of zhiyuanhubj/LongRecipe",
    ),
    (
        "gene_64k",
        {16_384: {**GENE, "steps": 300, "sequences": 128, "warmup": 100, "target": 65_536}},
        "configs/ptrain_16k_64k.yaml of LhLi-QED/GeNE",
    ),
    (
        "k2v2",
        {
            65_536: {**K2V2, "base": 1e6, "steps": 45_000, "sequences": 200},
            131_072: {
                **K2V2,
                "base": 1e7,
                "steps": 17_500,
                "sequences": 100,
                "optimizer": "carried",
            },
            524_288: {
                **K2V2,
                "base": 1e7,
                "steps": 10_000,
                "sequences": 25,
                "optimizer": "carried",
            },
        },
        "mid-train/k2v2_mid_train_stage2.sh to stage4.sh of LLM360/k2v2_train",
    ),
    (
        "apertus_8b",
        {
            8_192: {
                **V1_8B,
                "base": 1e6,
                "steps": 9_350,
                "sequences": 1_024,
                "documents": "within",
            },
            16_384: {**V1_8B, "base": 2e6, "steps": 6_930, "sequences": 512, "documents": "within"},
            32_768: {**V1_8B, "base": 4e6, "steps": 7_000, "sequences": 256, "documents": "within"},
            65_536: {
                **V1_8B,
                "base": 12e6,
                "steps": 3_480,
                "sequences": 128,
                "documents": "across",
            },
        },
        "long_context/training_scripts/8B of swiss-ai/pretrain-code",
    ),
    (
        "apertus_70b",
        {
            8_192: {**V1_70B, "base": 1e6, "steps": 4_800, "documents": "within"},
            16_384: {**V1_70B, "base": 2e6, "steps": 3_600, "documents": "within"},
            32_768: {**V1_70B, "base": 4e6, "steps": 3_580, "documents": "within"},
            65_536: {**V1_70B, "base": 8e6, "steps": 1_742, "documents": "across"},
        },
        "long_context/training_scripts/70B of swiss-ai/pretrain-code",
    ),
    (
        "apertus15_8b",
        {
            32_768: {**V15_8B, "base": 2e6, "factor": 8, "steps": 8_000, "warmup": 300},
            65_536: {**V15_8B, "base": 4e6, "factor": 8, "steps": 7_000, "warmup": 300},
            131_072: {**V15_8B, "base": 4e6, "factor": 16, "steps": 7_000, "warmup": 300},
            262_144: {**V15_8B, "base": 4e6, "factor": 32, "steps": 7_000, "warmup": 300},
        },
        "long-context/8b/*.sh of swiss-ai/pretrain-code at fa7c0a1",
    ),
    (
        "apertus15_8b_as_trained",
        {
            32_768: {**V15_8B, "base": 2e6, "factor": 8, "steps": 8_000, "warmup": 300},
            65_536: {**V15_8B, "base": 4e6, "factor": 8, "steps": 7_000, "warmup": 300},
            131_072: {**V15_8B, "base": 4e6, "factor": 8, "steps": 7_000, "warmup": 300},
            262_144: {**V15_8B, "base": 4e6, "factor": 8, "steps": 7_000, "warmup": 300},
        },
        "long-context/8b/*.sh of swiss-ai/pretrain-code at fa7c0a1",
    ),
    (
        "apertus15_70b",
        {
            32_768: {**V15_70B, "base": 2e6, "factor": 8, "steps": 3_625, "warmup": 0},
            65_536: {**V15_70B, "base": 4e6, "factor": 8, "steps": 3_500, "warmup": 100},
            131_072: {**V15_70B, "base": 4e6, "factor": 16, "steps": 3_000, "warmup": 100},
            262_144: {**V15_70B, "base": 4e6, "factor": 32, "steps": 3_000, "warmup": 100},
        },
        "long-context/70b/*.sh of swiss-ai/pretrain-code at fa7c0a1",
    ),
    (
        "apertus15_70b_as_trained",
        {
            32_768: {**V15_70B, "base": 2e6, "factor": 8, "steps": 3_625, "warmup": 0},
            65_536: {**V15_70B, "base": 4e6, "factor": 8, "steps": 3_500, "warmup": 100},
            131_072: {**V15_70B, "base": 4e6, "factor": 8, "steps": 3_000, "warmup": 100},
            262_144: {**V15_70B, "base": 4e6, "factor": 8, "steps": 3_000, "warmup": 100},
        },
        "long-context/70b/*.sh of swiss-ai/pretrain-code at fa7c0a1",
    ),
    (
        "smollm3",
        {
            32_768: {**SMOLLM3, "base": 2e6, "steps": 20_000, "sequences": 72},
            65_536: {
                **SMOLLM3,
                "base": 5e6,
                "steps": 22_000,
                "sequences": 36,
                "optimizer": "new",
            },
        },
        "text/pretraining/smollm3/long_context_*.yaml of huggingface/smollm",
    ),
    (
        "olmo3_7b",
        {65_536: {**OLMO3, "sequences": 64, "steps": 11_921, "tokens": 50e9}},
        "src/scripts/official/OLMo3/OLMo-3-1025-7B-long-context.py of allenai/OLMo-core",
    ),
    (
        "olmo3_32b",
        {65_536: {**OLMO3, "batch": M8, "steps": 11_921, "tokens": 100e9}},
        "src/scripts/official/OLMo3/OLMo-3-1025-32B-long-context.py of allenai/OLMo-core",
    ),
    (
        "deepseek_v3",
        {
            32_768: {**DEEPSEEK, "sequences": 1_920},
            131_072: {**DEEPSEEK, "sequences": 480},
        },
        "2412.19437, section 4.3",
    ),
    (
        "minimax01",
        {
            131_072: {**ABF, "base": 5e6, "tokens": 300e9},
            524_288: {**ABF, "base": 1e7, "tokens": 32e9},
            1_048_576: {**ABF, "base": 1e7, "tokens": 26e9},
        },
        "2501.08313, table 6",
    ),
    (
        "megabeam",
        {
            307_200: {**ABF, "base": 25e6},
            614_400: {**ABF, "base": 75e6},
            51_200: {"tokens": 200e6, "target": 614_400},
        },
        "2505.08651",
    ),
    ("five_million", {5_242_880: {"sequences": 1}}, "run_all_8B.sh of Untied-Ulysses"),
    ("fifteen_million", {15_728_640: {"sequences": 1}}, "2506.13996, tables 2 to 4"),
]
"""Ladder, its lengths and of each what the source says, and where."""

TOTALS = [
    ("llama2_long_32k", 400e9, "2309.16039, section 2.1"),
    ("llama2_long_16k", 400e9, "2309.16039, section 2.1"),
    ("llama31", 800e9, "2407.21783, section 3.4.2"),
    ("prolong", 40e9, "2410.02660, table 9"),
    ("lwm", 4.8e9 + 12e9 + 12e9 + 3e9 + 1.8e9, "2402.08268, table 11"),
    ("longrope2", 10e9, "2502.20082, section 4.1"),
    ("longrecipe_128k", 384e6, "2409.00509, table 4"),
    ("k2v2", 589.8e9 + 229.4e9 + 131.1e9, "steps and sequences of its scripts"),
    ("olmo3_7b", 50e9, "2512.13961"),
    ("olmo3_32b", 100e9, "2512.13961"),
    ("minimax01", 358e9, "2501.08313, table 6"),
    ("megabeam", 1.2e9 + 0.18e9 + 0.2e9, "2505.08651"),
]
"""Tokens as published; a source's million is 1,000,000 or 5% more."""

OUR_LENGTHS = {"llama31": (16_384, 32_768, 49_152, 65_536, 98_304), "megabeam": (51_200,)}
"""Lengths of stages above that the source does not state."""

OTHERWISE = {
    "llama2_long_32k": {32_768: {"tokens": 400e9}},
    "llama2_long_16k": {16_384: {"tokens": 400e9}},
    "ultralong_1m": {1_048_576: {"tokens": 1e9}},
    "ultralong_2m": {2_097_152: {"tokens": 1e9}},
    "lwm": {
        32_768: {"tokens": 4.8e9},
        131_072: {"tokens": 12e9},
        262_144: {"tokens": 12e9},
        524_288: {"tokens": 3e9},
        1_048_576: {"tokens": 1.8e9},
    },
    "yarn": {131_072: {"length": 65_536}},
    "k2v2": {65_536: {"optimizer": "carried"}},
    "olmo3_7b": {65_536: {"optimizer": "carried"}},
    "olmo3_32b": {65_536: {"optimizer": "carried"}},
    "fifteen_million": {15_728_640: {"length": 15_500_000}},
}
"""Figures that a source states and its ladder has otherwise, by ladder and length of the stage."""
