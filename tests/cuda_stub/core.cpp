// A CUDA runtime without a card: what libcudart, libcuda and libnvidia-ml answer to PyTorch. See README.md.
// Memory is counted, copies are made or not, kernels do nothing; streams and events keep the order they were given.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <cerrno>
#include <csignal>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

// ---- settings, from the environment ------------------------------------------------------------------------------
static long long number(const char* name, long long other) {
  const char* text = getenv(name);
  if (!text || !*text) return other;
  char* end;
  double value = strtod(text, &end);
  double unit = *end == 'K' ? 1024. : *end == 'M' ? 1048576. : *end == 'G' ? 1073741824. : 1.;
  return (long long)(value * unit);
}
static const int CARDS = number("STUB_CARDS", 1);
static const long long TOTAL = number("STUB_TOTAL", 24LL << 30);     // bytes of each card
static const long long CONTEXT = number("STUB_CONTEXT", 0);          // bytes that are taken from the start
static const int MAJOR = number("STUB_CC", 89) / 10, MINOR = number("STUB_CC", 89) % 10;
static const int SMS = number("STUB_SMS", 128);
static const long long COPY_MAX = getenv("STUB_COPY") && atoi(getenv("STUB_COPY")) ? 1LL << 60 : number("STUB_COPY_MAX", 65536);
static const long long PINNABLE = number("STUB_PINNABLE", 1LL << 60);  // host bytes that can be page-locked
static const bool PAGES = number("STUB_PAGES", 0);                     // registered ranges may not share a page
static const long long LATE = number("STUB_ASYNC", 0);  // 0: all is done at once; n: when waited for, or asked n times
static const double LINK = number("STUB_LINK", 25000000000LL);
static FILE* LOG = nullptr;
// Faults: from the environment (STUB_<NAME>) or by stub_set(name, value) while a program runs. `fail_<call>` = n lets the
// n-th such call from now fail, and `fail_<call>_times` as many (1 where nothing is said).
static std::map<std::string, long long>& settings() { static auto* it = new std::map<std::string, long long>; return *it; }
static long long& setting(const std::string& name) {
  auto found = settings().find(name);
  if (found != settings().end()) return found->second;
  std::string variable = "STUB_";
  for (char each : name) variable += toupper(each);
  return settings()[name] = number(variable.c_str(), 0);
}

// One lock for everything. Who waits for another process gives it up meanwhile, however often it was taken.
class Monitor {
  std::recursive_mutex own;
  std::condition_variable_any changed;
  static thread_local int depth;
  struct Whole {
    Monitor& of; int depth;
    void unlock() { for (int n = 0; n < depth; n++) of.unlock(); }
    void lock() { for (int n = 0; n < depth; n++) of.lock(); }
  };
 public:
  void lock() { own.lock(); ++depth; }
  void unlock() { --depth; own.unlock(); }
  void wait() { Whole whole{*this, depth}; changed.wait_for(whole, std::chrono::milliseconds(100)); }
  void notify() { changed.notify_all(); }
};
thread_local int Monitor::depth = 0;
using Lock = std::lock_guard<Monitor>;
static Monitor& mutex() { static auto* it = new Monitor; return *it; }
#define LOCK Lock lock_(mutex())
API void stub_lock() { mutex().lock(); }
API void stub_unlock() { mutex().unlock(); }
API void stub_wait() { mutex().wait(); }  // with the lock: until something has changed, or for a while
API void stub_changed() { mutex().notify(); }

// ---- counters ------------------------------------------------------------------------------------------------------
static std::map<std::string, long long>& counts() { static auto* it = new std::map<std::string, long long>; return *it; }
static void count(const char* name, long long by = 1) { counts()[name] += by; }
static void log(const char* format, ...) {
  if (!LOG) return;
  va_list list;
  va_start(list, format);
  vfprintf(LOG, format, list);
  va_end(list);
}
static void hazard(const char* format, ...) {
  char text[400];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  count("hazards");
  log("HAZARD %s\n", text);
  fprintf(stderr, "stub: HAZARD %s\n", text);
}
API void stub_unknown(const char* name) {  // a generated stub was called for the first time
  LOCK;
  log("generated %s\n", name);
  if (getenv("STUB_VERBOSE")) fprintf(stderr, "stub: generated stub of %s is called\n", name);
}
API void stub_hazard(const char* text) { LOCK; hazard("%s", text); }
API void stub_count(const char* name, long long by) { LOCK; count(name, by); log("%s %lld\n", name, by); }
static bool fails(const std::string& call) {  // whether this call is the one that is to fail
  auto &left = setting("fail_" + call), &times = setting("fail_" + call + "_times");
  if (left <= 0 || --left > 0) return false;
  if (times > 1) { --times; left = 1; }
  count("faults");
  log("fault %s\n", call.c_str());
  return true;
}
API int stub_fails(const char* call) { LOCK; return fails(call); }
__attribute__((constructor)) static void begin() {
  if (const char* path = getenv("STUB_LOG")) LOG = fopen(path, "a");
}
__attribute__((destructor)) static void end() {
  if (!LOG) return;
  for (auto& [name, value] : counts()) log("total %s %lld\n", name.c_str(), value);
  fflush(LOG);
}

