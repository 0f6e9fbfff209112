// Simulated seconds (FAKE_CUDA_CLOCK): what a step would take on a device and a link of given speeds.
//
// Each stream, each direction of the link and the host has a time. A kernel begins when its stream and the host have come to
// it, and takes its products over `flops` and its bytes over `memory`; a copy takes its bytes over `link` and shares its
// direction with others, which it may overtake where there is a gap. Launching, and looking whether an event has come, takes
// the host `launch` seconds, and nothing else does. A wait of the host takes it to where the stream or the event is; each is
// told with its place.
// Bytes move at once, whatever the clock says: use it with FAKE_CUDA_DEFER=0.

#pragma once

#include "actors.h"

namespace fake_cuda {

struct Speeds {
  bool known = false;
  double flops = 1e13, memory = 1e12, link = 1e10, launch = 5e-6;
};
static const Speeds& speeds() {
  static Speeds* s = [] {
    auto* s = new Speeds;
    const char* text = getenv("FAKE_CUDA_CLOCK");
    if (!text) return s;
    s->known = true;
    for (const char* at = text; *at;) {
      const char* equals = strchr(at, '=');
      TORCH_CHECK(equals, "FAKE_CUDA_CLOCK is ", text, "; give it as flops=1e13,memory=1e12,link=1e10,launch=5e-6");
      std::string name(at, equals);
      char* end;
      double value = strtod(equals + 1, &end);
      bool flops = name == "flops", memory = name == "memory", link = name == "link", launch = name == "launch";
      TORCH_CHECK(flops || memory || link || launch, "FAKE_CUDA_CLOCK has no ", name);
      (flops ? s->flops : memory ? s->memory : link ? s->link : s->launch) = value;
      at = *end == ',' ? end + 1 : end;
    }
    return s;
  }();
  return *s;
}

static std::vector<double>& stream_times() {
  static auto* t = new std::vector<double>;
  return *t;
}
static double& time_of(int e) {
  auto& t = stream_times();
  if (t.size() <= (size_t)e) t.resize(e + 1, 0.0);
  return t[e];
}
// Of the host: of all threads together (autograd's goes on where the main one waits), but for those with a time of their own.
static double g_host_s = 0;
static thread_local double* t_own_s = nullptr;
static double& host_time() { return t_own_s ? *t_own_s : g_host_s; }

// When a direction of the link is taken: [start, end) in order.
struct Busy {
  std::vector<std::pair<double, double>> taken;
  double take(double ready, double seconds) {
    auto it = taken.begin();
    for (; it != taken.end(); ++it) {
      if (ready + seconds <= it->first) break;
      ready = std::max(ready, it->second);
    }
    taken.insert(it, {ready, ready + seconds});
    if (taken.size() > 4096) taken.erase(taken.begin(), taken.begin() + 2048);
    return ready + seconds;
  }
};
static std::map<std::pair<int, bool>, Busy>& links() {
  static auto* l = new std::map<std::pair<int, bool>, Busy>;
  return *l;
}

static void launch(int e, double seconds) {
  if (!speeds().known) return;
  host_time() += speeds().launch;
  double& s = time_of(e);
  s = std::max(s, host_time()) + seconds;
}
static void launch_copy(int e, bool to_device, size_t bytes) {
  if (!speeds().known) return;
  host_time() += speeds().launch;
  double& s = time_of(e);
  s = links()[{actors()[e]->device, to_device}].take(std::max(s, host_time()), bytes / speeds().link);
}

struct Waited {
  long count = 0;
  double seconds = 0;
};
static std::map<int, Waited>& waited() {
  static auto* w = new std::map<int, Waited>;
  return *w;
}
// The host is kept until `s`.
static void wait_until(double s, int place) {
  if (!speeds().known || s <= host_time()) return;
  auto& wait = waited()[place];
  wait.count++;
  wait.seconds += s - host_time();
  host_time() = s;
}
// A look takes as long as launching does: a host that looks until something is there comes to it.
static bool has_come(double s) {
  if (!speeds().known) return true;
  host_time() += speeds().launch;
  return s <= host_time();
}

}  // namespace fake_cuda
