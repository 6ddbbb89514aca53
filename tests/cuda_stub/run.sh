#!/bin/sh
# run.sh VENV COMMAND ...: with the stub of VENV (see build.sh) in place of NVIDIA's libraries.
tests=$(cd "$(dirname "$0")/.." && pwd)
preload=$(cat "$1/stub/preload") || exit 1
venv=$1; shift
export PATH="$(cd "$venv/bin" && pwd):$PATH" PYTHONPATH="$tests${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# late copies, races by bytes, and a card that fits into the RAM of the machine
export STUB_TOTAL=${STUB_TOTAL:-6G} STUB_COPY=${STUB_COPY:-1} STUB_ASYNC=${STUB_ASYNC:-1000} STUB_RACES=${STUB_RACES:-1}
unset PYTHONDONTWRITEBYTECODE # each process takes 9 s longer to import torch and diffusers where no byte code is kept
LD_PRELOAD=$preload exec "$@"