// ---- errors --------------------------------------------------------------------------------------------------------
static thread_local cudaError_t last = cudaSuccess;
static cudaError_t fail(cudaError_t error) { return last = error; }
API cudaError_t cudaGetLastError() { auto it = last; last = cudaSuccess; return it; }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case 0: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 9: return "invalid configuration argument";
    case 35: return "CUDA driver version is insufficient for CUDA runtime version";
    case 101: return "invalid device ordinal";
    case 209: return "no kernel image is available for execution on the device";
    case 600: return "device not ready";
    case 704: return "peer access is already enabled";
    case 712: return "part or all of the requested memory range is already mapped";
    case 713: return "pointer does not correspond to a registered memory region";
    case 999: return "unknown error";
    case 801: return "operation not supported";
    default: { static thread_local char text[40]; snprintf(text, sizeof text, "error %d of the stub", (int)error); return text; }
  }
}
API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---- streams and events ----------------------------------------------------------------------------------------------
struct Stream;
enum Kind { COPY, STAGED, SET, WAIT, CALL, EXCHANGE };  // EXCHANGE: a call that waits for other processes
struct Work {  // what is not done yet; kernels are only a number in the order
  unsigned long long at;
  Kind kind;
  void* target; const void* source; size_t bytes; int value;
  Stream* other; unsigned long long upto;
  void (*call)(void*);
};
struct Patience { unsigned long long upto = 0; std::chrono::steady_clock::time_point since; bool over = false; };
struct Stream {
  int number, card; unsigned flags; int priority;
  unsigned long long given = 0, done = 0;
  std::deque<Work> work;
  Patience patience;
  bool busy = false;  // a thread does the first work, and may have given up the lock
  std::map<int, unsigned long long> knows;  // of each stream, how far it is surely done when this one goes on
  double time = 0;  // seconds on its own clock: copies at STUB_LINK bytes a second, kernels 5 us each
};
struct Event { std::map<int, unsigned long long> knows; int number; Stream* stream; unsigned long long at; int asked; unsigned flags; double when; int card; Patience patience; };
static std::set<Stream*>& streams() { static auto* it = new std::set<Stream*>; return *it; }
static int stream_count = 0, event_count = 0;
static thread_local int card = 0;
static thread_local bool acts = false;  // this thread gives work: others, such as watchdogs, teach the host nothing
static std::set<int>& used_cards() { static auto* it = new std::set<int>; return *it; }

static Stream* new_stream(unsigned flags, int priority) {
  auto* it = new Stream{stream_count++, card, flags, priority};
  streams().insert(it);
  return it;
}
static Stream* of(cudaStream_t handle) {
  static Stream* first[16];
  if ((size_t)handle > 2) return (Stream*)handle;
  if (!first[card]) first[card] = new_stream(0, 0);
  return first[card];
}
// ---- races: who touched which bytes, and whether whoever does now has waited for that (STUB_RACES=1) ----------------------
static const bool RACES = number("STUB_RACES", 0);
static std::map<int, unsigned long long> host_knows;
static void learn(std::map<int, unsigned long long>& to, const std::map<int, unsigned long long>& from) {
  for (auto& [which, at] : from) { auto& own = to[which]; own = std::max(own, at); } }
