#!/bin/sh
# gpu_wheels.sh PYTHON FOLDER [VERSION]: wheels that a machine with a card and torch, but without a network, lacks.
# VERSION is that machine's Python (3.12). What torch brings is taken to be there, numpy too; of constraints.txt
# checks, documentation and optional parts are left out. Fails above 60 MB.
set -e
python=$1 folder=$2 version=${3:-3.12} root=$(cd "$(dirname "$0")/.." && pwd)
there='torch|numpy|sympy|mpmath|networkx|filelock|fsspec|jinja2|markupsafe|typing_extensions|setuptools|triton.*|nvidia.*'
unused='torchao|scipy|hf-xet|fonttools|pytest-xdist|execnet|ray|msgpack|protobuf|mypy|mypy_extensions|ast_serialize|librt|ruff|types-.*|.*mkdocs.*|backrefs|babel'
unused="$unused|colorama|ghp-import|jsonschema.*|markdown|mergedeep|paginate|pathspec|pymdown-extensions|pyyaml_env_tag"
unused="$unused|watchdog|hatch.*|trove-.*|editables|referencing|rpds-py"
rm -rf "$folder" && mkdir -p "$folder"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
grep -E '^[A-Za-z]' "$root/constraints.txt" | grep -v -i -x -E "($there|$unused)==.*" > "$list"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$folder" \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
    --implementation cp -r "$list"
# the one without compiled code is a fifth as large
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$folder" \
    --platform any --implementation py --abi none "$(grep -E '^fonttools==' "$root/constraints.txt")"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$folder" diffusers-mm ||
    echo "diffusers-mm is not there: it is left out of the comparison"
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | wc -l) wheels, $size MB, for Python $version"
test "$size" -lt 60 || { echo "more than 60 MB"; exit 1; }
