// What torch asks of a device: streams, events, generators, and the hooks by which it finds one.

#pragma once

#include "memory.h"

namespace fake_cuda {

// ---------------------------------------------------------------- events, guard
struct Mark {
  VectorClock clock;
  int e = -1;
  uint64_t pos = 0;
  std::shared_ptr<double> at;
  int polls = 0;
  bool timing = false;
  double simulated_s = 0;
};
static double now_s() {
  static double last = 0;
  double t = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (t <= last) t = last + 1e-7;
  return last = t;
}
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DEVICE; }
  Device exchangeDevice(Device d) const override {
    Device o(DEVICE, t_device);
    if (d.index() >= 0) t_device = d.index();
    return o;
  }
  Device getDevice() const override { return Device(DEVICE, t_device); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) t_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  static int idx(Device d) { return d.index() < 0 ? t_device : d.index(); }
  Stream getStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(DEVICE, idx(d)), current_stream(idx(d)));
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(DEVICE, idx(d)), 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<int64_t> n{1};
    Lock l(mutex());
    Stream s(Stream::UNSAFE, Device(DEVICE, idx(d)), n++);
    actor(idx(d), s.id());
    return s;
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    int d = s.device_index();
    Stream o = getStream(Device(DEVICE, d));
    if (!t_streams) t_streams = new std::map<int, int64_t>;
    (*t_streams)[d] = s.id();
    return o;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Mark*)e; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag flag) const override {
    Lock l(mutex());
    if (!*event) *event = new Mark;
    auto* v = (Mark*)*event;
    int e = actor(s.device_index(), s.id());
    tick(e);
    v->clock = actors()[e]->clock;
    v->e = e;
    v->polls = 0;
    v->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    v->at = std::make_shared<double>(-1);
    auto at = v->at;
    push(e, Entry{[at] { *at = now_s(); }});
    v->pos = actors()[e]->next;
    v->simulated_s = time_of(e);
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    Lock l(mutex());
    auto* v = (Mark*)event;
    if (v->e < 0) return;
    int e = actor(s.device_index(), s.id());
    actors()[e]->clock.join(v->clock);
    push(e, Entry{nullptr, v->e, v->pos});
    time_of(e) = std::max(time_of(e), v->simulated_s);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock l(mutex());
    auto* v = (Mark*)event;
    if (v->e < 0) return true;
    if (actors()[v->e]->first < v->pos && ++v->polls > 3) flush_until(v->e, v->pos);
    if (actors()[v->e]->first < v->pos || !has_come(v->simulated_s)) return false;
    host().join(v->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    int place = host_waits_for("event");
    Lock l(mutex());
    auto* v = (Mark*)event;
    if (v->e < 0) return;
    flush_until(v->e, v->pos);
    host().join(v->clock);
    wait_until(v->simulated_s, place);
  }
  bool queryStream(const Stream& s) const override {
    Lock l(mutex());
    int e = actor(s.device_index(), s.id());
    static int n = 0;
    if (actors()[e]->first < actors()[e]->next && ++n % 4 == 0) flush(e);
    if (actors()[e]->first < actors()[e]->next || !has_come(time_of(e))) return false;
    host().join(actors()[e]->clock);
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    int place = host_waits_for("stream");
    Lock l(mutex());
    int e = actor(s.device_index(), s.id());
    flush(e);
    host().join(actors()[e]->clock);
    wait_until(time_of(e), place);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    int place = host_waits_for("device");
    Lock l(mutex());
    for (size_t e = 1; e < actors().size(); e++)
      if (actors()[e]->device == d) {
        flush(e);
        host().join(actors()[e]->clock);
        wait_until(time_of(e), place);
      }
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { record_use(p, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    Lock l(mutex());
    auto *x = (Mark*)a, *y = (Mark*)b;
    TORCH_CHECK(x && y && x->at && y->at, "CUDA error: event was not recorded");
    TORCH_CHECK(x->timing && y->timing, "CUDA error: invalid resource handle (event made without enable_timing)");
    TORCH_CHECK(*x->at >= 0 && *y->at >= 0,
                "CUDA error: device not ready (elapsed_time of an event that has not completed)");
    return (speeds().known ? y->simulated_s - x->simulated_s : *y->at - *x->at) * 1e3;
  }
};
static Guard& guard() {
  static auto* g = new Guard;
  return *g;
}

// ---------------------------------------------------------------- generators
struct HostGenerator final : c10::GeneratorImpl {
  Generator inner;
  HostGenerator(int d, Generator g)
      : c10::GeneratorImpl(Device(DEVICE, d), DispatchKeySet(KEY)), inner(std::move(g)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t o) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  HostGenerator* clone_impl() const override { return new HostGenerator(device().index(), inner.clone()); }
};
static std::vector<Generator>& default_generators() {
  static auto* v = new std::vector<Generator>(16);
  return *v;
}
static Generator new_generator(int d) {
  return at::make_generator<HostGenerator>(d, at::detail::createCPUGenerator(67280421310721ULL));
}
static Generator& default_generator(int d) {
  if (d < 0) d = t_device;
  auto& g = default_generators()[d];
  if (!g.defined()) g = new_generator(d);
  return g;
}

}  // namespace fake_cuda

namespace at {
#ifdef FAKE_PRIVATE
struct FakeHooks final : PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override {
    fake_cuda::resize_storage(s, bytes, s.device().index());
  }
#else
struct CUDAHooks final : CUDAHooksInterface {  // torch finds it by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return fake_cuda::t_device; }
  Allocator* getCUDADeviceAllocator() const override { return &fake_cuda::device_allocator(); }
  int getNumGPUs() const override { return fake_cuda::device_count(); }
  void deviceSynchronize(DeviceIndex d) const override { fake_cuda::guard().synchronizeDevice(d); }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return fake_cuda::default_generator(d); }
  Generator getNewGenerator(DeviceIndex d) const override {
    if (d < 0) d = fake_cuda::t_device;
    auto& g = fake_cuda::default_generators()[d];
    if (!g.defined()) {
      g = fake_cuda::new_generator(d);
      return g;
    }
    return fake_cuda::new_generator(d);
  }
  Device getDeviceFromPtr(void* p) const override { return Device(fake_cuda::DEVICE, 0); }
  bool isPinnedPtr(const void* p) const override {
    fake_cuda::Lock l(fake_cuda::mutex());
    return fake_cuda::is_locked(p);
  }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return &fake_cuda::host_allocator(); }
  DeviceIndex deviceCount() const override { return fake_cuda::device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { fake_cuda::t_device = d; }
  DeviceIndex getCurrentDevice() const override { return fake_cuda::t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    int o = fake_cuda::t_device;
    if (d >= 0) fake_cuda::t_device = d;
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
};
#ifdef FAKE_PRIVATE
static int g_hooks = (RegisterPrivateUse1HooksInterface(new FakeHooks), 0);
#else
REGISTER_CUDA_HOOKS(CUDAHooks)
#endif
}  // namespace at

namespace fake_cuda {

static c10::impl::DeviceGuardImplRegistrar g_reg(DEVICE, &guard());
static int g_alloc = (c10::SetAllocator(DEVICE, &device_allocator(), 1), 0);

}  // namespace fake_cuda