static void learn(std::map<int, unsigned long long>& to, Stream* from) { learn(to, from->knows); auto& own = to[from->number]; own = std::max(own, from->given); }
struct Touch { int stream; unsigned long long at; const char* what; };  // stream -1: the host
struct Span { size_t bytes; Touch written; std::vector<Touch> read; };
static std::map<char*, Span>& spans() { static auto* it = new std::map<char*, Span>; return *it; }
static void split(char* at) {
  auto it = spans().upper_bound(at);
  if (it == spans().begin()) return;
  --it;
  if (it->first == at || it->first + it->second.bytes <= at) return;
  Span rest = it->second; rest.bytes = it->first + it->second.bytes - at; it->second.bytes = at - it->first;
  spans()[at] = rest;
}
static void forget(const void* address, size_t bytes) {
  auto* begin = (char*)address; split(begin); split(begin + bytes);
  spans().erase(spans().lower_bound(begin), spans().lower_bound(begin + bytes));
}
static const char* kept(const char* text) { static std::set<std::string> all; return all.insert(text).first->c_str(); }
static std::map<std::string, int> told;
static void touch(Stream* stream, const void* address, size_t bytes, bool write, const char* what) {
  if (!RACES || !bytes) return;
  auto &knows = stream ? stream->knows : host_knows;
  int who = stream ? stream->number : -1;
  unsigned long long now = stream ? stream->given + 1 : 0;
  auto *begin = (char*)address, *end = begin + bytes;
  split(begin); split(end);
  auto check = [&](const Touch& before, const char* kind, char* at, size_t n) {
    if (!before.what || before.stream == who || before.stream == -1) return;  // the host's own are done
    auto found = knows.find(before.stream);
    if (found != knows.end() && found->second >= before.at) return;
    char text[300]; snprintf(text, sizeof text, "%s: %s on %s%d, %s on stream %d", kind, what, stream ? "stream " : "host ", who, before.what, before.stream);
    if (told[text]++ < 1) hazard("race, %s (%p, %zu bytes)", text, at, n);
    count("races");
  };
  char* at = begin;
  for (auto it = spans().lower_bound(begin); at < end;) {
    if (it == spans().end() || it->first >= end) { spans()[at] = {(size_t)(end - at), {}, {}}; it = spans().find(at); }
    else if (it->first > at) { auto* next = it->first; spans()[at] = {(size_t)(next - at), {}, {}}; it = spans().find(at); }
    auto& span = it->second;
    check(span.written, write ? "write after write" : "read after write", it->first, span.bytes);
    if (write) {
      for (auto& read : span.read) check(read, "write after read", it->first, span.bytes);
      span.read.clear(); span.written = {who, now, what};
    } else {
      bool there = false;
      for (auto& read : span.read) if (read.stream == who) { read.at = now; read.what = what; there = true; }
      if (!there) span.read.push_back({who, now, what});
    }
    at = it->first + span.bytes; ++it;
  }
}
static void move(void* target, const void* source, size_t bytes) {  // host memory may be gone by now
  iovec to{target, bytes}, from{(void*)source, bytes};
  auto done = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
  if (done < 0 && errno != EFAULT) memmove(target, source, bytes);  // the call itself is not allowed here
  else if (done != (ssize_t)bytes) hazard("a copy of %zu bytes from %p to %p comes after its memory was unmapped", bytes, source, target);
}
static void drain(Stream* stream, unsigned long long upto) {
  while (!stream->work.empty() && stream->work.front().at <= upto) {
    if (stream->busy) { mutex().wait(); continue; }
    Work it = stream->work.front();
    stream->busy = true;
    if (it.kind == WAIT) drain(it.other, it.upto);
    if (it.kind == COPY && it.target != it.source) move(it.target, it.source, it.bytes);
    if (it.kind == STAGED) { memmove(it.target, it.source, it.bytes); free((void*)it.source); }
    if (it.kind == SET) memset(it.target, it.value, it.bytes);
    if (it.kind == CALL || it.kind == EXCHANGE) it.call(it.target);
    stream->work.pop_front();
    stream->busy = false;
    stream->done = std::max(stream->done, it.at);
    if (it.kind == WAIT || it.kind == EXCHANGE) mutex().notify();
  }
  stream->done = std::max(stream->done, upto);
}
static bool exchanges(Stream* stream, unsigned long long upto, int depth = 0) {  // whether it waits for other processes
  for (auto& it : stream->work) {
    if (it.at > upto) break;
    if (it.kind == EXCHANGE || (it.kind == WAIT && depth < 4 && exchanges(it.other, it.upto, depth + 1))) return true;
  }
  return false;
}
static bool ripe(Patience& it, unsigned long long upto) {  // whether somebody has asked for this for a second: once
  auto now = std::chrono::steady_clock::now();
  if (it.upto != upto) it = {upto, now, false};
  if (it.over || now - it.since < std::chrono::seconds(1)) return false;
  return it.over = true;
}
static void drain_aside(Stream* stream, unsigned long long upto) { std::thread([=] { LOCK; drain(stream, upto); }).detach(); }
static void give(Stream* stream, Work work) {
  acts = true;
  if (RACES) learn(stream->knows, host_knows);
  work.at = ++stream->given;
  stream->work.push_back(work);
  if (!LATE && work.kind != EXCHANGE) drain(stream, stream->given);
}
static void step(Stream* stream) { acts = true; if (RACES) learn(stream->knows, host_knows); stream->time += 5e-6; ++stream->given; if (!LATE && stream->work.empty()) stream->done = stream->given; }
static void legacy(Stream* stream) {  // the default stream and blocking streams wait for each other
  static std::vector<Stream*> blocking;
  if (!LATE || (stream->flags & cudaStreamNonBlocking)) return;
  bool first = stream == of(nullptr);
  for (auto* each : streams())
    if (each != stream && !(each->flags & cudaStreamNonBlocking) && each->card == stream->card && each->done < each->given)
      if (first || each == of(nullptr)) give(stream, {0, WAIT, 0, 0, 0, 0, each, each->given, 0});
}
static void drain_card(int which) { for (auto* each : streams()) if (each->card == which) { drain(each, each->given); if (RACES) learn(host_knows, each); } }
static bool pending(const void* address, size_t bytes, const char* what) {
  auto begin = (const char*)address, end = begin + bytes;
  bool any = false;
  for (auto* each : streams())
    for (auto& it : each->work) {
      if (it.kind != COPY && it.kind != STAGED && it.kind != SET) continue;
      auto hit = [&](const void* at) { auto from = (const char*)at; return at && from < end && from + it.bytes > begin; };
      if (hit(it.target) || (it.kind == COPY && hit(it.source))) { any = true; hazard("%s of %p (%zu bytes) before %zu bytes on stream %d are copied", what, address, bytes, it.bytes, each->number); break; }
    }
  return any;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  LOCK; *out = (cudaStream_t)new_stream(flags, priority); used_cards().insert(card);
  log("stream_create %d flags %u priority %d\n", ((Stream*)*out)->number, flags, priority); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) { LOCK; auto* it = of(handle); drain(it, it->given); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* out) { LOCK; *out = of(handle)->priority; return cudaSuccess; }
