// cuDNN's backend API as a store of attributes: one engine for everything. Its workspace is STUB_CUDNN_WORKSPACE bytes;
// "copies": as many as a convolution's input, weights and output have that lie channels first (what tightfit assumes);
// "twice": twice as many. Beside an engine with a workspace there is one without, which torch tries where the first
// finds no memory.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>
#include "cudnn_constants.h"
#define API extern "C" __attribute__((visibility("default")))
API void stub_launch(void* stream, const char* name);
API int stub_fails(const char* call);
struct Thing { int kind; std::map<int, std::pair<int64_t, std::vector<char>>> has; };
struct Context { void* stream; };
static size_t size_of(int type) {
  switch (type) { case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8; case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1; case CUDNN_TYPE_FRACTION: return 16; default: return 4; }
}
template <class T> static std::vector<T> list(Thing* it, int name) {
  auto found = it->has.find(name);
  if (found == it->has.end()) return {};
  auto* at = (T*)found->second.second.data();
  return std::vector<T>(at, at + found->second.second.size() / sizeof(T));
}
static int64_t bytes_channels_first(Thing* tensor) {
  auto dims = list<int64_t>(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS), strides = list<int64_t>(tensor, CUDNN_ATTR_TENSOR_STRIDES);
  auto types = list<int>(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE);
  if (dims.size() < 2 || types.empty() || dims[1] == 1 || strides[1] == 1) return 0;
  int64_t bytes = types[0] == CUDNN_DATA_FLOAT ? 4 : types[0] == CUDNN_DATA_DOUBLE ? 8 : 2;
  for (auto n : dims) bytes *= n;
  return bytes;
}
const int WORKSPACE = -1;  // what a convolution would like; each thing hands it on, as those before it may be gone by then
static void set_workspace(Thing* it, int64_t bytes) { it->has[WORKSPACE] = {1, std::vector<char>((char*)&bytes, (char*)&bytes + 8)}; }
static void find_workspace(Thing* it) {
  const char* text = getenv("STUB_CUDNN_WORKSPACE");
  int64_t sum = 0;
  auto add = [&](int name) { for (auto* part : list<Thing*>(it, name)) for (auto bytes : list<int64_t>(part, WORKSPACE)) sum += bytes; };
  if (it->kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR)
    for (int name : {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y})
      for (auto* tensor : list<Thing*>(it, name)) sum += bytes_channels_first(tensor);
  if (it->kind == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) add(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (it->kind == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) add(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  bool twice = text && !strcmp(text, "twice") && it->kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  bool counted = text && (!strcmp(text, "twice") || !strcmp(text, "copies"));
  set_workspace(it, counted ? sum * (twice ? 2 : 1) : text ? atoll(text) : 0);
}
API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(cudnnStatus_t) { return "stub"; }
API void cudnnGetLastErrorString(char* out, size_t n) { snprintf(out, n, "stub"); }
API cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* out) { *out = which == 0 ? CUDNN_MAJOR : which == 1 ? CUDNN_MINOR : CUDNN_PATCHLEVEL; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnCreate(cudnnHandle_t* out) { if (stub_fails("cudnn_create")) return CUDNN_STATUS_DEVICE_ALLOCATION_FAILED; *out = (cudnnHandle_t) new Context{}; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnSetStream(cudnnHandle_t it, cudaStream_t stream) { ((Context*)it)->stream = stream; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnGetStream(cudnnHandle_t it, cudaStream_t* out) { *out = (cudaStream_t)((Context*)it)->stream; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t* out) { *out = (cudnnBackendDescriptor_t) new Thing{kind}; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t it) { delete (Thing*)it; return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t it) { find_workspace((Thing*)it); return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t it, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n, const void* values) {
  auto& [count, bytes] = ((Thing*)it)->has[name]; count = n; bytes.assign((const char*)values, (const char*)values + n * size_of(type)); return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t it, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t asked, int64_t* count, void* out) {
  auto* thing = (Thing*)it;
  auto found = thing->has.find(name);
  if (found != thing->has.end()) {
    int64_t n = found->second.first; if (count) *count = n;
    if (out) memcpy(out, found->second.second.data(), (n < asked ? n : asked) * size_of(type));
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {  // configurations, one of each engine
    int64_t workspace = list<int64_t>(thing, WORKSPACE)[0], n = workspace > 0 ? 2 : 1;
    if (asked > 0 && asked < n) n = asked;
    if (count) *count = n;
    for (int64_t index = 0; out && index < n && index < asked; index++) {
      auto* config = ((Thing**)out)[index];
      if (!config) continue;
      auto* engine = new Thing{CUDNN_BACKEND_ENGINE_DESCRIPTOR};
      engine->has[CUDNN_ATTR_ENGINE_GLOBAL_INDEX] = {1, std::vector<char>((char*)&index, (char*)&index + 8)};
      set_workspace(config, index ? 0 : workspace);
      config->has[CUDNN_ATTR_ENGINECFG_ENGINE] = {1, std::vector<char>((char*)&engine, (char*)&engine + 8)};
    }
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE) {
    if (count) *count = 1;
    auto configs = list<Thing*>(thing, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    auto known = configs.empty() ? std::vector<int64_t>() : list<int64_t>(configs[0], WORKSPACE);
    if (out) *(int64_t*)out = known.empty() ? 0 : known[0];
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE || name == CUDNN_ATTR_ENGINE_KNOB_INFO) { if (count) *count = 0; return CUDNN_STATUS_SUCCESS; }
  if (count) *count = 1;
  if (out && asked > 0 && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) memset(out, 0, size_of(type));
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t it, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) { if (stub_fails("cudnn")) return CUDNN_STATUS_DEVICE_ALLOCATION_FAILED; stub_launch(((Context*)it)->stream, "cudnnBackendExecute"); return CUDNN_STATUS_SUCCESS; }
