# SPDX-License-Identifier: Apache-2.0
"""Wrong files and places: what is typed, what the answer has to name, and what lies in the folder.

Of each name the bytes of the file, or None for an empty folder.
"""

import json
from collections.abc import Mapping

from benchmarks.reliability import wrong_data

Files = Mapping[str, bytes | None]

CLUSTER_FILES: dict[str, tuple[bytes, str]] = {
    "latin1": (b"name: caf\xe9\n", "0xe9"),
    "utf16": ("name: x\n".encode("utf-16"), "0xff"),
    "empty": (b"", "empty"),
    "list": (b"[1, 2]\n", "a list"),
    "text": (b"hello\n", "a str"),
    "cut": (b"hardware: {gpu: [", "line"),
    "nul": (b"a\0b: 1\n", "not YAML"),
    "twice": (b"executor: slurm\nexecutor: local\n", "executor twice, in lines 1 and 2"),
    "circle": (b"hardware: &a {gpu: *a}\n", "line 1"),
    "object": (
        b"name: !!python/object/apply:os.system ['true']\n",
        "python/object/apply:os.system",
    ),
    "deep": (b"[" * 5_000, "not YAML"),
    "large": (b"- 1\n" * 1_000_000, "262,144 bytes"),
    "laughs": (
        b"a0: &a0 [1]\n"
        + b"".join(
            b"a%d: &a%d [%s]\n" % (at, at, b", ".join([b"*a%d" % (at - 1)] * 10))
            for at in range(1, 9)
        ),
        "1,000,000 values",
    ),
    "date": (b"executor: 2026-13-45\n", "c.yaml has a value that is not YAML in line 1"),
    "whole number": (b"executor: slurm\npython: !!int eight\n", "line 2: 'eight' cannot be read"),
    "no digits": (b"python: !!int ''\n", "'' cannot be read as int"),
    "truth": (b"python: !!bool maybe\n", "'maybe' cannot be read as bool"),
    "time stamp": (b"python: !!timestamp noon\n", "'noon' cannot be read as timestamp"),
    "digits": (b"python: " + b"1" * 5_000 + b"\n", "cannot be read as int"),
    "field": (b"slurmm: {}\n", "slurmm"),
    "executor": (b"executor: moon\n", "moon"),
    "time": (b"slurm: {time: 4:00:00}\n", "time"),
    "unit": (b"slurm: {time: 'x'}\n", "slurm.time is 'x'"),
    "seconds": (b"slurm: {save_seconds: 5}\n", "save_seconds"),
    "port": (b"tunnel: {port: 0}\n", "port"),
    "variable": (b"environment: {'a b': 1}\n", "a b"),
    "hardware": (b"hardware: 3\n", "hardware"),
    "gpu": (b"hardware: {gpu: 3}\n", "gpu"),
    "gpus": (b"hardware: {gpus: 3}\n", "gpus"),
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
"""A config.json that is taken; each row changes one thing."""


def llama(**changed: object) -> bytes:
    """Return the config with fields changed, those of None left out."""
    fields = {**LLAMA, **changed}
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


CONFIGS: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"model_type": "lla', "not JSON"),
    "list": (b"[]", "no JSON object"),
    "latin1": (b'{"a": "\xe9"}', "0xe9"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "digits": (b'{"hidden_size": ' + b"1" * 5_000 + b"}", "not JSON"),
    "large": (b" " * (2**22 + 1), "4,194,304 bytes"),
    "family": (llama(model_type="gpt9"), "gpt9"),
    "layers": (llama(num_hidden_layers=10**9), "1,000,000,000"),
    "no layers": (llama(num_hidden_layers=0), "num_hidden_layers 0"),
    "words": (llama(num_hidden_layers="two"), "'two'"),
    "hidden": (llama(hidden_size=10**12), "1,000,000,000,000"),
    "vocabulary": (llama(vocab_size=-1), "vocab_size -1"),
    "no vocabulary": (llama(vocab_size=None), "vocab_size"),
    "epsilon": (llama(rms_norm_eps=0), "rms_norm_eps 0"),
    "activation": (llama(hidden_act="gelu"), "gelu"),
    "bias": (llama(attention_bias=True), "attention_bias"),
    "rotation": (llama(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    "factor": (llama(rope_scaling={"rope_type": "linear", "factor": 0.5}), "0.5"),
    "quantized": (llama(quantization_config={"bits": 4}), "quantization_config"),
}
_MARKER = json.dumps({"step": 1, "max_steps": 1, "tokenizer": "t"}).encode()
_RUN = json.dumps({"ladder": "tiny", "card": "tiny", "stages": ["tiny_512"]}).encode()
_STAGE = b'{"name": "tiny_512", "seq_length": 512}'
_JSON_LINES = b'{"text": "one"}\n'
_SPIKE = "doctor spike --run r"

SOURCES = (
    ("prepare --source a.jsonl --out s", "a.jsonl:2", {"a.jsonl": _JSON_LINES + b'{"text": \n'}),
    ("prepare --source a.jsonl --out s", "a.jsonl:1", {"a.jsonl": b"[1]\n"}),
    ("prepare --source a.jsonl --out s", "'text'", {"a.jsonl": b'{"txt": "one"}\n'}),
    ("prepare --source a.jsonl --out s --text-key body", "'body'", {"a.jsonl": _JSON_LINES}),
    ("prepare --source a.jsonl --out s", "a.jsonl:1", {"a.jsonl": b'{"text": "caf\xe9"}\n'}),
    ("prepare --source a.jsonl --out s", "a.jsonl:1", {"a.jsonl": b'{"text": 3}\n'}),
    ("prepare --source a.jsonl --out s", "a.jsonl:1", {"a.jsonl": b"[" * 50_000}),
    ("prepare --source a.jsonl --out s", "a.jsonl", {"a.jsonl": b""}),
    ("prepare --source a.jsonl.gz --out s", "a.jsonl.gz", {"a.jsonl.gz": b"\x1f\x8bnot"}),
    ("prepare --source a.docx --out s", "a.docx", {"a.docx": b"x"}),
    ("prepare --source d --out s", "holds no document", {"d": None}),
    ("prepare --source d --out s", "d/b.bin (neither Parquet", {"d/a.png": b"x", "d/b.bin": b"y"}),
    ("prepare --source d --out s", "not UTF-8 text", {"d/a.txt": b"a\0b"}),
    ("prepare --source a.jsonl --out s --vocab-size 300", "a.jsonl", {"a.jsonl": _JSON_LINES}),
)  # fmt: skip
PLACES = (
    ("prepare --out file", "file", {"file": b"x"}),
    ("prepare --out file/s", "file", {"file": b"x"}),
    ("prepare --out mine", "mine", {"mine/thesis.txt": b"x"}),
    ("prepare --out mine --overwrite", "mine", {"mine/thesis.txt": b"x"}),
    ("plan llama31_8b --seq 64K --plot f/x.png", "f/x.png", {"f": b"x"}),
    ("plan llama31_8b --seq 64K --plot d.png", "d.png", {"d.png": None}),
    ("rope --card tiny --plot f/x.png", "f/x.png", {"f": b"x"}),
    ("show tiny_8k --to-yaml f/x.yaml", "f/x.yaml", {"f": b"x"}),
    ("show tiny_8k --to-yaml d", "--to-yaml d", {"d": None}),
    ("pretrain --factory tiny_8k --to-yaml f/x.yaml", "f/x.yaml", {"f": b"x"}),
    ("run --ladder tiny --out f", "--out f", {"f": b"x"}),
    ("run --ladder tiny --out f/r", "f/r", {"f": b"x"}),
    ("rehearse tiny_8k --out f", "--out f", {"f": b"x"}),
    ("rehearse tiny_8k --out mine", "mine", {"mine/thesis.txt": b"x"}),
    ("import --from m --to f", "--to f", {"f": b"x", "m": None}),
    ("import --from m --to f/x", "f/x", {"f": b"x", "m": None}),
    ("export --from m --to d", "--to d", {"d": None, "m": None}),
    ("export --from m --to f/x", "f/x", {"f": b"x", "m": None}),
    ("checkpoint average m m --to d", "--to d", {"d": None, "m": None}),
    ("checkpoint average m m --to x", "m has no complete checkpoint", {"m": None}),
    ("checkpoint diff m", "m has no complete checkpoint", {"m": None}),
    ("checkpoint diff c", "c has no reproduce/record.json", {"c/longhaul.json": _MARKER}),
    ("report --run r --out f/x.html", "f/x.html", {"f": b"x", "r/run.json": _RUN}),
)  # fmt: skip
RUNS = (
    ("report --run r", "r/run.json", {"r/run.json": b'{"ladder"'}),
    ("report --run r", "r/run.json", {"r/run.json": b"[]"}),
    ("report --run r", "'stages'", {"r/run.json": b'{"ladder": "a", "card": "b"}'}),
    ("report --run r", "stages", {"r/run.json": b'{"ladder": "a", "card": "b", "stages": 3}'}),
    ("report --run r", "'a/b'", {"r/run.json": _RUN.replace(b"tiny_512", b"a/b")}),
    ("report --run r", "stage.json",
     {"r/run.json": _RUN, "r/stages/tiny_512/stage.json": b'{"name": 3}'}),
    ("report --run r", "metrics.jsonl",
     {"r/run.json": _RUN, "r/stages/tiny_512/metrics.jsonl": b'{"step": "x"}\n'}),
    ("report --run r", "tiny_512.json", {"r/run.json": _RUN, "r/eval/tiny_512.json": b"{"}),
    ("report --run file", "file", {"file": b"x"}),
    ("evaluate --run r --stage tiny_2k", "tiny_2k", {"r/run.json": _RUN}),
    ("evaluate --run r --device tpu", "tpu", {"r/run.json": _RUN}),
    ("evaluate --run r --depths 0,1.5", "--depths is '0,1.5'", {"r/run.json": _RUN}),
    ("evaluate --run r --depths half", "--depths is 'half'", {"r/run.json": _RUN}),
    ("evaluate --run r --lengths 4X", "not 4X", {"r/run.json": _RUN}),
    ("evaluate --run r --lengths 4K,100", "end at 100", {"r/run.json": _RUN}),
    ("evaluate --run r --passkeys 4K,,8K", "'4K,,8K'", {"r/run.json": _RUN}),
    ("evaluate --run r", "r/run.json", {"r/run.json": b"\xff\xfe"}),
    (_SPIKE, "no stage of r", {"r/run.json": _RUN}),
    (f"{_SPIKE} --stage tiny_2k", "tiny_2k", {"r/run.json": _RUN}),
    (_SPIKE, "metrics.jsonl",
     {"r/run.json": _RUN, "r/stages/tiny_512/metrics.jsonl": b"\0\0\0\xff garbage"}),
    ("doctor slow --factory llama31_8b_nemo_64k --run r", "metrics.jsonl", {"r/run.json": _RUN}),
    ("rope search --run r --stage tiny_2k --target 8K --out o.json", "tiny_2k",
     {"r/run.json": _RUN, "r/stages/tiny_512/stage.json": _STAGE}),
    ("rope search --run r --stage tiny_512 --target 512 --out o.json", "512",
     {"r/run.json": _RUN, "r/stages/tiny_512/stage.json": _STAGE}),
    ("rope search --run r --stage tiny_512 --target 2K --out f/o.json", "f/o.json",
     {"r/run.json": _RUN, "r/stages/tiny_512/stage.json": _STAGE, "f": b"x"}),
    ("export --from r --to x", "r is a run without a complete checkpoint",
     {"r/stages/tiny_512/stage.json": _STAGE}),
    ("export --from r --to x", "r has no complete checkpoint", {"r": None}),
    ("rehearse tiny_8k --store s", "s/manifest.json", {"s/manifest.json": b"{"}),
    ("rehearse tiny_8k --store s", "manifest.json", {"s": None}),
    ("run --ladder tiny --store f", "f is a file", {"f": b"x"}),
)  # fmt: skip
ROTATIONS = (
    ("rope --card tiny --method r.json", "r.json", {"r.json": b"{"}),
    ("rope --card tiny --method r.json", "r.json", {"r.json": b"[]"}),
    ("rope --card tiny --method r.json", "r.json", {"r.json": b"{}"}),
    ("rope --card tiny --method r.json", "'x'", {"r.json": b'{"format": "x"}'}),
    ("rope --card tiny --method r.json", "its version is 9",
     {"r.json": b'{"format": "longhaul rope", "version": 9}'}),
    ("rope --card tiny --method r.json", "0xe9", {"r.json": b'{"format": "\xe9"}'}),
)  # fmt: skip
_TWO = b"name: l\nstages:\n  - {seq_length: 64K, tokens: 1B, tokens_per_batch: 4M, lr: {peak: 1e-5}"
OWN: tuple[tuple[str, str, Files], ...] = (
    ("ladders new l.txt", "l.txt", {}),
    ("ladders new ''", "is empty", {}),
    ("ladders new /proc/l.yaml", "/proc/l.yaml", {}),
    ("ladders new l.yaml --seq 64X", "64X", {}),
    ("ladders new l.yaml --seq 64K", "--card", {}),
    ("ladders new l.yaml --card llama31_8b", "--seq", {}),
    ("ladders new l.yaml --seq 64K --card lama31_8b", "lama31_8b", {}),
    ("ladders new l.yaml --seq 256K --card llama31_8b --tokens 1G", "not 1G", {}),
    ("ladders new l.yaml --seq 256K --card llama31_8b --tokens-per-batch 4K", "4,096", {}),
    ("ladders check prolongg", "prolongg", {}),
    ("ladders check nowhere.yaml", "nowhere.yaml", {}),
    ("ladders check prolong --card qwen2_7b", "qwen2_7b", {}),
    ("ladders check longrope2 --card llama32_1b", "longrope2", {}),
    ("ladders check yarn --card llama31_8b", "131,072", {}),
    ("ladders --json check prolong", "--json before check", {}),
    ("config tiny", "tiny", {}),
    ("config --bogus", "--bogus", {}),
    ("ladders check l.yaml", "0xe9", {"l.yaml": b"name: \xe9\n"}),
    ("ladders check l.yaml", "empty", {"l.yaml": b""}),
    ("ladders check l.yaml", "a list", {"l.yaml": b"[]"}),
    ("ladders check l.yaml", "did you mean stages", {"l.yaml": b"name: l\nstage: []\n"}),
    ("ladders check l.yaml", "'seqlength'",
     {"l.yaml": _TWO.replace(b"seq_length", b"seqlength") + b"}\n"}),
    ("ladders check l.yaml", "rope has no base",
     {"l.yaml": _TWO + b", rope: {method: ntk, factor: 8}}\n"}),
    ("ladders check l.yaml --card llama3_8b", "'yarm'",
     {"l.yaml": _TWO + b", rope: 'yarm:factor=8'}\n"}),
    ("ladders check l.yaml", "Prolong", {"l.yaml": _TWO.replace(b"l\n", b"Prolong\n", 1) + b"}\n"}),
    ("ladders check l.py", "line 1", {"l.py": b"1 / 0\n"}),
    ("ladders check l.py", "0 ladders", {"l.py": b""}),
    ("ladders new l.yaml", "l.yaml exists already", {"l.yaml": b"x"}),
    ("ladders new l.yaml --seq 4K --card llama3_8b", "8,192 tokens already", {}),
    ("plan llama31_8b --ladder n.txt", "n.txt is not a ladder file", {"n.txt": b"x"}),
    ("plan llama31_8b --ladder d", "d is a folder", {"d": None}),
    ("plan llama31_8b --seq 64K --cluster n.txt", "n.txt is not a cluster file", {"n.txt": b"x"}),
    ("plan llama31_8b --seq 64K --cluster d", "d is a folder", {"d": None}),
    ("plan n.txt --seq 64K", "n.txt is a file", {"n.txt": b"x"}),
    ("import --from n.txt --to x", "n.txt is a file", {"n.txt": b"x"}),
    ("rope --card tiny --method yarn:betafast=2", "did you mean beta_fast", {}),
    ("plan m --seq 64K", "m has no config.json", {"m": None}),
    ("plan ./m --seq 64K", "config.json", {"m/config.json": b"{"}),
    ("plan m --seq 64K", "bert",
     {"m/config.json": json.dumps({**LLAMA, "model_type": "bert"}).encode()}),
    ("config", "is not TOML", {"longhaul.toml": b"cluster = x\n"}),
    ("config", "'clustr'", {"longhaul.toml": b"clustr = 'x'\n"}),
    ("config", "account is empty", {"longhaul.toml": b"account = ''\n"}),
    ("config", "{model}", {"longhaul.toml": b"out = 'runs/{model}'\n"}),
    ("plan llama31_8b --seq 64K", "dgx_h10", {"longhaul.toml": b"cluster = 'dgx_h10'\n"}),
    ("config", "0xe9", {"longhaul.toml": b"cluster = '\xe9'\n"}),
)  # fmt: skip
TABLES: tuple[tuple[tuple[str, str, Files], ...], ...] = (
    tuple(
        (f"{command} c.yaml", named, {"c.yaml": content})
        for content, named in CLUSTER_FILES.values()
        for command in ("clusters check", "plan llama31_8b --seq 64K --cluster")
        if command.startswith("clusters") or b"hardware" in content or b":" not in content
    ),
    tuple(
        (f"{command} m", named, {"m/config.json": content})
        for content, named in CONFIGS.values()
        for command in ("import --to x --from", "rope --model")
        if command.startswith("import") or named.startswith(("not", "no JSON", "0x", "nest"))
    ),
    SOURCES,
    wrong_data.FILES,
    PLACES,
    RUNS,
    ROTATIONS,
    OWN,
)