API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* out) { LOCK; *out = of(handle)->flags; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  LOCK; auto* it = of(handle); legacy(it); drain(it, it->given); if (RACES) learn(host_knows, it); count("stream_syncs"); log("stream_sync %d\n", it->number); return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  LOCK; auto* it = of(handle); static int asked;
  if (it->done >= it->given) return cudaSuccess;
  if (exchanges(it, it->given)) {
    if (ripe(it->patience, it->given)) drain_aside(it, it->given);
    return fail(cudaErrorNotReady);
  }
  if (++asked % std::max(LATE, 1LL) == 0) { drain(it, it->given); return cudaSuccess; }
  return fail(cudaErrorNotReady); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  LOCK; auto* it = of(handle); auto* e = (Event*)event;
  log("wait stream %d event %d (stream %d at %llu)\n", it->number, e->number, e->stream ? e->stream->number : -1, e->at);
  if (e->stream) it->time = std::max(it->time, e->when);
  if (RACES && e->stream) learn(it->knows, e->knows);
  if (e->stream && e->stream != it) give(it, {0, WAIT, 0, 0, 0, 0, e->stream, e->at, 0});
  return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { if (least) *least = 0; if (most) *most = -5; return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) { *out = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  *out = cudaStreamCaptureStatusNone; if (id) *id = 0; if (graph) *graph = 0; if (deps) *deps = 0; if (edges) *edges = 0; if (n) *n = 0; return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local auto now = cudaStreamCaptureModeGlobal; std::swap(now, *mode); return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return fail(cudaErrorNotSupported); }
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return fail(cudaErrorNotSupported); }
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) { return fail(cudaErrorNotSupported); }
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void* data, unsigned) { { LOCK; drain(of(handle), of(handle)->given); } call(handle, cudaSuccess, data); return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void* data) {
  LOCK; give(of(handle), {0, CALL, data, 0, 0, 0, 0, 0, call}); return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  LOCK; *out = (cudaEvent_t) new Event{{}, event_count++, nullptr, 0, 0, flags, 0, card, {}}; used_cards().insert(card); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { LOCK; delete (Event*)event; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  LOCK; auto* e = (Event*)event; auto* it = of(handle);
  if (e->card != it->card) return fail(cudaErrorInvalidResourceHandle);
  legacy(it); step(it); e->stream = it; e->at = it->given; e->asked = 0; e->when = it->time; if (RACES) { e->knows.clear(); learn(e->knows, it); } count("event_records");
  log("record event %d stream %d at %llu\n", e->number, it->number, e->at); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) { return cudaEventRecordWithFlags(event, handle, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  LOCK; auto* e = (Event*)event; count("event_queries");
  if (!e->stream || e->stream->done >= e->at) { if (RACES && acts) learn(host_knows, e->knows); return cudaSuccess; }
  if (exchanges(e->stream, e->at)) {
    if (ripe(e->patience, e->at)) drain_aside(e->stream, e->at);
    return fail(cudaErrorNotReady);
  }
  if (++e->asked >= LATE) { drain(e->stream, e->at); if (RACES) learn(host_knows, e->knows); return cudaSuccess; }
  return fail(cudaErrorNotReady); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCK; auto* e = (Event*)event; if (e->stream) drain(e->stream, e->at); if (RACES) learn(host_knows, e->knows); count("event_syncs"); log("event_sync %d\n", e->number); return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  LOCK; auto *x = (Event*)a, *y = (Event*)b;
  if (!x->stream || !y->stream || (x->flags & cudaEventDisableTiming) || (y->flags & cudaEventDisableTiming)) return fail(cudaErrorInvalidResourceHandle);
  if (x->stream->done < x->at || y->stream->done < y->at) return fail(cudaErrorNotReady);
  *ms = std::max(1e-3, (y->when - x->when) * 1e3); return cudaSuccess; }
// What other processes take part in, for nccl.cpp: `call` is done when this stream gets there. Returns where that is.
API unsigned long long stub_exchange(void* handle, void** stream, double seconds, void (*call)(void*), void* data) {
  LOCK; auto* it = of((cudaStream_t)handle); used_cards().insert(card);
  legacy(it); it->time += seconds; give(it, {0, EXCHANGE, data, 0, 0, 0, 0, 0, call});
  *stream = it; return it->given; }
API void stub_drain(void* stream, unsigned long long upto) { LOCK; drain((Stream*)stream, upto); }
API void stub_upto(void* handle) { LOCK; auto* it = of((cudaStream_t)handle); drain(it, it->given); }  // only what this stream has waited for

// ---- memory ----------------------------------------------------------------------------------------------------------
struct Block { size_t bytes; int card; bool ours; };       // ours: from cudaMalloc, not a reserved range of addresses
struct Range { size_t bytes; bool registered; };
static std::map<char*, Block>& blocks() { static auto* it = new std::map<char*, Block>; return *it; }
static std::map<char*, Range>& ranges() { static auto* it = new std::map<char*, Range>; return *it; }
static long long taken[16], most[16], locked;
static const size_t PIECE = 2 << 20, STAGING = 64 << 10;
static size_t rounded(size_t bytes) { return bytes >= PIECE / 2 ? (bytes + PIECE - 1) / PIECE * PIECE : (bytes + 511) / 512 * 512; }
template <class T> static typename std::map<char*, T>::iterator holding(std::map<char*, T>& all, const void* address) {
  auto it = all.upper_bound((char*)address);
  if (it == all.begin()) return all.end();
  --it;
  return (char*)address < it->first + it->second.bytes ? it : all.end();
}
// Processes with the same STUB_CARD_FILE share their cards: each has a line in that file with what it has taken of them.
struct Line { int pid; long long taken[16]; };
class Shared {
  static const int LINES = 64;
  int file = -1;
  Line *lines = nullptr, *own = nullptr;
  static bool alive(int pid) { return pid && (!kill(pid, 0) || errno == EPERM); }
 public:
  Shared() {
    const char* path = getenv("STUB_CARD_FILE");
    if (!path) return;
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, LINES * sizeof(Line))) { perror("stub: STUB_CARD_FILE"); abort(); }
    lines = (Line*)mmap(nullptr, LINES * sizeof(Line), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (lines == MAP_FAILED) { perror("stub: STUB_CARD_FILE"); abort(); }
  }
  void lock() { if (lines) flock(file, LOCK_EX); }
  void unlock() { if (lines) flock(file, LOCK_UN); }
  long long others(int which) {
    long long sum = 0;
    for (int n = 0; lines && n < LINES; n++)
      if (lines[n].pid != getpid() && alive(lines[n].pid)) sum += lines[n].taken[which] + (lines[n].taken[which] ? CONTEXT : 0);
    return sum;
  }
  void write(const long long* all) {
    if (!lines) return;
    for (int n = 0; (!own || own->pid != getpid()) && n < LINES; n++)
      if (!alive(lines[n].pid)) { own = &lines[n]; own->pid = getpid(); }
    if (own) memcpy(own->taken, all, sizeof own->taken);
  }
};
static Shared& shared() { static auto* it = new Shared; return *it; }
static void change(int which, long long by) {
  taken[which] += by; most[which] = std::max(most[which], taken[which]);
  shared().write(taken);
}
static long long used(int which) { return CONTEXT + setting("neighbour") + shared().others(which) + taken[which]; }
static long long room(int which) { return std::max(0LL, TOTAL - used(which)); }
static bool take(int which, long long bytes) {
  std::lock_guard<Shared> alone(shared());
  if (used(which) + bytes > TOTAL || fails("malloc")) { count("refused"); log("refused %lld of %lld\n", bytes, room(which)); return false; }
  change(which, bytes);
  return true;
}
// A card's memory is shared, so that a process's anonymous memory is the host's alone (smaps); page-locked is private.
static const int OF_A_CARD = MAP_SHARED, OF_THE_HOST = MAP_PRIVATE;
static char* map_aligned(size_t bytes, int protection, int whose) {
  char* at = (char*)mmap(nullptr, bytes + PIECE, protection, whose | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  char* start = (char*)(((size_t)at + PIECE - 1) / PIECE * PIECE);
  if (start > at) munmap(at, start - at);
  munmap(start + bytes, at + PIECE - start);
  madvise(start, bytes, MADV_NOHUGEPAGE);
  return start;
}
API cudaError_t cudaMalloc(void** out, size_t bytes) {
  LOCK; used_cards().insert(card); count("mallocs");
  if (!bytes) { *out = nullptr; return cudaSuccess; }
  size_t whole = (rounded(bytes) + 4095) / 4096 * 4096;
  if (!take(card, rounded(bytes))) { *out = nullptr; return fail(cudaErrorMemoryAllocation); }
  char* at = map_aligned(whole, PROT_READ | PROT_WRITE, OF_A_CARD);
  if (!at) { change(card, -(long long)rounded(bytes)); return fail(cudaErrorMemoryAllocation); }
  blocks()[at] = {rounded(bytes), card, true};
  log("malloc %p %zu taken %lld\n", at, bytes, taken[card]); *out = at; return cudaSuccess; }
API cudaError_t cudaFree(void* address) {
  LOCK; count("frees");
  if (!address) return cudaSuccess;
  auto it = blocks().find((char*)address);
  if (it == blocks().end() || !it->second.ours) return fail(cudaErrorInvalidValue);
  drain_card(it->second.card);  // it waits, as the real one does
  change(it->second.card, -(long long)it->second.bytes); munmap(address, (it->second.bytes + 4095) / 4096 * 4096);
  log("free %p %zu taken %lld\n", address, it->second.bytes, taken[it->second.card]); if (RACES) forget(address, it->second.bytes); blocks().erase(it); return cudaSuccess; }
API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { LOCK; used_cards().insert(card); *free = room(card); *total = TOTAL; return cudaSuccess; }

static cudaError_t lock_pages(void* address, size_t bytes, bool registered) {
  char *begin = (char*)address, *end = begin + bytes;
  size_t page = PAGES ? 4096 : 1;
  auto down = [&](char* at) { return (size_t)at / page * page; };
  auto up = [&](char* at) { return ((size_t)at + page - 1) / page * page; };
  for (auto& [at, it] : ranges())
    if (down(begin) < up(at + it.bytes) && down(at) < up(end)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  if (locked + (long long)bytes > PINNABLE || fails("register")) return fail(cudaErrorMemoryAllocation);
  locked += bytes; counts()["locked_now"] = locked; counts()["locked_most"] = std::max(counts()["locked_most"], locked);
  ranges()[begin] = {bytes, registered};
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  LOCK; used_cards().insert(card); count("host_registers");
  auto rc = bytes && address ? lock_pages(address, bytes, true) : fail(cudaErrorInvalidValue);
  log("host_register %p %zu flags %u = %d\n", address, bytes, flags, rc); return rc; }
API cudaError_t cudaHostUnregister(void* address) {
  LOCK; count("host_unregisters");
  auto it = ranges().find((char*)address);
  log("host_unregister %p %zu\n", address, it == ranges().end() ? 0 : it->second.bytes);
  if (it == ranges().end() || !it->second.registered) return fail(cudaErrorHostMemoryNotRegistered);
  pending(address, it->second.bytes, "cudaHostUnregister"); if (RACES) forget(address, it->second.bytes);
  counts()["locked_now"] = locked -= it->second.bytes; ranges().erase(it); return cudaSuccess; }
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) {
  LOCK; used_cards().insert(card); count("host_allocs");
  char* at = map_aligned((bytes + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE, OF_THE_HOST);
  if (!at) return fail(cudaErrorMemoryAllocation);
  auto rc = lock_pages(at, bytes, false);
  if (rc) munmap(at, (bytes + 4095) / 4096 * 4096); else *out = at;
  log("host_alloc %p %zu flags %u = %d\n", at, bytes, flags, rc); return rc; }
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void* address) {
  LOCK; count("host_frees");
  if (!address) return cudaSuccess;
  auto it = ranges().find((char*)address);
  if (it == ranges().end() || it->second.registered) return fail(cudaErrorInvalidValue);
  pending(address, it->second.bytes, "cudaFreeHost"); if (RACES) forget(address, it->second.bytes);
  counts()["locked_now"] = locked -= it->second.bytes; munmap(address, (it->second.bytes + 4095) / 4096 * 4096);
  log("host_free %p %zu\n", address, it->second.bytes); ranges().erase(it); return cudaSuccess; }
API cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) { *out = host; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
  LOCK; *out = {};
  auto block = holding(blocks(), address);
  auto range = holding(ranges(), address);
  if (block != blocks().end()) { out->type = cudaMemoryTypeDevice; out->device = block->second.card; out->devicePointer = (void*)address; }
  else if (range != ranges().end()) { out->type = cudaMemoryTypeHost; out->devicePointer = out->hostPointer = (void*)address; out->device = card; }
  else { out->type = cudaMemoryTypeUnregistered; out->device = -2; out->hostPointer = (void*)address; }
  return cudaSuccess; }

static cudaError_t copy(void* target, const void* source, size_t bytes, cudaStream_t handle, bool wait, const char* call) {
  LOCK; used_cards().insert(card);
  if (fails("copy")) return fail(cudaErrorUnknown);
  auto* stream = of(handle);
  auto where = [](const void* at) { return holding(blocks(), at) != blocks().end() ? 'D' : holding(ranges(), at) != ranges().end() ? 'P' : 'H'; };
  char from = where(source), to = where(target), way[8] = {from, '2', to, 0};
  log("%s %s %zu stream %d %p <- %p\n", call, way, bytes, stream->number, target, source);
  counts()[std::string("bytes_") + way] += bytes; counts()[std::string("copies_") + way]++;
  bool real = (long long)bytes <= COPY_MAX;
  stream->time += 5e-6 + bytes / (from == 'D' && to == 'D' ? 4e11 : from == 'H' || to == 'H' ? LINK / 2 : LINK);
  legacy(stream);
  std::map<int, unsigned long long> before;  // what is surely done when all that the stream was given is
  if (RACES) { learn(before, stream); learn(stream->knows, host_knows); if (from != 'H') touch(stream, source, bytes, false, kept(way)); if (to != 'H') touch(stream, target, bytes, true, kept(way)); }
  if (from == 'H' && to == 'D' && !wait && LATE) {  // when the call returns the last part may still be in a buffer of the driver's
    drain(stream, stream->given);
    if (RACES) learn(host_knows, before);
    size_t last = std::min(bytes, STAGING), rest = bytes - last;
    void* staged = real ? malloc(last) : nullptr;
    if (staged) {
      memmove(target, source, rest);
      give(stream, {0, STAGED, (char*)target + rest, memcpy(staged, (char*)source + rest, last), last, 0, 0, 0, 0});
    } else give(stream, {0, COPY, target, target, bytes, 0, 0, 0, 0});
  } else if (from == 'H' || to == 'H' || wait) {  // memory that is not page-locked: the call waits
    drain(stream, stream->given);
    if (real) memmove(target, source, bytes);
    step(stream); stream->done = stream->given;
    if (RACES) learn(host_knows, stream);
  } else if (real) give(stream, {0, COPY, target, source, bytes, 0, 0, 0, 0});
  else if (LATE) give(stream, {0, COPY, target, target, bytes, 0, 0, 0, 0});  // nothing moves, and yet it has its time
  else step(stream);
  return cudaSuccess; }
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) { return copy(to, from, bytes, stream, false, "memcpy_async"); }
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes, 0, true, "memcpy"); }
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) { return copy(to, from, bytes, stream, false, "memcpy_peer"); }
API cudaError_t cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) copy((char*)to + row * tp, (char*)from + row * fp, width, stream, false, "memcpy_2d");
  return cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t handle) {
  LOCK; auto* stream = of(handle); log("memset %zu stream %d\n", bytes, stream->number);
  legacy(stream);
  if ((long long)bytes <= COPY_MAX) give(stream, {0, SET, at, 0, bytes, value, 0, 0, 0}); else step(stream);
  return cudaSuccess; }
