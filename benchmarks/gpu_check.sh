#!/usr/bin/env bash
# Finds an interpreter whose torch sees the GPU, fills what else it lacks from wheels/ without a network, and runs
# gpu_check.py with it: at most eight minutes on one GPU.
#
#   benchmarks/gpu_check.sh             # on a machine with a GPU
#   benchmarks/gpu_check.sh --smoke     # tiny shapes on the CPU
#
# PYTHON names the interpreter; without it .venv/bin/python is taken, else python3. Where packages are missing, wheels/ must
# hold them. It is filled where there is a network, for the Python version and platform of the machine; torch comes with
# the machine, since a CUDA build is too large to be carried:
#
#   pip download -d wheels --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 --no-deps \
#     blake3 crc32c msgspec networkx numpy psutil pyzmq rich tokenizers typer accelerate jinja2 peft safetensors transformers …
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
LIMIT_S=${LIMIT_S:-480}

"$PYTHON" - <<'FOUND'
import importlib.util, sys
print("python", sys.version.split()[0], sys.executable, file=sys.stderr)
if importlib.util.find_spec("torch") is None:
    sys.exit("this interpreter has no torch; name one that has: PYTHON=/path/to/python benchmarks/gpu_check.sh")
import torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("torch", torch.__version__, "with", ", ".join(gpus) or "no GPU", file=sys.stderr)
FOUND

missing=$("$PYTHON" - <<'MISSING'
import importlib.util
modules = {
    "accelerate": "accelerate", "blake3": "blake3", "crc32c": "crc32c", "jinja2": "jinja2", "msgspec": "msgspec",
    "networkx": "networkx", "numpy": "numpy", "peft": "peft", "psutil": "psutil", "zmq": "pyzmq", "rich": "rich",
    "safetensors": "safetensors", "tokenizers": "tokenizers", "transformers": "transformers", "typer": "typer",
    "pytest": "pytest", "pytest_asyncio": "pytest-asyncio", "pytest_timeout": "pytest-timeout", "matplotlib": "matplotlib",
    "hypothesis": "hypothesis",
}
print(*(package for module, package in modules.items() if importlib.util.find_spec(module) is None))
MISSING
)
if [ -n "$missing" ]; then
  [ -d wheels ] || { echo "missing here: $missing; and there is no wheels/ to take them from (see the head of this file)" >&2; exit 2; }
  "$PYTHON" -m venv --system-site-packages .venv-gpu
  # shellcheck disable=SC2086  # names, one word each
  .venv-gpu/bin/pip install --quiet --no-index --find-links wheels $missing
  PYTHON=.venv-gpu/bin/python
fi

PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec timeout --kill-after 10 "$LIMIT_S" "$PYTHON" benchmarks/gpu_check.py "$@"
