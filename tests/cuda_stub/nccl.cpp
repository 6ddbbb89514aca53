// NCCL between processes, over Unix sockets: what ProcessGroupNCCL calls. See README.md.
// A collective is given to its stream and done when somebody waits for it, in this process or in another. Who waits for a
// rank asks it (DEMAND) to do what it was given so far. What is sent counts as sent when it was received (TAKEN).
#include <cuda_runtime_api.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
API void stub_lock();
API void stub_unlock();
API void stub_wait();
API void stub_changed();
API void stub_hazard(const char* text);
API void stub_count(const char* name, long long by);
API int stub_fails(const char* call);
API void stub_touch(void* handle, void* address, size_t bytes, int write, const char* what);
API unsigned long long stub_exchange(void* handle, void** stream, double seconds, void (*call)(void*), void* data);
API void stub_drain(void* stream, unsigned long long upto);

namespace {
typedef unsigned long long Number;
enum Result { OK = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL = 3, BAD_ARGUMENT = 4, BAD_USAGE = 5, REMOTE = 6 };
enum What { GATHER, ALL_REDUCE, BROADCAST, REDUCE, SCATTER, ALL_TO_ALL, SEND, RECEIVE };
const char* NAMES[] = {"ncclAllGather", "ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclReduceScatter", "ncclAlltoAll", "ncclSend", "ncclRecv"};
const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 fp8 fp8
enum Operation { SUM, PRODUCT, MAX, MIN, AVERAGE, FIRST_SCALED };
const bool NOTICED = !getenv("STUB_NCCL_NOTICED") || atoi(getenv("STUB_NCCL_NOTICED"));
const double LINK = getenv("STUB_LINK") ? atof(getenv("STUB_LINK")) : 25e9;
const int SECONDS_TO_MEET = 60;  // of the ranks of a communicator

struct Locked { Locked() { stub_lock(); } ~Locked() { stub_unlock(); } };
thread_local std::string last_error;
Result fail(Result code, const char* format, ...) {
  char text[400];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  last_error = text;
  if (getenv("STUB_VERBOSE")) fprintf(stderr, "stub: NCCL: %s\n", text);
  return code;
}

// ---- what ranks send each other --------------------------------------------------------------------------------------
enum Kind { DATA, TAKEN, DEMAND, DEMAND_TAKING, TEXT, BYE };
enum Channel { COLLECTIVE, POINT_TO_POINT };
struct Head { int kind, channel; Number number; int what, type, operation, root; Number count, bytes; };
struct Message { Head head; std::vector<char> body; };
struct Op;
struct Peer {
  int socket = -1;
  bool lost = false, left = false;  // left: it said so before
  std::deque<Message> out;
  std::map<std::pair<int, Number>, Message> data;  // by channel and number; what nobody has taken yet
  std::map<Number, Message> texts;
  std::set<std::pair<int, Number>> taken;  // of what was sent there
  Number sends[2] = {0, 0}, receives[2] = {0, 0};
  std::map<std::pair<int, Number>, Op*> sending, receiving;  // not done yet
  std::set<std::tuple<int, int, Number>> demanded;
};
struct Comm {
  std::string id; int rank, size, card;
  std::vector<Peer> peers;
  Result error = OK;
  bool aborted = false, closed = false;
  Number splits = 0;
  std::set<Op*> open;  // given and not done
};
struct Call { Comm* comm; What what; const void* in; void* out; Number count; int type, operation, root; void* stream; };
struct Part { int peer, channel; Number number; const char* from; char* to; Number bytes; Call* of; };
struct Op { Comm* comm; std::vector<Call> calls; std::vector<Part> sent, received; void* stream; Number at; bool done; };
std::vector<double>& scales() { static auto* it = new std::vector<double>; return *it; }

void post(Comm* comm, int to, Head head, const void* body = nullptr) {
  Message message{head, {}};
  if (head.bytes) message.body.assign((const char*)body, (const char*)body + head.bytes);
  comm->peers[to].out.push_back(std::move(message));
  stub_changed();
}
bool whole(int socket, void* at, size_t bytes, bool write) {
  for (auto* it = (char*)at; bytes;) {
    ssize_t n = write ? send(socket, it, bytes, MSG_NOSIGNAL) : recv(socket, it, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    it += n; bytes -= n;
  }
  return true;
}
void write_out(Comm* comm, int peer) {
  auto& its = comm->peers[peer];
  for (;;) {
    Message message;
    {
      Locked lock;
      while (its.out.empty() && !comm->closed && !its.lost) stub_wait();
      if (its.out.empty() || its.lost) break;
      message = std::move(its.out.front());
      its.out.pop_front();
    }
    if (!whole(its.socket, &message.head, sizeof(Head), true) || !whole(its.socket, message.body.data(), message.body.size(), true)) break;
  }
  shutdown(its.socket, SHUT_RDWR);
}
template <class F> void start(F run) {  // a thread that no signal is given to
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(run).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}
void do_demanded(Comm* comm, int peer, bool taking, int channel, Number number) {
  Locked lock;
  auto& its = comm->peers[peer];
  auto &ops = taking ? its.receiving : its.sending;
  auto &given = taking ? its.receives[channel] : its.sends[channel];
  while (given <= number && !comm->closed && !its.lost) stub_wait();
  auto found = ops.find({channel, number});
  if (found == ops.end()) return;  // done
  stub_drain(found->second->stream, found->second->at);
}
void read_in(Comm* comm, int peer) {
  auto& its = comm->peers[peer];
  for (;;) {
    Message message;
    if (!whole(its.socket, &message.head, sizeof(Head), false)) break;
    message.body.resize(message.head.bytes);
    if (!whole(its.socket, message.body.data(), message.body.size(), false)) break;
    Locked lock;
    auto& head = message.head;
    auto key = std::make_pair(head.channel, head.number);
    if (head.kind == DATA) its.data[key] = std::move(message);
    if (head.kind == TAKEN) its.taken.insert(key);
    if (head.kind == TEXT) its.texts[head.number] = std::move(message);
    if (head.kind == BYE) its.left = true;
    if ((head.kind == DEMAND || head.kind == DEMAND_TAKING) && its.demanded.insert({head.kind, head.channel, head.number}).second) {
      bool taking = head.kind == DEMAND_TAKING;
      int channel = head.channel; Number number = head.number;
      start([=] { do_demanded(comm, peer, taking, channel, number); });
    }
    stub_changed();
  }
  Locked lock;
  its.lost = true;
  if (!its.left && !comm->closed && !comm->error && NOTICED) comm->error = REMOTE;
  stub_changed();
}

// ---- numbers -----------------------------------------------------------------------------------------------------------
float of_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, rest = bits & 1023;
  float size = exponent == 31 ? (rest ? NAN : INFINITY) : exponent ? ldexpf(1024 + rest, exponent - 25) : ldexpf(rest, -24);
  return bits & 0x8000 ? -size : size;
}
uint16_t to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = fabsf(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  int exponent; frexpf(size, &exponent);
  exponent = std::max(exponent, -13);
  return sign | ((exponent + 13) * 1024 + (int)nearbyintf(ldexpf(size, 11 - exponent)));
}
float of_bfloat(uint16_t bits) { uint32_t all = (uint32_t)bits << 16; float it; memcpy(&it, &all, 4); return it; }
uint16_t to_bfloat(float value) {
  if (std::isnan(value)) return 0x7fc0;
  uint32_t all; memcpy(&all, &value, 4);
  return (all + 0x7fff + (all >> 16 & 1)) >> 16;
}
template <class T, class S> S load(T it) { return it; }
template <class T> T combined(T one, T other, int operation) {
  switch (operation) {
    case PRODUCT: return one * other;
    case MAX: return std::max(one, other);
    case MIN: return std::min(one, other);
    default: return one + other;
  }
}
// ranks in their order, in `S`, and once rounded to `T` where that is something else
template <class T, class S, class Load, class Store>
void reduced(const std::vector<const char*>& parts, char* out, Number count, int operation, Load load, Store store) {
  double scale = operation >= FIRST_SCALED ? scales()[operation - FIRST_SCALED] : 1;
  auto* to = (T*)out;
  for (Number n = 0; n < count; n++) {
    auto at = [&](size_t rank) { S it = load(((const T*)parts[rank])[n]); return operation >= FIRST_SCALED ? S(it * scale) : it; };
    S sum = at(0);
    for (size_t rank = 1; rank < parts.size(); rank++) sum = combined<S>(sum, at(rank), operation);
    to[n] = store(operation == AVERAGE ? S(sum / S(parts.size())) : sum);
  }
}
template <class T> void plain(const std::vector<const char*>& parts, char* out, Number count, int operation) {
  reduced<T, T>(parts, out, count, operation, [](T it) { return it; }, [](T it) { return it; });
}
void reduce(const std::vector<const char*>& parts, char* out, Number count, int type, int operation) {
  switch (type) {
    case 0: return plain<int8_t>(parts, out, count, operation);
    case 1: return plain<uint8_t>(parts, out, count, operation);
    case 2: return plain<int32_t>(parts, out, count, operation);
    case 3: return plain<uint32_t>(parts, out, count, operation);
    case 4: return plain<int64_t>(parts, out, count, operation);
    case 5: return plain<uint64_t>(parts, out, count, operation);
    case 6: return reduced<uint16_t, float>(parts, out, count, operation, of_half, to_half);
    case 7: return plain<float>(parts, out, count, operation);
    case 8: return plain<double>(parts, out, count, operation);
    case 9: return reduced<uint16_t, float>(parts, out, count, operation, of_bfloat, to_bfloat);
  }
}

// ---- collectives -------------------------------------------------------------------------------------------------------
Number bytes_of(const Call& it) { return it.count * SIZES[it.type]; }
Number pieces_in(const Call& it) { return it.what == SCATTER || it.what == ALL_TO_ALL ? it.comm->size : 1; }
Number pieces_out(const Call& it) { return it.what == GATHER || it.what == ALL_TO_ALL ? it.comm->size : 1; }
bool reads(const Call& it) { return it.what == RECEIVE ? false : it.what == BROADCAST ? it.comm->rank == it.root : true; }
bool writes(const Call& it) { return it.what == SEND ? false : it.what == REDUCE ? it.comm->rank == it.root : true; }
bool reduces(const Call& it) { return it.what == ALL_REDUCE || it.what == REDUCE || it.what == SCATTER; }

// What the ranks send each other for a call: messages are numbered when they are given, so that others can ask for them.
void plan(Op* op, Call& it) {
  auto* comm = it.comm;
  Number bytes = bytes_of(it);
  auto add = [&](bool sends, int peer, int channel, const void* from, void* to) {
    auto& its = comm->peers[peer];
    Number number = sends ? its.sends[channel]++ : its.receives[channel]++;
    (sends ? op->sent : op->received).push_back({peer, channel, number, (const char*)from, (char*)to, bytes, &it});
    (sends ? its.sending : its.receiving)[{channel, number}] = op;
  };
  if (it.what == SEND) return add(true, it.root, POINT_TO_POINT, it.in, nullptr);
  if (it.what == RECEIVE) return add(false, it.root, POINT_TO_POINT, nullptr, it.out);
  for (int peer = 0; peer < comm->size; peer++) {
    if (peer == comm->rank) continue;
    bool to_root = it.what == REDUCE, from_root = it.what == BROADCAST;
    auto* from = (const char*)it.in + (pieces_in(it) > 1 ? peer * bytes : 0);
    auto* to = reduces(it) ? nullptr : (char*)it.out + (pieces_out(it) > 1 ? peer * bytes : 0);
    if ((!to_root || peer == it.root) && (!from_root || comm->rank == it.root)) add(true, peer, COLLECTIVE, from, nullptr);
    if ((!to_root || comm->rank == it.root) && (!from_root || peer == it.root)) add(false, peer, COLLECTIVE, nullptr, to);
  }
}
template <class F> bool wait_for(Comm* comm, int peer, Head demand, F there) {
  for (bool asked = false; !there(); asked = true) {
    if (comm->aborted || comm->closed) return false;
    if (comm->peers[peer].lost) { if (!comm->error && NOTICED) comm->error = REMOTE; }
    else if (!asked) post(comm, peer, demand);
    stub_wait();
  }
  return true;
}
void finish(Op* op) {
  for (auto& part : op->sent) op->comm->peers[part.peer].sending.erase({part.channel, part.number});
  for (auto& part : op->received) op->comm->peers[part.peer].receiving.erase({part.channel, part.number});
  op->done = true;
  op->comm->open.erase(op);
  stub_changed();
}
bool matches(Comm* comm, const Part& part, const Head& head) {
  auto& it = *part.of;
  int sent_by = it.what == RECEIVE ? SEND : it.what;
  bool same = head.what == sent_by && head.bytes == part.bytes && head.type == it.type;
  if (same && it.what != RECEIVE) same = head.operation == it.operation && head.root == it.root;
  if (same) return true;
  char text[300];
  snprintf(text, sizeof text, "NCCL: rank %d's %s of %llu (type %d, operation %d, root %d) meets rank %d's %s of %llu (type %d, operation %d, root %d)",
           comm->rank, NAMES[it.what], it.count, it.type, it.operation, it.root, part.peer, NAMES[head.what], head.count, head.type, head.operation, head.root);
  stub_hazard(text);
  if (!comm->error) comm->error = BAD_USAGE;
  return false;
}
// When a stream gets there; with the lock, which is given up while others are waited for.
void exchange(Op* op) {
  auto* comm = op->comm;
  if (comm->aborted || comm->closed) return finish(op);
  for (auto& part : op->sent) {
    auto& it = *part.of;
    post(comm, part.peer, {DATA, part.channel, part.number, it.what, it.type, it.operation, it.root, it.count, part.bytes}, part.from);
  }
  std::vector<std::vector<char>> came;
  for (auto& part : op->received) {
    auto& data = comm->peers[part.peer].data;
    auto key = std::make_pair(part.channel, part.number);
    if (!wait_for(comm, part.peer, {DEMAND, part.channel, part.number}, [&] { return data.count(key) > 0; })) return finish(op);
    Message message = std::move(data[key]);
    data.erase(key);
    if (!matches(comm, part, message.head)) {  // as with the real one, nobody gets any further
      wait_for(comm, part.peer, {DEMAND, part.channel, part.number}, [] { return false; });
      return finish(op);
    }
    if (part.to) memcpy(part.to, message.body.data(), part.bytes);
    came.push_back(std::move(message.body));
    post(comm, part.peer, {TAKEN, part.channel, part.number});
  }
  size_t next = 0;
  for (auto& it : op->calls) {
    Number bytes = bytes_of(it), own = comm->rank * bytes;
    if (reduces(it) && writes(it)) {
      std::vector<const char*> parts;
      for (int rank = 0; rank < comm->size; rank++)
        parts.push_back(rank != comm->rank ? came[next + rank - (rank > comm->rank)].data() : (const char*)it.in + (it.what == SCATTER ? own : 0));
      reduce(parts, (char*)it.out, it.count, it.type, it.operation);
    } else if (it.what == GATHER) memmove((char*)it.out + own, it.in, bytes);
    else if (it.what == ALL_TO_ALL) memmove((char*)it.out + own, (const char*)it.in + own, bytes);
    else if (it.what == BROADCAST && comm->rank == it.root) memmove(it.out, it.in, bytes);
    for (auto& part : op->received) next += part.of == &it;
  }
  for (auto& part : op->sent) {
    auto& taken = comm->peers[part.peer].taken;
    auto key = std::make_pair(part.channel, part.number);
    if (!wait_for(comm, part.peer, {DEMAND_TAKING, part.channel, part.number}, [&] { return taken.count(key) > 0; })) break;
    taken.erase(key);
  }
  finish(op);
}

// ---- groups of calls -----------------------------------------------------------------------------------------------------
thread_local int depth = 0;
thread_local std::vector<Call> together;
Result check(const Call& it) {
  if (!it.comm || it.comm->closed) return fail(BAD_ARGUMENT, "%s: the communicator is gone", NAMES[it.what]);
  if (it.comm->error) return fail(it.comm->error, "%s: the communicator has failed", NAMES[it.what]);
  if (stub_fails("nccl")) return fail(SYSTEM_ERROR, "%s: a fault of the stub", NAMES[it.what]);
  if (it.type < 0 || it.type > 11) return fail(BAD_ARGUMENT, "%s: no data type %d", NAMES[it.what], it.type);
  if (reduces(it) && it.type > 9) return fail(BAD_ARGUMENT, "%s: the stub adds no numbers of type %d", NAMES[it.what], it.type);
  if (reduces(it) && (it.operation < 0 || it.operation >= FIRST_SCALED + (int)scales().size())) return fail(BAD_ARGUMENT, "%s: no operation %d", NAMES[it.what], it.operation);
  if (it.root < 0 || it.root >= it.comm->size) return fail(BAD_ARGUMENT, "%s: no rank %d of %d", NAMES[it.what], it.root, it.comm->size);
  if (it.root == it.comm->rank && (it.what == SEND || it.what == RECEIVE)) return fail(BAD_USAGE, "%s: the stub's ranks send nothing to themselves", NAMES[it.what]);
  return OK;
}
void give(const std::vector<Call>& calls) {  // of one communicator, on one stream
  auto* op = new Op{calls[0].comm, calls};
  int before; cudaGetDevice(&before);
  cudaSetDevice(op->comm->card);  // whichever is current, as the real one
  Number bytes = 0;
  for (auto& it : op->calls) {
    auto touch = [&](const void* at, Number size, bool write) { stub_touch(it.stream, (void*)at, size, write, NAMES[it.what]); };
    if (reads(it)) touch(it.in, bytes_of(it) * pieces_in(it), false);
    if (writes(it)) touch(it.out, bytes_of(it) * pieces_out(it), true);
    plan(op, it);
    stub_count("nccl_calls", 1);
  }
  for (auto& part : op->sent) bytes += part.bytes;
  stub_count("nccl_bytes", bytes);
  op->comm->open.insert(op);
  op->at = stub_exchange(calls[0].stream, &op->stream, 5e-6 + bytes / LINK, [](void* it) { exchange((Op*)it); }, op);
  cudaSetDevice(before);
  stub_changed();
}
Result give_together() {
  Locked lock;
  auto calls = std::move(together);
  together.clear();
  for (auto& it : calls) if (auto wrong = check(it)) return wrong;
  while (!calls.empty()) {
    std::vector<Call> same, rest;
    for (auto& it : calls) (it.comm == calls[0].comm && it.stream == calls[0].stream ? same : rest).push_back(it);
    give(same);
    calls = rest;
  }
  return OK;
}
int add(Call it) {
  together.push_back(it);
  return depth ? OK : give_together();
}

// ---- communicators ---------------------------------------------------------------------------------------------------
struct Id { char text[128]; };
socklen_t name_of(sockaddr_un& out, const std::string& id, int rank) {  // without a file
  memset(&out, 0, sizeof out);
  out.sun_family = AF_UNIX;
  int n = snprintf(out.sun_path + 1, sizeof out.sun_path - 1, "stub-nccl-%s-%d", id.c_str(), rank);
  return offsetof(sockaddr_un, sun_path) + 1 + n;
}
Result meet(Comm* comm) {  // a connection to each other rank: the higher one connects
  sockaddr_un name;
  int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = name_of(name, comm->id, comm->rank);
  if (door < 0 || bind(door, (sockaddr*)&name, length) || listen(door, comm->size)) { close(door); return fail(SYSTEM_ERROR, "rank %d cannot listen: %s", comm->rank, strerror(errno)); }
  auto until = std::chrono::steady_clock::now() + std::chrono::seconds(SECONDS_TO_MEET);
  auto late = [&] { return std::chrono::steady_clock::now() > until; };
  int own[2] = {comm->rank, comm->card}, its[2];
  auto greet = [&](int connection, int expected) {
    if (!whole(connection, own, sizeof own, true) || !whole(connection, its, sizeof its, false) || (expected >= 0 && its[0] != expected)) return fail(REMOTE, "rank %d: another rank ended while the communicator was made", comm->rank);
    comm->peers[its[0]].socket = connection;
    if (its[1] == comm->card) return fail(BAD_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", comm->rank, its[0], its[1]);
    return OK;
  };
  Result result = OK;
  for (int peer = 0; peer < comm->rank && !result; peer++) {
    socklen_t length = name_of(name, comm->id, peer);
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(connection, (sockaddr*)&name, length) && !late()) usleep(2000);
    result = late() ? fail(SYSTEM_ERROR, "rank %d: rank %d did not come within %d s", comm->rank, peer, SECONDS_TO_MEET) : greet(connection, peer);
  }
  for (int peer = comm->rank + 1; peer < comm->size && !result; peer++) {
    pollfd waiting{door, POLLIN};
    while (poll(&waiting, 1, 100) < 1 && !late()) {}
    result = late() ? fail(SYSTEM_ERROR, "rank %d: a rank above did not come within %d s", comm->rank, SECONDS_TO_MEET) : greet(accept4(door, nullptr, nullptr, SOCK_CLOEXEC), -1);
  }
  close(door);
  return result;
}
Result make(Comm** out, int size, const std::string& id, int rank) {
  *out = nullptr;
  auto* comm = new Comm{id, rank, size};
  cudaGetDevice(&comm->card);
  comm->peers.resize(size);
  if (auto wrong = meet(comm)) {
    for (auto& each : comm->peers) if (each.socket >= 0) close(each.socket);
    return wrong;
  }
  for (int peer = 0; peer < size; peer++)
    if (peer != rank) {
      start([=] { read_in(comm, peer); });
      start([=] { write_out(comm, peer); });
    }
  stub_count("nccl_communicators", 1);
  *out = comm;
  return OK;
}
void shut(Comm* comm, bool said) {
  Locked lock;
  if (comm->closed) return;
  for (int peer = 0; said && peer < comm->size; peer++) if (peer != comm->rank) post(comm, peer, {BYE});
  comm->closed = true;
  comm->aborted = true;
  stub_changed();
}
Result flush(Comm* comm) {  // everything it was given is done
  Locked lock;
  while (!comm->open.empty() && !comm->error && !comm->aborted) {
    auto* op = *comm->open.begin();
    std::thread([=] { Locked lock; if (comm->open.count(op)) stub_drain(op->stream, op->at); }).detach();
    while (comm->open.count(op) && !comm->error && !comm->aborted) stub_wait();
  }
  return comm->error;
}
}  // namespace

