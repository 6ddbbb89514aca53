#include <cstdlib>
#include <cstring>
#define API extern "C" __attribute__((visibility("default")))
API void stub_launch(void* stream, const char* name);
API int stub_fails(const char* call);
const int ALLOCATION_FAILED = 3;
struct Heuristic { unsigned long algo[8]; size_t workspace; int state; float waves; int reserved[4]; };
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* out, int* n) { memset(out, 0, sizeof *out); *n = 1; return 0; }
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, void* stream) { if (stub_fails("cublas")) return ALLOCATION_FAILED; stub_launch(stream, "cublasLtMatmul"); return 0; }
