// Actors (the host, and each stream) with their vector clocks and queues of what they have not done yet.
//
// Copies that do not block are done as late as the order of streams and events allows (FAKE_CUDA_DEFER=1), in a random
// order that is legal (rand, FAKE_CUDA_SEED), or at once.

#pragma once

#include "torch.h"

namespace fake_cuda {

static int device_count() {
  static int n = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 1;
  return n;
}
static size_t capacity() {
  static size_t n = getenv("FAKE_CUDA_BYTES") ? strtoull(getenv("FAKE_CUDA_BYTES"), 0, 10) : (size_t)4 << 30;
  return n;
}
enum class Deferral { EAGER, LATE, RANDOM };
static Deferral deferral() {
  static Deferral m = [] {
    const char* s = getenv("FAKE_CUDA_DEFER");
    if (!s || !strcmp(s, "0")) return Deferral::EAGER;
    return !strncmp(s, "rand", 4) ? Deferral::RANDOM : Deferral::LATE;
  }();
  return m;
}
static std::mt19937& rng() {
  static std::mt19937 r(getenv("FAKE_CUDA_SEED") ? atoi(getenv("FAKE_CUDA_SEED")) : 0);
  return r;
}
static bool without_races() {
  static bool b = getenv("FAKE_CUDA_NO_RACE") != nullptr;
  return b;
}

static std::recursive_mutex& mutex() {
  static auto* m = new std::recursive_mutex;
  return *m;
}
// Never waits for `mutex` with the GIL held: who holds `mutex` may want the GIL (to see where it is in Python).
struct Lock {
  explicit Lock(std::recursive_mutex& m) : m_(m) {
    if (m_.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      auto* s = PyEval_SaveThread();
      m_.lock();
      m_.unlock();
      PyEval_RestoreThread(s);
      while (!m_.try_lock()) {
        s = PyEval_SaveThread();
        usleep(20);
        PyEval_RestoreThread(s);
      }
    } else
      m_.lock();
  }
  ~Lock() { m_.unlock(); }
  std::recursive_mutex& m_;
};

// ---------------------------------------------------------------- vector clocks
struct VectorClock {
  std::vector<uint32_t> v;
  uint32_t get(size_t i) const { return i < v.size() ? v[i] : 0; }
  void set(size_t i, uint32_t x) {
    if (v.size() <= i) v.resize(i + 1);
    v[i] = x;
  }
  void join(const VectorClock& o) {
    if (v.size() < o.v.size()) v.resize(o.v.size());
    for (size_t i = 0; i < o.v.size(); i++) v[i] = std::max(v[i], o.v[i]);
  }
  bool covers(const VectorClock& o) const {
    for (size_t i = 0; i < o.v.size(); i++)
      if (get(i) < o.v[i]) return false;
    return true;
  }
};
struct Mark;
struct Entry {
  std::function<void()> run;
  int wait_actor = -1;
  uint64_t wait_pos = 0;
};
struct Actor {
  int device;
  int64_t id;
  VectorClock clock;
  std::deque<Entry> q;
  uint64_t first = 0;
  uint64_t next = 0;
};  // first: position of q.front()
static std::vector<Actor*>& actors() {
  static auto* e = new std::vector<Actor*>{new Actor{-1, 0}};
  return *e;
}  // [0] is the host
static std::map<std::pair<int, int64_t>, int>& actor_numbers() {
  static auto* e = new std::map<std::pair<int, int64_t>, int>;
  return *e;
}
static int actor(int device, int64_t id) {
  auto key = std::make_pair(device, id);
  auto it = actor_numbers().find(key);
  if (it != actor_numbers().end()) return it->second;
  actors().push_back(new Actor{device, id});
  return actor_numbers()[key] = actors().size() - 1;
}
static VectorClock& host() { return actors()[0]->clock; }
static uint64_t g_devices_used = 0;  // a bit for each that has a context: memory, work, or page-locking through it
static void uses_device(int device) { g_devices_used |= (uint64_t)1 << device; }
static uint32_t tick(int e) {
  auto& c = actors()[e]->clock;
  if (e) {
    uses_device(actors()[e]->device);
    c.join(host());
  }
  uint32_t n = c.get(e) + 1;
  c.set(e, n);
  return n;
}

// ---------------------------------------------------------------- deferred execution
static void flush_until(int e, uint64_t pos) {
  auto* s = actors()[e];
  while (s->first < pos && !s->q.empty()) {
    Entry en = std::move(s->q.front());
    s->q.pop_front();
    s->first++;
    if (en.wait_actor >= 0) flush_until(en.wait_actor, en.wait_pos);
    if (en.run) en.run();
  }
}
static void flush(int e) { flush_until(e, actors()[e]->next); }
static void push(int e, Entry en) {
  auto* s = actors()[e];
  s->q.push_back(std::move(en));
  s->next++;
  if (deferral() == Deferral::EAGER)
    flush(e);
  else if (deferral() == Deferral::RANDOM) {
    while (rng()() % 3 == 0) {
      int k = 1 + rng()() % (actors().size() - 1);
      auto* t = actors()[k];
      if (t->next > t->first) flush_until(k, t->first + 1 + rng()() % (t->next - t->first));
    }
  }
}

// ---------------------------------------------------------------- thread state
static thread_local int t_device = 0;
static thread_local std::map<int, int64_t>* t_streams = nullptr;
static thread_local int t_inside_kernel = 0;
static int64_t current_stream(int device) {
  if (!t_streams) return 0;
  auto it = t_streams->find(device);
  return it == t_streams->end() ? 0 : it->second;
}
static int current_actor(int device) { return actor(device, current_stream(device)); }

}  // namespace fake_cuda