API int ncclGetVersion(int* out) { *out = 22907; return OK; }
API int ncclGetUniqueId(Id* out) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) return fail(SYSTEM_ERROR, "no random numbers");
  memset(out, 0, sizeof *out);
  for (int n = 0; n < 16; n++) snprintf(out->text + 2 * n, 3, "%02x", random[n]);
  return OK; }
API int ncclCommInitRankConfig(Comm** out, int size, Id id, int rank, void*) {
  if (rank < 0 || rank >= size) return fail(BAD_ARGUMENT, "no rank %d of %d", rank, size);
  return make(out, size, std::string(id.text, strnlen(id.text, 40)), rank); }
API int ncclCommInitRank(Comm** out, int size, Id id, int rank) { return ncclCommInitRankConfig(out, size, id, rank, nullptr); }
API int ncclCommInitRankScalable(Comm** out, int size, int rank, int, Id* ids, void*) { return ncclCommInitRankConfig(out, size, ids[0], rank, nullptr); }
API int ncclCommSplit(Comm* comm, int color, int key, Comm** out, void*) {
  struct Said { int color, key, rank; } own{color, key, comm->rank};
  std::vector<Said> all{own};
  Number number;
  {
    Locked lock;
    number = comm->splits++;
    for (int peer = 0; peer < comm->size; peer++) if (peer != comm->rank) { Head head{TEXT, 0, number}; head.bytes = sizeof own; post(comm, peer, head, &own); }
    for (int peer = 0; peer < comm->size; peer++) {
      if (peer == comm->rank) continue;
      auto& its = comm->peers[peer];
      while (!its.texts.count(number) && !its.lost && !comm->aborted) stub_wait();
      if (!its.texts.count(number)) return fail(REMOTE, "ncclCommSplit: rank %d is gone", peer);
      Said said; memcpy(&said, its.texts[number].body.data(), sizeof said);
      its.texts.erase(number);
      all.push_back(said);
    }
  }
  *out = nullptr;
  if (color < 0) return OK;
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& each) { return each.color != color; }), all.end());
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return std::tie(a.key, a.rank) < std::tie(b.key, b.rank); });
  int rank = 0;
  while (all[rank].rank != comm->rank) ++rank;
  return make(out, all.size(), comm->id + "-" + std::to_string(number) + "-" + std::to_string(color), rank); }