API cudaError_t cudaMemset(void* at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, 0); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int) { *out = (cudaMemPool_t)0x900; return cudaSuccess; }

// ---- cards -------------------------------------------------------------------------------------------------------------
static const bool OLD_DRIVER = number("STUB_OLD_DRIVER", 0);  // older than the wheel needs
API cudaError_t cudaGetDeviceCount(int* out) { if (OLD_DRIVER) { *out = 0; return fail(cudaErrorInsufficientDriver); } *out = CARDS; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* out) { *out = card; return cudaSuccess; }
API cudaError_t cudaSetDevice(int which) { if (which < 0 || which >= CARDS) return fail(cudaErrorInvalidDevice); card = which; LOCK; used_cards().insert(card); return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { LOCK; drain_card(card); count("device_syncs"); log("device_sync %d\n", card); return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* out) { *out = OLD_DRIVER ? 12020 : CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* out) { *out = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { *out = number("STUB_PEERS", 0); return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int which) { snprintf(out, size, "0000:%02x:00.0", which + 1); return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int which) {
  if (which < 0 || which >= CARDS) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", getenv("STUB_NAME") ? getenv("STUB_NAME") : "NVIDIA GeForce RTX 4090 (stub)");
  memset(p->uuid.bytes, which + 1, 16);
  p->totalGlobalMem = TOTAL; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->totalConstMem = 65536;
  p->major = MAJOR; p->minor = MINOR; p->textureAlignment = 512; p->texturePitchAlignment = 32; p->multiProcessorCount = SMS;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = p->managedMemory = 1;
  p->pciBusID = which + 1; p->asyncEngineCount = 2; p->memoryBusWidth = 384; p->l2CacheSize = 72 << 20;
  p->maxThreadsPerMultiProcessor = 1536; p->sharedMemPerMultiprocessor = 102400; p->regsPerMultiprocessor = 65536;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->sharedMemPerBlockOptin = 101376; p->maxBlocksPerMultiProcessor = 24; p->reservedSharedMemPerBlock = 1024;
  if (MAJOR == 9 || (MAJOR == 8 && MINOR == 0)) { p->sharedMemPerBlockOptin = 232448 - (MAJOR == 8 ? 65536 : 0); p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024; }
  return cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr what, int which) {
  static cudaDeviceProp p; cudaGetDeviceProperties(&p, which);
  switch ((int)what) {
    case 1: *out = 1024; break; case 2: case 3: *out = 1024; break; case 4: *out = 64; break; case 5: *out = 2147483647; break;
    case 6: case 7: *out = 65535; break; case 8: *out = p.sharedMemPerBlock; break; case 9: *out = 65536; break; case 10: *out = 32; break;
    case 12: *out = 65536; break; case 13: *out = 2520000; break; case 14: *out = 512; break; case 16: *out = SMS; break;
    case 19: case 31: case 41: case 78: case 95: case 96: case 99: case 115: *out = 1; break; case 33: *out = which + 1; break;
    case 36: *out = 10501000; break; case 37: *out = 384; break; case 38: *out = p.l2CacheSize; break; case 39: *out = p.maxThreadsPerMultiProcessor; break;
    case 40: *out = 2; break; case 75: *out = MAJOR; break; case 76: *out = MINOR; break; case 81: *out = p.sharedMemPerMultiprocessor; break;
    case 82: *out = 65536; break; case 83: *out = 1; break; case 91: *out = 1; break; case 97: *out = p.sharedMemPerBlockOptin; break;
    case 106: *out = 24; break; case 111: *out = 1024; break; case 120: *out = MAJOR >= 9; break;
    default: *out = 0; log("attribute %d unknown\n", (int)what);
  }
  return cudaSuccess; }

// ---- kernels -----------------------------------------------------------------------------------------------------------
static std::unordered_map<const void*, const char*>& names() { static auto* it = new std::unordered_map<const void*, const char*>; return *it; }
struct Shape { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Shape> shapes;
API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { LOCK; names()[host] = name; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) { shapes.push_back({grid, block, shared, stream}); return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto it = shapes.back(); shapes.pop_back(); *grid = it.grid; *block = it.block; *shared = it.shared; *(void**)stream = it.stream; return cudaSuccess; }
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) { *out = (cudaKernel_t)host; return cudaSuccess; }
API cudaError_t cudaGetKernel(cudaKernel_t* out, const void* host) { *out = (cudaKernel_t)host; return cudaSuccess; }
static const int OLDEST = 75;  // the least capability that wheels for CUDA 13 have kernels for
static cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t handle) {
  LOCK; auto* stream = of(handle); used_cards().insert(card);
  auto found = names().find(kernel);
  const char* name = found == names().end() ? "?" : found->second;
  log("launch stream %d grid %u,%u,%u block %u,%u,%u shared %zu %.200s\n", stream->number, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, name);
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || grid.y > 65535 || grid.z > 65535 || (size_t)block.x * block.y * block.z > 1024)
    { log("bad launch\n"); return fail(cudaErrorInvalidConfiguration); }
  if (MAJOR * 10 + MINOR < OLDEST) return fail(cudaErrorNoKernelImageForDevice);
  if (stream->card != card) { log("launch on another card's stream\n"); return fail(cudaErrorInvalidResourceHandle); }
  legacy(stream); step(stream); count("launches"); return cudaSuccess; }
API cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) { return launch(kernel, grid, block, shared, stream); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) { return launch(kernel, grid, block, shared, stream); }
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) { return launch(kernel, grid, block, shared, stream); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* kernel, void**) { return launch(kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream); }
API void stub_launch(void* handle, const char* name) { LOCK; auto* s = of((cudaStream_t)handle); log("launch stream %d %s\n", s->number, name); legacy(s); step(s); count("launches"); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  if (MAJOR * 10 + MINOR < OLDEST) return fail(cudaErrorNoKernelImageForDevice);
  memset(out, 0, sizeof *out); out->maxThreadsPerBlock = 1024; out->numRegs = 64; out->maxDynamicSharedSizeBytes = 49152;
  for (int built : {75, 80, 86, 90, 100, 120})  // what the wheel has kernels for: cub looks its policies up by this
    if (built <= MAJOR * 10 + MINOR) out->binaryVersion = out->ptxVersion = built;
  return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) { *out = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) { *out = 2; return cudaSuccess; }
static char symbols[1 << 16];
API cudaError_t cudaGetSymbolAddress(void** out, const void*) { *out = symbols; return cudaSuccess; }
API cudaError_t cudaLibraryLoadData(cudaLibrary_t* out, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) { *out = (cudaLibrary_t)symbols; return cudaSuccess; }
API cudaError_t cudaLibraryGetKernel(cudaKernel_t* out, cudaLibrary_t, const char*) { *out = (cudaKernel_t)symbols; return cudaSuccess; }

