// Device memory that the host cannot touch, and page-locked memory.
//
// A block has two mappings: the address that tensors show is closed (a dereference ends in SIGSEGV); kernels use the
// other. Freed blocks go back to the pool of the stream that allocated them, as those of the caching allocator; new
// ones are poisoned.

#pragma once

#include "races.h"

namespace fake_cuda {

// ---------------------------------------------------------------- device memory: the host's view faults
static const size_t ARENA = (size_t)64 << 30;
static char *g_closed = nullptr, *g_open = nullptr;
static void arena() {
  if (g_closed) return;
  int fd = memfd_create("fakecuda", 0);
  TORCH_CHECK(ftruncate(fd, ARENA) == 0);
  g_open = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  g_closed = (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(g_open != MAP_FAILED && g_closed != MAP_FAILED);
}
static void* host_view(const void* dev) { return dev ? g_open + ((char*)dev - g_closed) : nullptr; }
static bool is_on_device(const void* p) { return g_closed && (char*)p >= g_closed && (char*)p < g_closed + ARENA; }
struct Block {
  char* ptr;
  size_t size;
  int device;
  int64_t stream;
  std::vector<int> used_on;
};
static std::unordered_map<void*, Block>& device_blocks() {
  static auto* m = new std::unordered_map<void*, Block>;
  return *m;
}
static std::map<std::tuple<int, int64_t, size_t>, std::vector<char*>>& pool() {
  static auto* m = new std::map<std::tuple<int, int64_t, size_t>, std::vector<char*>>;
  return *m;
}
static std::vector<std::pair<Block, VectorClock>>& device_blocks_in_use() {
  static auto* m = new std::vector<std::pair<Block, VectorClock>>;
  return *m;
}
static size_t g_bump = 4096, g_used = 0, g_peak = 0;
static void device_free(void* p);
static void* device_malloc(size_t n, int device) {
  if (!n) return nullptr;
  Lock l(mutex());
  uses_device(device);
  arena();
  size_t size = (n + 511) / 512 * 512;
  if (g_used + size > capacity())
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (fake). Tried to allocate ", size);
  for (size_t i = 0; i < device_blocks_in_use().size();) {
    if (host().covers(device_blocks_in_use()[i].second)) {
      auto& b = device_blocks_in_use()[i].first;
      pool()[{b.device, b.stream, b.size}].push_back(b.ptr);
      device_blocks_in_use().erase(device_blocks_in_use().begin() + i);
    } else
      i++;
  }
  int64_t stream = current_stream(device);
  auto& free = pool()[{device, stream, size}];
  char* p;
  if (!free.empty()) {
    p = free.back();
    free.pop_back();
  } else {
    TORCH_CHECK(g_bump + size < ARENA, "fake arena is used up");
    p = g_closed + g_bump;
    g_bump += size;
  }
  memset(host_view(p), 0xFB, size);
  device_blocks()[p] = Block{p, size, device, stream, {}};
  g_used += size;
  g_peak = std::max(g_peak, g_used);
  return p;
}
static void device_free(void* p) {
  if (!p) return;
  Lock l(mutex());
  auto it = device_blocks().find(p);
  if (it == device_blocks().end()) return;
  Block b = it->second;
  device_blocks().erase(it);
  g_used -= b.size;
  int e = actor(b.device, b.stream);
  VectorClock c = actors()[e]->clock;
  c.join(host());
  for (int u : b.used_on) c.join(actors()[u]->clock);  // the block's next owner waits for them, and for what they are behind
  check_release("freed while another stream uses it (no record_stream, no wait)", (uintptr_t)p, (uintptr_t)p + b.size,
                c, e, b.used_on);
  if (b.used_on.empty()) {
    flush(e);  // what its own stream has queued runs before the next owner's kernels
    memset(host_view(p), 0xFD, b.size);
    pool()[{b.device, b.stream, b.size}].push_back(b.ptr);
  } else {
    VectorClock v;
    for (int u : b.used_on) v.join(actors()[u]->clock);
    device_blocks_in_use().push_back({b, v});
  }
}
// What a caching allocator would keep: the most that was used since it was emptied.
static size_t g_kept = 0;
static size_t kept() { return g_kept = std::max(g_kept, g_used); }
static void record_use(const DataPtr& p, const c10::Stream& s) {
  Lock l(mutex());
  auto it = device_blocks().find(p.get_context() ? p.get_context() : p.get());
  if (it == device_blocks().end()) return;
  int e = actor(s.device_index(), s.id());
  if (e != actor(it->second.device, it->second.stream)) it->second.used_on.push_back(e);
}
struct DeviceAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t n) override {
    void* p = device_malloc(n, t_device);
    return {p, p, &device_free, Device(DEVICE, t_device)};
  }
  DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(host_view(d), host_view(s), n); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override { g_kept = g_used; }
  void recordStream(const DataPtr& p, c10::Stream s) override { record_use(p, s); }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = g_used;
      (*bytes)[0].peak = g_peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { g_peak = g_used; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {capacity() - kept(), capacity()}; }
};
static DeviceAllocator& device_allocator() {
  static auto* a = new DeviceAllocator;
  return *a;
}
static void resize_storage(const c10::Storage& s, size_t bytes, int device) {
  Lock l(mutex());
  void* p = device_malloc(bytes, device);
  flush(current_actor(device));
  if (size_t n = std::min(bytes, s.nbytes())) memcpy(host_view(p), host_view(s.data()), n);
  s.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(p, p, &device_free, Device(DEVICE, device)));
  s.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---------------------------------------------------------------- page-locked memory