API int ncclCommFinalize(Comm* comm) { return comm ? flush(comm) : fail(BAD_ARGUMENT, "ncclCommFinalize: no communicator"); }
API int ncclCommDestroy(Comm* comm) { if (!comm) return OK; flush(comm); shut(comm, true); return OK; }
API int ncclCommAbort(Comm* comm) { if (!comm) return OK; { Locked lock; comm->aborted = true; stub_changed(); } shut(comm, false); return OK; }
API int ncclCommRevoke(Comm* comm, int) { return ncclCommAbort(comm); }
API int ncclCommGetAsyncError(Comm* comm, int* out) { if (!comm) return fail(BAD_ARGUMENT, "ncclCommGetAsyncError: no communicator"); Locked lock; *out = comm->error; return OK; }
API int ncclCommCount(Comm* comm, int* out) { *out = comm->size; return OK; }
API int ncclCommUserRank(Comm* comm, int* out) { *out = comm->rank; return OK; }
API int ncclCommCuDevice(Comm* comm, int* out) { *out = comm->card; return OK; }
API int ncclGroupStart() { ++depth; return OK; }
API int ncclGroupEnd() {
  if (!depth) return fail(BAD_USAGE, "ncclGroupEnd: not in a group call.");
  return --depth ? OK : give_together(); }