// ---- the driver ----------------------------------------------------------------------------------------------------------
typedef int R; typedef unsigned long long P;
API R cuInit(unsigned) { return 0; }
API R cuDriverGetVersion(int* out) { *out = CUDART_VERSION; return 0; }
API R cuDeviceGet(int* out, int which) { if (which >= CARDS) return 101; *out = which; return 0; }
API R cuDeviceGetCount(int* out) { *out = CARDS; return 0; }
API R cuDeviceGetName(char* out, int size, int which) { cudaDeviceProp p; cudaGetDeviceProperties(&p, which); snprintf(out, size, "%s", p.name); return 0; }
API R cuDeviceGetUuid(void* out, int which) { memset(out, which + 1, 16); return 0; }
API R cuDeviceTotalMem_v2(size_t* out, int) { *out = TOTAL; return 0; }
API R cuDeviceGetAttribute(int* out, int what, int which) {
  if (what == 102) { *out = number("STUB_VMM", 1); return 0; }  // virtual memory management
  if (what == 110 || what == 103 || what == 128) { *out = 0; return 0; }
  return cudaDeviceGetAttribute(out, (cudaDeviceAttr)what, which); }
API R cuDevicePrimaryCtxGetState(int which, unsigned* flags, int* active) { LOCK; if (flags) *flags = 0; *active = used_cards().count(which); return 0; }
API R cuDevicePrimaryCtxRetain(void** out, int which) { *out = (void*)(0x1000L + which); return 0; }
API R cuCtxGetCurrent(void** out) { *out = (void*)(0x1000L + card); return 0; }
API R cuCtxSetCurrent(void* it) { if ((long)it >= 0x1000) card = (long)it - 0x1000; return 0; }
API R cuCtxGetDevice(int* out) { *out = card; return 0; }
API R cuGetErrorString(R code, const char** out) { *out = cudaGetErrorString((cudaError_t)code); return 0; }
API R cuGetErrorName(R code, const char** out) { *out = cudaGetErrorString((cudaError_t)code); return 0; }
API R cuPointerGetAttribute(void* out, int what, P address) {
  LOCK; auto it = holding(blocks(), (void*)address);
  if (what == 2) { *(unsigned*)out = it == blocks().end() ? 1 : 2; return 0; }        // memory type
  if (what == 9) { *(int*)out = it == blocks().end() ? -2 : it->second.card; return 0; }
  *(P*)out = 0; return 0; }
