#!/bin/sh
# test.sh VENV TORCH [pytest's options]: sets VENV up where it is not or is out of date, and runs tests/gpu on the stub.
set -e
venv=$1 torch=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
export STUB_CARDS=${STUB_CARDS:-2}
if [ ! -e "$venv/.ready" ] || [ -n "$(find constraints.txt pyproject.toml "$here"/setup.sh -newer "$venv/.ready")" ]; then
    "$here/setup.sh" "$venv" "$torch" || {
        code=$?
        [ $code = 3 ] || exit $code
        echo "not run: no package index answers, so there is no CUDA build of torch $torch"
        exit 0
    }
elif [ -n "$(find "$here"/*.cpp "$here"/*.h "$here"/*.py "$here"/build.sh -newer "$venv/stub/preload")" ]; then
    "$here/build.sh" "$venv"
fi
# what is imported for the first time is compiled, with warnings of which each would be an error
exec "$here/run.sh" "$venv" python -m pytest tests/gpu -p cuda_stub.plugin -n "${WORKERS:-2}" --dist worksteal \
    -W "ignore:invalid escape sequence" "$@"
