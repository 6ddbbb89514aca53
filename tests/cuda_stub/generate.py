"""Writes a stub of every symbol that torch's libraries want of NVIDIA's and that is not written by hand.

generate.py TORCH_LIB OUT: OUT/<library>.gen.cpp and OUT/<library>.map for each library
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DRIVER = "Ctx|Device|Dev|Func|Get|Init|Launch|Link|Mem|Module|Multicast|Occupancy|Pointer|Green|Stream|Event|Tensor"
LIBRARIES = {  # soname: the version its symbols have, and what its symbols without one look like
    "libcudart.so.13": ("libcudart.so.13", r"(__)?cuda[A-Z_]"),
    "libcuda.so.1": (None, rf"cu({DRIVER})"),
    "libnvidia-ml.so.1": (None, r"nvml"),
    "libcublas.so.13": ("libcublas.so.13", r"cublas(?!Lt)"),
    "libcublasLt.so.13": ("libcublasLt.so.13", r"cublasLt"),
    "libcudnn.so.9": ("libcudnn.so.9", r"cudnn"),
    "libcufft.so.12": ("libcufft.so.12", r"cufft"),
    "libcusolver.so.12": ("libcusolver.so.12", r"cusolver"),
    "libcusparse.so.12": ("libcusparse.so.12", r"cusparse(?!Lt)"),
    "libcusparseLt.so.0": (None, r"cusparseLt"),
    "libcurand.so.10": ("libcurand.so.10", r"curand"),
    "libcufile.so.0": (None, r"cuFile"),
    "libnccl.so.2": (None, r"p?nccl"),
    "libnvrtc.so.13": ("libnvrtc.so.13", r"nvrtc"),
    "libnvshmem_host.so.3": ("NVSHMEM", r"nvshmem"),
}
BY_HAND = {
    "libcudart.so.13": "core.cpp",
    "libcublas.so.13": "cublas.cpp",
    "libcublasLt.so.13": "cublaslt.cpp",
    "libcudnn.so.9": "cudnn.cpp",
    "libcufft.so.12": "cufft.cpp",
    "libnccl.so.2": "nccl.cpp",
}
ASKED_BY_NAME = {  # at run time
    "libcuda.so.1": """
        cuCtxFromGreenCtx cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDevResourceGenerateDesc cuDevSmResourceSplitByCount
        cuDeviceGetDevResource cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate cuMemExportToShareableHandle
        cuMemGetAllocationPropertiesFromHandle cuMemImportFromShareableHandle cuMemRetainAllocationHandle
        cuMemcpyAsync cuMemsetD32Async cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate cuMulticastUnbind
        cuStreamWriteValue32""",
    "libnvidia-ml.so.1": """
        nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2
        nvmlDeviceGetP2PStatus""",
}
# SUCCEED answers 0; CREATE makes something to point at; TEXT answers a word
BEGINNING = """extern "C" void stub_unknown(const char*);
#define API extern "C" __attribute__((visibility("default")))
#define ONCE(name) static int n; if (!n++) stub_unknown(#name);
#define SUCCEED(name) API long name(void**) { ONCE(name) return 0; }
#define CREATE(name) API long name(void** it) { ONCE(name) static long thing[64]; *it = thing; return 0; }
#define TEXT(name) API const char* name() { return "stub"; }
"""


def main(torch_lib: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    wanted = wanted_symbols(torch_lib)
    for library, (version, _) in LIBRARIES.items():
        missing = sorted(wanted[library] - written_by_hand(library))
        (out / f"{library}.gen.cpp").write_text(BEGINNING + "".join(f"{kind_of(name)}({name})\n" for name in missing))
        (out / f"{library}.map").write_text(f"{version} {{ global: *; }};\n" if version else "")


def wanted_symbols(torch_lib: Path) -> dict[str, set[str]]:
    """Of each library, what torch's want of it."""
    wanted = {library: set(ASKED_BY_NAME.get(library, "").split()) for library in LIBRARIES}
    for file in sorted(torch_lib.glob("lib*.so")):
        command = ["nm", "-D", "--undefined-only", str(file)]
        for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            for library, (own_version, pattern) in LIBRARIES.items():
                if version.lstrip("@") == own_version or (not version and re.match(pattern, symbol)):
                    wanted[library].add(symbol)
                    break
    return wanted


def written_by_hand(library: str) -> set[str]:
    """Symbols of `library` that need no stub, and those of the runtime, which every library is linked with."""
    sources = {"core.cpp", BY_HAND.get(library, "core.cpp")}
    text = "\n".join((HERE / source).read_text() for source in sorted(sources))
    return set(re.findall(r"^API [\w ]+?[ *]+(\w+)\(", text, re.M)) | set(re.findall(r"GEMM\((\w+)\)", text))


def kind_of(symbol: str) -> str:
    if re.search("ErrorString|GetLastError|ErrorName", symbol):
        return "TEXT"
    return "CREATE" if re.search("Create|DescriptorInit$", symbol) else "SUCCEED"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