API R cuMemGetAddressRange_v2(P* base, size_t* size, P at) {
  LOCK; auto it = holding(blocks(), (void*)at); if (it == blocks().end()) return 1;
  if (base) *base = (P)it->first; if (size) *size = it->second.bytes; return 0; }
API R cuLaunchKernel(void*, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream, void**, void**) {
  return launch(nullptr, dim3{gx, gy, gz}, dim3{bx, by, bz}, shared, (cudaStream_t)stream); }
// virtual memory: what expandable segments are made of
struct Piece { long long bytes; int card; int uses; };
static std::map<char*, Piece*>& mapped() { static auto* it = new std::map<char*, Piece*>; return *it; }
API R cuMemGetAllocationGranularity(size_t* out, const void*, int) { *out = PIECE; return 0; }
API R cuMemAddressReserve(P* out, size_t bytes, size_t, P, unsigned long long) {
  LOCK; char* at = map_aligned(bytes, PROT_NONE, OF_A_CARD); if (!at) return 2;
  blocks()[at] = {bytes, card, false}; log("reserve %p %zu\n", at, bytes); *out = (P)at; return 0; }
API R cuMemAddressFree(P at, size_t bytes) { LOCK; blocks().erase((char*)at); munmap((void*)at, bytes); return 0; }
API R cuMemCreate(P* out, size_t bytes, const int* prop, unsigned long long) {  // CUmemAllocationProp: type, handles, location {type, id}
  LOCK; int which = prop[2] == 1 ? prop[3] : card; count("mem_creates");
  if (!take(which, bytes)) return 2;
  *out = (P) new Piece{(long long)bytes, which, 1}; log("mem_create %zu taken %lld\n", bytes, taken[which]); return 0; }
static void drop(Piece* it) { if (--it->uses == 0) { change(it->card, -it->bytes); log("mem_gone %lld taken %lld\n", it->bytes, taken[it->card]); delete it; } }
API R cuMemRelease(P handle) { LOCK; drop((Piece*)handle); return 0; }
API R cuMemMap(P at, size_t, size_t, P handle, unsigned long long) { LOCK; auto* it = (Piece*)handle; it->uses++; mapped()[(char*)at] = it; return 0; }
API R cuMemSetAccess(P at, size_t bytes, const void*, size_t) { LOCK; if (fails("map")) return 999; return mprotect((void*)at, bytes, PROT_READ | PROT_WRITE) ? 1 : 0; }
API R cuMemUnmap(P at, size_t bytes) {
  LOCK; pending((void*)at, bytes, "cuMemUnmap"); if (RACES) forget((void*)at, bytes);
  madvise((void*)at, bytes, MADV_REMOVE); mprotect((void*)at, bytes, PROT_NONE);
  for (auto it = mapped().lower_bound((char*)at); it != mapped().end() && it->first < (char*)at + bytes; it = mapped().erase(it)) drop(it->second);
  return 0; }
static void* driver(const char* name) {
  for (const char* tail : {"_v2", ""}) if (void* it = dlsym(RTLD_DEFAULT, (std::string(name) + tail).c_str())) return it;
  log("driver has no %s\n", name); return nullptr; }
API R cuGetProcAddress_v2(const char* name, void** out, int, unsigned long long, int* status) { *out = driver(name); if (status) *status = *out ? 0 : 1; return *out ? 0 : 500; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *out = driver(name); if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound; return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags, cudaDriverEntryPointQueryResult* status) { return cudaGetDriverEntryPointByVersion(name, out, 0, flags, status); }

// ---- NVML ------------------------------------------------------------------------------------------------------------------
API R nvmlInit() { return 0; }
API R nvmlInit_v2() { return 0; }
API R nvmlShutdown() { return 0; }
API const char* nvmlErrorString(R) { return "stub"; }
API R nvmlDeviceGetCount_v2(unsigned* out) { *out = CARDS; return 0; }
API R nvmlDeviceGetHandleByIndex_v2(unsigned which, void** out) { *out = (void*)(1L + which); return 0; }
API R nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) { *out = (void*)1L; return 0; }
API R nvmlDeviceGetHandleByUUID(const char*, void** out) { *out = (void*)1L; return 0; }
API R nvmlDeviceGetUUID(void* it, char* out, unsigned size) { unsigned n = (long)it; snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", n, n, n, n, n, n, n, n, n, n, n, n, n, n, n, n); return 0; }
API R nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) { *n = 0; return 0; }
API R nvmlSystemGetCudaDriverVersion_v2(int* out) { *out = CUDART_VERSION; return 0; }

// ---- for tests ---------------------------------------------------------------------------------------------------------------
API long long stub_get(const char* name) {
  LOCK;
  if (!strcmp(name, "taken")) return taken[card];
  if (!strcmp(name, "taken_most")) return most[card];
  if (!strcmp(name, "registered")) return std::count_if(ranges().begin(), ranges().end(), [](auto& each) { return each.second.registered; });
  return counts()[name]; }
API void stub_set(const char* name, long long value) { LOCK; log("set %s %lld\n", name, value); setting(name) = value; }
API void stub_reset_most() { LOCK; most[card] = taken[card]; }
// what an operation reads or writes, told by whoever knows: on a stream, or (handle -1) by the host, in page-locked memory
API void stub_touch(void* handle, void* address, size_t bytes, int write, const char* what) {
  LOCK; if (!RACES) return;
  if ((long)handle == -1) { if (holding(ranges(), address) != ranges().end()) touch(nullptr, address, bytes, write, kept(what)); return; }
  auto* stream = of((cudaStream_t)handle); learn(stream->knows, host_knows); touch(stream, address, bytes, write, kept(what)); step(stream); }
API void stub_flush() { LOCK; if (LOG) fflush(LOG); }
API void stub_mark(const char* text) { LOCK; log("MARK %s\n", text); }