static std::map<uintptr_t, uintptr_t>& locked() {
  static auto* m = new std::map<uintptr_t, uintptr_t>;
  return *m;
}
static int g_last_error = 0;  // of a call that failed; the next launch of a kernel tells of it, and so forgets it
static bool is_locked(const void* p) {
  auto& m = locked();
  auto it = m.upper_bound((uintptr_t)p);
  if (it == m.begin()) return false;
  --it;
  return (uintptr_t)p < it->second;
}
struct HostBlock {
  size_t size;
  std::map<int, VectorClock> used;
};
static std::unordered_map<void*, HostBlock>& host_blocks() {
  static auto* m = new std::unordered_map<void*, HostBlock>;
  return *m;
}
static std::vector<std::pair<void*, HostBlock>>& host_blocks_in_use() {
  static auto* m = new std::vector<std::pair<void*, HostBlock>>;
  return *m;
}
static void host_free(void* p) {
  if (!p) return;
  Lock l(mutex());
  auto it = host_blocks().find(p);
  if (it == host_blocks().end()) return;
  std::vector<int> ex;
  for (auto& u : it->second.used) ex.push_back(u.first);
  check_release("pinned block of the caching host allocator freed while in use", (uintptr_t)p,
                (uintptr_t)p + it->second.size, host(), 0, ex);
  host_blocks_in_use().push_back({p, it->second});
  host_blocks().erase(it);
}
struct HostAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &host_free, Device(kCPU)};
    Lock l(mutex());
    size_t size = (n + 4095) / 4096 * 4096;
    for (size_t i = 0; i < host_blocks_in_use().size(); i++) {
      auto& [p, b] = host_blocks_in_use()[i];
      bool done = b.size == size;
      for (auto& u : b.used) done = done && host().covers(u.second);
      if (done) {
        void* q = p;
        host_blocks_in_use().erase(host_blocks_in_use().begin() + i);
        host_blocks()[q] = {size, {}};
        return {q, q, &host_free, Device(kCPU)};
      }
    }
    void* p = aligned_alloc(4096, size);
    memset(p, 0xFC, size);
    host_blocks()[p] = {size, {}};
    locked()[(uintptr_t)p] = (uintptr_t)p + size;
    return {p, p, &host_free, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &host_free; }
  void copy_data(void* d, const void* s, std::size_t n) const override { default_copy_data(d, s, n); }
};
static HostAllocator& host_allocator() {
  static auto* a = new HostAllocator;
  return *a;
}

}  // namespace fake_cuda
