#!/bin/sh
# versions.sh TORCH TEST ...: TEST ... without a card, and then tests/gpu on the stub, with this version of torch.
# 2.15 may need PIP_CONFIG_FILE=/dev/null where pip is held to older ones.
set -e
torch=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
venv=.venv-cuda-$torch
echo "torch $torch on the stub's card:"
"$here/test.sh" "$venv" "$torch" -m "gpu and not full"
[ -e "$venv/.ready" ] || exit 0 # no package index answers, as was said
echo "torch $torch without a card:"
STUB_CARDS=0 STUB_RACES=0 "$here/run.sh" "$venv" python -m pytest -n "${WORKERS:-2}" --dist worksteal \
    -W "ignore:invalid escape sequence" "$@"
