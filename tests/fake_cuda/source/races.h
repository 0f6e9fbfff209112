// The race detector: who wrote and read each byte last, at which time of its clock, and from which lines of Python.
//
// An access that no wait, event or synchronization has ordered behind the last write (or, for a write, behind the last
// reads) is told, whatever the schedule of this run was.

#pragma once

#include "clock.h"

namespace fake_cuda {

// ---------------------------------------------------------------- where am I in Python
static std::vector<std::string>& names() {
  static auto* v = new std::vector<std::string>{""};
  return *v;
}
static int intern(const std::string& s) {
  static auto* m = new std::unordered_map<std::string, int>;
  Lock l(mutex());
  auto it = m->find(s);
  if (it != m->end()) return it->second;
  names().push_back(s);
  return (*m)[s] = names().size() - 1;
}
// A thread that asks for the GIL of an interpreter that ends is ended itself, in the middle of C++: threads of torch (of
// autograd, of torch.jit.fork) still run then. So the interpreter waits for those that ask, and later ones do not ask.
struct Interpreter {
  static std::atomic<int>& asking() {
    static std::atomic<int> a{0};
    return a;
  }
  static std::atomic<unsigned long>& ended_in() {  // a thread, which has the GIL and may go on to ask
    static std::atomic<unsigned long> t{0};
    return t;
  }
  static void end() {
    ended_in() = PyThread_get_thread_ident();
    while (asking()) usleep(20);
    usleep(50000);  // without the GIL: those of torch that are about to ask for it, to free what Python has given them, get it
  }
  Interpreter() {
    asking()++;
    auto t = ended_in().load();
    there = Py_IsInitialized() && (!t || t == PyThread_get_thread_ident());
  }
  ~Interpreter() { asking()--; }
  bool there;
};
static int stack_id() {
  if (without_races() && !speeds().known) return 0;
  Interpreter interpreter;
  if (!interpreter.there) return 0;
  auto g = PyGILState_Ensure();
  std::string out;
  PyFrameObject* f = PyEval_GetFrame();
  Py_XINCREF(f);
  int kept = 0, depth = 0;
  while (f && kept < 7) {
    PyCodeObject* code = PyFrame_GetCode(f);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file && (strstr(file, "lightning_ptm") || strstr(file, "/tests/") || depth == 0)) {
      const char* base = strstr(file, "lightning_ptm/");
      base = base ? base : file;
      out += std::string(kept ? " < " : "") + base + ":" + std::to_string(PyFrame_GetLineNumber(f)) + "(" +
             PyUnicode_AsUTF8(code->co_name) + ")";
      kept++;
    }
    Py_DECREF(code);
    PyFrameObject* b = PyFrame_GetBack(f);
    Py_DECREF(f);
    f = b;
    depth++;
  }
  Py_XDECREF(f);
  PyGILState_Release(g);
  return intern(out);
}

// ---------------------------------------------------------------- waits of the host for the device
struct HostWait {
  unsigned long thread;
  int what;
  int st;
};
static std::vector<HostWait>& host_waits() {
  static auto* v = new std::vector<HostWait>;
  return *v;
}
// Returns its place.
static int host_waits_for(const char* what) {
  int st = stack_id();
  Lock l(mutex());
  host_waits().push_back({PyThread_get_thread_ident(), intern(what), st});
  return st;
}

// ---------------------------------------------------------------- races
struct Access {
  int e = -1;
  uint32_t c = 0;
  int op = 0;
  int st = 0;
};
struct Segment {
  uintptr_t end;
  Access w;
  std::vector<Access> r;
};
static std::map<uintptr_t, Segment>& segments() {
  static auto* m = new std::map<uintptr_t, Segment>;
  return *m;
}
static long race_count = 0, access_count = 0, deferred_count = 0;
static std::string actor_name(int e) {
  return e == 0 ? "host" : "stream " + std::to_string(actors()[e]->device) + ":" + std::to_string(actors()[e]->id);
}
static void report(const char* kind, uintptr_t a, uintptr_t b, const Access& old, bool old_write, const Access& now,
                   bool now_write) {
  static auto* seen = new std::map<std::string, int>;
  auto who = [](const Access& x, bool w) {
    return actor_name(x.e) + (w ? " WRITE " : " READ ") + names()[x.op] + "\n      at " + names()[x.st];
  };
  std::string text =
      std::string(kind) + "\n   earlier: " + who(old, old_write) + "\n   now:     " + who(now, now_write);
  race_count++;
  if ((*seen)[text]++) return;
  static FILE* f = [] {
    const char* p = getenv("FAKE_CUDA_LOG");
    return p ? fopen(p, "a") : stderr;
  }();
  fprintf(f, "RACE %s\n   bytes %zu at %p\n", text.c_str(), (size_t)(b - a), (void*)a);
  fflush(f);
}
static void split(uintptr_t at) {
  auto& m = segments();
  auto it = m.upper_bound(at);
  if (it == m.begin()) return;
  --it;
  if (it->first < at && at < it->second.end) {
    Segment right = it->second;
    it->second.end = at;
    m.emplace(at, std::move(right));
  }
}
static void access(uintptr_t a, uintptr_t b, bool write, const Access& now) {
  if (a >= b || without_races()) return;
  access_count++;
  split(a);
  split(b);
  auto& m = segments();
  auto& C = actors()[now.e]->clock;
  auto ordered = [&](const Access& x) { return x.e < 0 || x.e == now.e || C.get(x.e) >= x.c; };
  uintptr_t p = a;
  auto it = m.lower_bound(a);
  while (p < b) {
    if (it == m.end() || it->first > p) {
      uintptr_t e = it == m.end() ? b : std::min(b, it->first);
      it = m.emplace(p, Segment{e, {}, {}}).first;
    }
    Segment& s = it->second;
    if (!ordered(s.w)) report("data race", p, s.end, s.w, true, now, write);
    if (write)
      for (auto& r : s.r)
        if (!ordered(r)) report("data race", p, s.end, r, false, now, true);
    if (write) {
      s.w = now;
      s.r.clear();
    } else {
      bool found = false;
      for (auto& r : s.r)
        if (r.e == now.e) {
          r = now;
          found = true;
        }
      if (!found) s.r.push_back(now);
    }
    p = s.end;
    ++it;
  }
}
static void forget(uintptr_t a, uintptr_t b) {
  split(a);
  split(b);
  auto& m = segments();
  m.erase(m.lower_bound(a), m.lower_bound(b));
}
// At a release: who still uses [a, b) without being ordered before `clock`?
static void check_release(const char* kind, uintptr_t a, uintptr_t b, const VectorClock& clock, int e,
                          const std::vector<int>& excused) {
  if (without_races()) return;
  auto& m = segments();
  auto it = m.upper_bound(a);
  if (it != m.begin()) --it;
  Access now{e, 0, intern("release"), stack_id()};
  for (; it != m.end() && it->first < b; ++it) {
    if (it->second.end <= a) continue;
    auto bad = [&](const Access& x) {
      return x.e >= 0 && x.e != e && clock.get(x.e) < x.c &&
             std::find(excused.begin(), excused.end(), x.e) == excused.end();
    };
    if (bad(it->second.w)) report(kind, it->first, it->second.end, it->second.w, true, now, true);
    for (auto& r : it->second.r)
      if (bad(r)) report(kind, it->first, it->second.end, r, false, now, true);
  }
}

}  // namespace fake_cuda
