// cuBLAS and cuBLASLt, as far as torch looks at what they answer.
#include <cstdlib>
#include <cstring>
#define API extern "C" __attribute__((visibility("default")))
API void stub_launch(void* stream, const char* name);
API int stub_fails(const char* call);
const int ALLOCATION_FAILED = 3;
struct Handle { void* stream; int math, pointers; size_t workspace; };
API int cublasCreate_v2(Handle** out) { if (stub_fails("cublas_create")) return ALLOCATION_FAILED; *out = new Handle{}; return 0; }
API int cublasDestroy_v2(Handle* it) { delete it; return 0; }
API int cublasSetStream_v2(Handle* it, void* stream) { it->stream = stream; return 0; }
API int cublasSetWorkspace_v2(Handle* it, void*, size_t bytes) { it->workspace = bytes; return 0; }
API int cublasGetMathMode(Handle* it, int* out) { *out = it->math; return 0; }
API int cublasSetMathMode(Handle* it, int mode) { it->math = mode; return 0; }
API int cublasGetPointerMode_v2(Handle* it, int* out) { *out = it->pointers; return 0; }
API int cublasSetPointerMode_v2(Handle* it, int mode) { it->pointers = mode; return 0; }
API int cublasGetVersion_v2(Handle*, int* out) { *out = 130100; return 0; }
#define GEMM(name) API int name(Handle* it) { if (stub_fails("cublas")) return ALLOCATION_FAILED; stub_launch(it->stream, #name); return 0; }
GEMM(cublasGemmEx) GEMM(cublasGemmStridedBatchedEx) GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasSgemmEx)
GEMM(cublasSgemmStridedBatched) GEMM(cublasDgemmStridedBatched) GEMM(cublasCgemm_v2) GEMM(cublasZgemm_v2)
GEMM(cublasSgemv_v2) GEMM(cublasDgemv_v2)
