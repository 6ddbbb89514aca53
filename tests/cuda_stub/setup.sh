#!/bin/sh
# setup.sh VENV TORCH: a virtual environment with PyTorch's CUDA wheel and none of NVIDIA's libraries, and the stub.
# Exit code 3: nothing was installed, because no package index answers. Anything else that goes wrong is a failure.
set -e
venv=$1 torch=$2 root=$(cd "$(dirname "$0")/../.." && pwd)
pip="$venv/bin/python -m pip -qq --disable-pip-version-check --no-cache-dir"
rm -f "$venv/.ready"
[ -x "$venv/bin/python" ] || ${PYTHON:-python3} -m venv "$venv"

install() { # a wheel is 0.5 GB: no other copy of it is kept, and nothing is compiled before it is needed
    $pip install --no-compile --no-deps "$@"
}

# === and not ==, which may give a build for the CPU
if ! install "torch===$torch" nvidia-cuda-runtime nvidia-cuda-crt; then
    $pip index versions nvidia-cuda-runtime >/dev/null 2>&1 && exit 1
    exit 3
fi
"$venv/bin/python" - "$venv/lib" <<'PYTHON'
import glob, re, sys
found = re.search(r"^cuda[^=]*= '([^']*)'", open(glob.glob(sys.argv[1] + "/python3*/site-packages/torch/version.py")[0]).read(), re.M)
sys.exit(None if found and found[1].startswith("13.") else "this torch is no build for CUDA 13: " + (found[1] if found else "CPU only"))
PYTHON
grep -v '^#\|^torch==' "$root/constraints.txt" > "$venv/others.txt"
install -r "$venv/others.txt"
install -e "$root"
"$root/tests/cuda_stub/build.sh" "$venv"
"$root/tests/cuda_stub/run.sh" "$venv" python -c "
import torch
assert torch.cuda.is_available(), 'torch finds no card with the stub preloaded'
print('torch', torch.__version__, 'with', torch.cuda.get_device_name(0))"
touch "$venv/.ready"
