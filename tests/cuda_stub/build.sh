#!/bin/sh
# build.sh VENV [OUT]: the libraries that stand for NVIDIA's, for the torch (CUDA 13) in VENV, into OUT (VENV/stub).
# Needs g++, nm and, in VENV, nvidia-cuda-runtime and nvidia-cuda-crt: two small packages of headers.
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$(cd "$1" && echo "$PWD"/lib/python3*/site-packages)
out=${2:-$1/stub}
mkdir -p "$out"
out=$(cd "$out" && pwd)
"$1/bin/python" "$here/generate.py" "$site/torch/lib" "$out"
flags="-std=c++17 -O2 -g -fPIC -shared -w -I$site/nvidia/cu13/include"

make_one() { # soname, source written by hand, what it is linked with
    script=""
    [ -s "$out/$1.map" ] && script="-Wl,--version-script=$out/$1.map"
    g++ $flags -o "$out/$1" "$out/$1.gen.cpp" $2 -Wl,-soname,"$1" $script $3
}

make_one libcudart.so.13 "$here/core.cpp" -ldl
cd "$out"
for name in libcuda.so.1 libnvidia-ml.so.1 libcusolver.so.12 libcusparse.so.12 libcusparseLt.so.0 libcurand.so.10 \
    libcufile.so.0 libnvrtc.so.13 libnvshmem_host.so.3; do
    make_one $name "" ./libcudart.so.13
done
make_one libcublas.so.13 "$here/cublas.cpp" ./libcudart.so.13
make_one libcublasLt.so.13 "$here/cublaslt.cpp" ./libcudart.so.13
make_one libcufft.so.12 "$here/cufft.cpp" ./libcudart.so.13
make_one libnccl.so.2 "$here/nccl.cpp" ./libcudart.so.13
make_one libcudnn.so.9 "$here/cudnn.cpp" ./libcudart.so.13
ls "$out"/*.so.* | grep -v "\.gen\|\.map" | tr '\n' ':' | sed 's/:$//' > "$out/preload"
