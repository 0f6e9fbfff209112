// A device for the CPU build of PyTorch, "cuda" or of another name, on a machine without one: what Python calls of it.
// Loaded before torch.

#include "operators.h"

extern "C" {
void fc_start() {
  at::globalContext().lazyInitDevice(fake_cuda::DEVICE);
#ifdef FAKE_PRIVATE
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&fake_cuda::sdp_choice);
#else
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fake_cuda::sdp_choice);
#endif
  if (!fake_cuda::without_races())
    at::addGlobalCallback(
        at::RecordFunctionCallback(&fake_cuda::on_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
int fc_host_register(uintptr_t p, size_t n) {
  fake_cuda::Lock l(fake_cuda::mutex());
  fake_cuda::uses_device(fake_cuda::t_device);
  auto& m = fake_cuda::locked();
  auto it = m.lower_bound(p);
  if ((it != m.end() && it->first < p + n) || fake_cuda::is_locked((void*)p))
    return fake_cuda::g_last_error = 712;  // already registered
  m[p] = p + n;
  return 0;
}
int fc_host_unregister(uintptr_t p) {
  fake_cuda::Lock l(fake_cuda::mutex());
  auto it = fake_cuda::locked().find(p);
  if (it == fake_cuda::locked().end()) return fake_cuda::g_last_error = 713;
  fake_cuda::check_release("unlocked (cudaHostUnregister) while the device uses it", it->first, it->second,
                           fake_cuda::host(), 0, {});
  fake_cuda::forget(it->first, it->second);
  fake_cuda::locked().erase(it);
  return 0;
}
void fc_host_access(uintptr_t p, size_t n, int write, const char* what) {
  int st = fake_cuda::stack_id();
  fake_cuda::Lock l(fake_cuda::mutex());
  if (!fake_cuda::is_locked((void*)p)) return;
  fake_cuda::access(p, p + n, write, fake_cuda::Access{0, fake_cuda::tick(0), fake_cuda::intern(what), st});
}
void fc_interpreter_ends() { fake_cuda::Interpreter::end(); }
// Without telling the host's clock.
void fc_run_current_stream() {
  fake_cuda::Lock l(fake_cuda::mutex());
  fake_cuda::flush(fake_cuda::current_actor(fake_cuda::t_device));
}
size_t fc_used() { return fake_cuda::g_used; }
size_t fc_peak() { return fake_cuda::g_peak; }
void fc_reset_peak() { fake_cuda::g_peak = fake_cuda::g_used; }
size_t fc_free() { return fake_cuda::capacity() - fake_cuda::kept(); }
void fc_empty_cache() { fake_cuda::device_allocator().emptyCache({0, 0}); }
size_t fc_capacity() { return fake_cuda::capacity(); }
int fc_devices() { return fake_cuda::device_count(); }
long fc_races() { return fake_cuda::race_count; }
long fc_accesses() { return fake_cuda::access_count; }
long fc_deferred() { return fake_cuda::deferred_count; }
unsigned long fc_devices_used() { return fake_cuda::g_devices_used; }
long fc_waits() { return fake_cuda::host_waits().size(); }
unsigned long fc_wait_thread(long i) { return fake_cuda::host_waits()[i].thread; }
const char* fc_wait_what(long i) { return fake_cuda::names()[fake_cuda::host_waits()[i].what].c_str(); }
const char* fc_wait_where(long i) { return fake_cuda::names()[fake_cuda::host_waits()[i].st].c_str(); }
int fc_device() { return fake_cuda::t_device; }
void fc_set_device(int d) { fake_cuda::t_device = d; }
double fc_clock_host() { return fake_cuda::host_time(); }
// Of the threads without a time of their own.
double fc_clock_others() { return fake_cuda::g_host_s; }
// From now on, or not any more, this thread has a time of its own.
void fc_clock_own(int own) {
  delete fake_cuda::t_own_s;
  fake_cuda::t_own_s = own ? new double(fake_cuda::g_host_s) : nullptr;
}
void fc_clock_come_to(double s) { fake_cuda::host_time() = std::max(fake_cuda::host_time(), s); }
int fc_clock_has_come(double s) { return fake_cuda::has_come(s); }
double fc_clock_device(int d) {
  fake_cuda::Lock l(fake_cuda::mutex());
  double latest = 0;
  for (size_t e = 1; e < fake_cuda::actors().size(); e++)
    if (fake_cuda::actors()[e]->device == d) latest = std::max(latest, fake_cuda::time_of(e));
  return latest;
}
// "seconds count place" in lines; forgets them.
const char* fc_clock_waits() {
  static auto* text = new std::string;
  fake_cuda::Lock l(fake_cuda::mutex());
  text->clear();
  for (auto& [place, wait] : fake_cuda::waited())
    *text += std::to_string(wait.seconds) + " " + std::to_string(wait.count) + " " + fake_cuda::names()[place] + "\n";
  fake_cuda::waited().clear();
  return text->c_str();
}
size_t fc_locked() {
  size_t n = 0;
  fake_cuda::Lock l(fake_cuda::mutex());
  for (auto& x : fake_cuda::locked()) n += x.second - x.first;
  return n;
}
}