API int ncclAllGather(const void* in, void* out, Number count, int type, Comm* comm, void* stream) { return add({comm, GATHER, in, out, count, type, 0, 0, stream}); }
API int ncclAllReduce(const void* in, void* out, Number count, int type, int operation, Comm* comm, void* stream) { return add({comm, ALL_REDUCE, in, out, count, type, operation, 0, stream}); }
API int ncclBroadcast(const void* in, void* out, Number count, int type, int root, Comm* comm, void* stream) { return add({comm, BROADCAST, in, out, count, type, 0, root, stream}); }
API int ncclBcast(void* at, Number count, int type, int root, Comm* comm, void* stream) { return ncclBroadcast(at, at, count, type, root, comm, stream); }
API int ncclReduce(const void* in, void* out, Number count, int type, int operation, int root, Comm* comm, void* stream) { return add({comm, REDUCE, in, out, count, type, operation, root, stream}); }
API int ncclReduceScatter(const void* in, void* out, Number count, int type, int operation, Comm* comm, void* stream) { return add({comm, SCATTER, in, out, count, type, operation, 0, stream}); }
API int ncclAlltoAll(const void* in, void* out, Number count, int type, Comm* comm, void* stream) { return add({comm, ALL_TO_ALL, in, out, count, type, 0, 0, stream}); }
API int ncclSend(const void* in, Number count, int type, int peer, Comm* comm, void* stream) { return add({comm, SEND, in, nullptr, count, type, 0, peer, stream}); }
API int ncclRecv(void* out, Number count, int type, int peer, Comm* comm, void* stream) { return add({comm, RECEIVE, nullptr, out, count, type, 0, peer, stream}); }
API int ncclRedOpCreatePreMulSum(int* out, const void* scale, int type, int, Comm*) {  // the scale lies in host memory
  Locked lock;
  double value;
  if (type == 6) value = of_half(*(uint16_t*)scale);
  else if (type == 7) value = *(float*)scale;
  else if (type == 8) value = *(double*)scale;
  else if (type == 9) value = of_bfloat(*(uint16_t*)scale);
  else return fail(BAD_ARGUMENT, "ncclRedOpCreatePreMulSum: type %d", type);
  *out = FIRST_SCALED + scales().size();
  scales().push_back(value);
  return OK; }
API int ncclRedOpDestroy(int, Comm*) { return OK; }
API int ncclMemAlloc(void** out, size_t bytes) { return cudaMalloc(out, bytes) ? CUDA_ERROR : OK; }
API int ncclMemFree(void* address) { return cudaFree(address) ? CUDA_ERROR : OK; }
API const char* ncclGetErrorString(int code) {
  switch (code) {
    case OK: return "no error";
    case CUDA_ERROR: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SYSTEM_ERROR: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case BAD_ARGUMENT: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case BAD_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case REMOTE: return "remote process exited or there was a network error";
    default: return "internal error - please report this issue to the NCCL developers";
  } }
API const char* ncclGetLastError(Comm*) { return last_error.c_str(); }
// what would be wrong to do nothing about
API int ncclCommInitAll(Comm**, int, const int*) { return fail(BAD_USAGE, "the stub has no ncclCommInitAll"); }
API int ncclCommShrink(Comm*, int*, int, Comm**, void*, int) { return fail(BAD_USAGE, "the stub has no ncclCommShrink"); }
API int ncclCommWindowRegister(Comm*, void*, size_t, void**, int) { return fail(BAD_USAGE, "the stub has no ncclCommWindowRegister"); }
API int ncclDevCommCreate(Comm*, const void*, void*) { return fail(BAD_USAGE, "the stub has no ncclDevCommCreate"); }
API int ncclPutSignal() { return fail(BAD_USAGE, "the stub has no ncclPutSignal"); }
API int ncclSignal() { return fail(BAD_USAGE, "the stub has no ncclSignal"); }
API int ncclWaitSignal() { return fail(BAD_USAGE, "the stub has no ncclWaitSignal"); }
