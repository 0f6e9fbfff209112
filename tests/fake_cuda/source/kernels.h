// Every operator without an implementation of its own: what it reads and writes is told to the race detector, then the
// CPU's kernel runs on the open mapping of the same bytes.

#pragma once

#include "device.h"

namespace fake_cuda {

// ---------------------------------------------------------------- which bytes an op touches
struct OpInfo {
  bool skip = false, sync = false, allow_mixed = false;
  std::vector<bool> write;
  int name = 0;
};
static const OpInfo& op_info(const c10::FunctionSchema& s) {
  static auto* cache = new std::unordered_map<std::string, OpInfo>;
  Lock l(mutex());
  std::string key = s.name() + "." + s.overload_name();
  auto it = cache->find(key);
  if (it != cache->end()) return it->second;
  OpInfo o;
  o.name = intern(key);
  for (auto& a : s.arguments()) o.write.push_back(a.alias_info() && a.alias_info()->isWrite());
  for (auto& r : s.returns()) {
    if (r.alias_info() && !r.alias_info()->isWrite()) o.skip = true;
    if (r.type()->kind() != c10::TypeKind::TensorType && r.type()->kind() != c10::TypeKind::ListType &&
        r.type()->kind() != c10::TypeKind::OptionalType)
      o.sync = true;
  }
  for (const char* n : {"aten::set_",
                        "aten::resize_",
                        "aten::is_pinned",
                        "aten::empty_like",
                        "aten::zeros_like",
                        "aten::ones_like",
                        "aten::full_like",
                        "aten::rand_like",
                        "aten::randn_like",
                        "aten::new_empty",
                        "aten::new_zeros",
                        "aten::new_full",
                        "aten::new_ones",
                        "aten::new_empty_strided",
                        "aten::record_stream",
                        "aten::result_type",
                        "aten::is_same_size",
                        "aten::_version",
                        "aten::set_data",
                        "aten::requires_grad_",
                        "aten::resize_as_",
                        "aten::is_floating_point",
                        "aten::is_complex",
                        "aten::is_nonzero_",
                        "aten::_has_compatible_shallow_copy_type",
                        "aten::sym_size",
                        "aten::_resize_output_",
                        "aten::can_cast",
                        "aten::retain_grad",
                        "aten::is_leaf",
                        "aten::output_nr",
                        "aten::is_inference",
                        "aten::is_contiguous",
                        "aten::_nested_tensor_size"})
    if (s.name() == n) o.skip = true;
  for (const char* n : {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                        "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"})
    if (s.name() == n) o.sync = true;
  for (const char* n :
       {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_", "aten::_foreach_copy_"})
    if (s.name() == n) o.allow_mixed = true;
  return cache->emplace(key, o).first->second;
}
template <class F>
static void each_range(const Tensor& t, F f) {
  if (!t.defined() || t.numel() == 0 || !t.has_storage()) return;
  uintptr_t p = (uintptr_t)t.storage().data() + t.storage_offset() * t.itemsize();
  size_t is = t.itemsize();
  std::vector<std::pair<int64_t, int64_t>> d;  // stride, size
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.size(i) > 1 && t.stride(i) != 0) d.push_back({t.stride(i), t.size(i)});
  std::sort(d.begin(), d.end());
  int64_t run = 1;
  size_t k = 0;
  while (k < d.size() && d[k].first <= run) {
    run = std::max(run, run + (d[k].second - 1) * d[k].first);
    k++;
  }
  int64_t count = 1, span = run;
  for (size_t j = k; j < d.size(); j++) {
    count *= d[j].second;
    span += (d[j].second - 1) * d[j].first;
  }
  if (count > 4096) {
    f(p, p + span * is);
    return;
  }
  std::vector<int64_t> ix(d.size(), 0);
  for (int64_t n = 0; n < count; n++) {
    int64_t off = 0;
    for (size_t j = k; j < d.size(); j++) off += ix[j] * d[j].first;
    f(p + off * is, p + (off + run) * is);
    for (size_t j = k; j < d.size(); j++) {
      if (++ix[j] < d[j].second) break;
      ix[j] = 0;
    }
  }
}
static void log_tensor(const Tensor& t, bool write, const Access& a) {
  each_range(t, [&](uintptr_t x, uintptr_t y) { access(x, y, write, a); });
}

// ---------------------------------------------------------------- tensors as the device's kernels see them
struct Aliases {
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu;
  std::unordered_map<c10::StorageImpl*, c10::Storage> back;
  std::unordered_map<c10::TensorImpl*, Tensor> orig;
  std::vector<Tensor> keep;
  c10::Storage storage(const c10::Storage& s) {
    auto it = cpu.find(s.unsafeGetStorageImpl());
    if (it != cpu.end()) return it->second;
    c10::Storage a(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), s.nbytes(),
                                                         c10::DataPtr(host_view(s.data()), Device(kCPU)),
                                                         c10::GetCPUAllocator(), true));
    cpu[s.unsafeGetStorageImpl()] = a;
    back[a.unsafeGetStorageImpl()] = s;
    return a;
  }
  Tensor tensor(const Tensor& t) {
    if (!t.defined() || !is_ours(t)) return t;
    Tensor r =
        at::detail::make_tensor<c10::TensorImpl>(storage(t.storage()), DispatchKeySet(DispatchKey::CPU), t.dtype());
    auto* i = r.unsafeGetTensorImpl();
    i->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) i->set_wrapped_number(true);
    if (t.is_conj()) r._set_conj(true);
    if (t.is_neg()) r._set_neg(true);
    orig[i] = t;
    keep.push_back(r);
    return r;
  }
  Tensor result(const Tensor& r, int device, const Access& acc) {
    if (!r.defined()) return r;
    auto it = orig.find(r.unsafeGetTensorImpl());
    if (it != orig.end()) return it->second;
    auto b = back.find(r.storage().unsafeGetStorageImpl());
    c10::Storage st;
    if (b != back.end())
      st = b->second;
    else {
      void* p = device_malloc(r.storage().nbytes(), device);
      if (p) memcpy(host_view(p), r.storage().data(), r.storage().nbytes());
      st = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), r.storage().nbytes(),
                                                              c10::DataPtr(p, p, &device_free, Device(DEVICE, device)),
                                                              &device_allocator(), true));
      back[r.storage().unsafeGetStorageImpl()] = st;
      keep.push_back(r);
    }
    Tensor o = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(st), DispatchKeySet(KEY), r.dtype());
    o.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides(), r.storage_offset());
    if (r.is_conj()) o._set_conj(true);
    if (r.is_neg()) o._set_neg(true);
    if (b == back.end()) log_tensor(o, true, acc);
    return o;
  }
  void settle(int device, const Access& acc) {  // outputs that were resized
    for (auto& [impl, t] : orig) {
      auto* ti = t.unsafeGetTensorImpl();
      const auto& s = impl->storage();
      auto b = back.find(s.unsafeGetStorageImpl());
      if (b != back.end() && s.data() != host_view(b->second.data()) && s.nbytes()) {
        void* p = device_malloc(s.nbytes(), device);
        memcpy(host_view(p), s.data(), s.nbytes());
        b->second.set_data_ptr(c10::DataPtr(p, p, &device_free, Device(DEVICE, device)));
        b->second.set_nbytes(s.nbytes());
      }
      if (impl->sizes() != t.sizes() || impl->strides() != t.strides())
        ti->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    }
  }
};
struct Inside {
  Inside() { t_inside_kernel++; }
  ~Inside() { t_inside_kernel--; }
};

// Products of 16-bit numbers in fp32, rounded once: a GPU adds up in fp32, too, and many CPUs take a hundred times as
// long for 16-bit ones.
static bool is_product(const std::string& name) {
  for (const char* product : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv"})
    if (name == product) return true;
  return false;
}
static void multiply_wide(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t n = schema.arguments().size(), base = stack->size() - n;
  auto tensor_at = [&](size_t i) {
    auto& v = (*stack)[base + i];
    return v.isTensor() ? v.toTensor() : Tensor();
  };
  std::optional<ScalarType> narrow;
  for (size_t i = 0; i < n; i++) {
    Tensor t = tensor_at(i);
    if (t.defined() && (t.scalar_type() == kBFloat16 || t.scalar_type() == kHalf)) narrow = t.scalar_type();
  }
  if (!narrow) return op.callBoxed(stack);
  Tensor out;  // structured operators come here with what they write to
  for (size_t i = 0; i < n; i++) {
    Tensor t = tensor_at(i);
    if (!t.defined()) continue;
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) {
      out = t;
      (*stack)[base + i] = at::empty({0}, t.options().dtype(kFloat));
    } else {
      (*stack)[base + i] = t.to(kFloat);
    }
  }
  op.callBoxed(stack);
  Tensor wide = stack->back().toTensor();
  stack->back() = out.defined() ? out.copy_(wide) : wide.to(*narrow);
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const OpInfo& info = op_info(schema);
  int error = 0;
  if (!info.skip) std::swap(error, g_last_error);
  TORCH_CHECK(!error, "CUDA error: ", error, " (of an earlier call)");
  int st = info.skip ? 0 : stack_id();
  Lock l(mutex());
  size_t n = schema.arguments().size(), base = stack->size() - n;
  int device = -1;
  bool host_arg = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (is_ours(t)) {
      if (device >= 0 && device != t.device().index())
        TORCH_CHECK(false, "Expected all tensors to be on the same device (fake cuda)");
      device = t.device().index();
    } else if (t.is_cpu() && t.dim() > 0)
      host_arg = true;
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[base + i];
    if (v.isTensor())
      look(v.toTensor());
    else if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector()) look(t);
    else if (v.isOptionalTensorList())
      for (const std::optional<Tensor>& t : v.toOptionalTensorList().vec()) {
        if (t) look(*t);
      }
    else if (v.isDevice() && is_ours(v.toDevice())) {
      int d = v.toDevice().index();
      device = device >= 0 ? device : d < 0 ? t_device : d;
    }
  }
  if (device < 0) device = t_device;
  TORCH_CHECK(
      !(host_arg && !info.allow_mixed),
      "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (fake cuda, ",
      names()[info.name], ")");
  int e = current_actor(device);
  if (!info.skip) flush(e);
  Access acc{e, info.skip ? 0 : tick(e), info.name, st};
  Aliases al;
  double bytes = 0, products = 0;
  std::vector<Tensor> read;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[base + i];
    bool w = info.write[i];
    auto one = [&](const Tensor& t) {
      if (t.defined()) {
        bytes += (double)t.numel() * t.itemsize();
        if (!w) read.push_back(t);
      }
      if (!info.skip && t.defined() && is_ours(t)) log_tensor(t, w, acc);
      return al.tensor(t);
    };
    if (v.isTensor()) {
      if (v.toTensor().defined()) v = one(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> x;
      for (const Tensor& t : v.toTensorVector()) x.push_back(one(t));
      v = c10::IValue(x);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> x;
      for (const std::optional<Tensor>& t : v.toOptionalTensorList().vec())
        x.push_back(t ? std::optional<Tensor>(one(*t)) : t);
      v = c10::IValue(x);
    } else if (v.isDevice() && is_ours(v.toDevice()))
      v = c10::IValue(Device(kCPU));
    else if (v.isGenerator()) {
      auto* g = dynamic_cast<HostGenerator*>(v.toGenerator().unsafeGetGeneratorImpl());
      if (g) v = c10::IValue(g->inner);
    } else if (v.isNone() && schema.arguments()[i].name() == "generator")
      v = c10::IValue(static_cast<HostGenerator*>(default_generator(device).unsafeGetGeneratorImpl())->inner);
  }
  if (is_product(schema.name()) && read.size() >= 2) {
    const Tensor &left = read[read.size() - 2], &right = read.back();
    products = 2.0 * left.numel() * (right.dim() > 1 ? right.size(-1) : 1);
  }
  {
    Inside in;
    at::AutoDispatchBelowADInplaceOrView g;
    if (is_product(schema.name()))
      multiply_wide(op, stack);
    else
      op.callBoxed(stack);
  }
  al.settle(device, acc);
  size_t m = schema.returns().size(), rb = stack->size() - m;
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[rb + i];
    if (v.isTensor())
      v = al.result(v.toTensor(), device, acc);
    else if (v.isTensorList()) {
      std::vector<Tensor> x;
      for (const Tensor& t : v.toTensorVector()) x.push_back(al.result(t, device, acc));
      v = c10::IValue(x);
    }
  }
  if (!info.skip) launch(e, products / speeds().flops + bytes / speeds().memory);
  if (info.sync) {
    int place = host_waits_for("value");
    host().join(actors()[e]->clock);
    wait_until(time_of(e), place);
  }
}

}  // namespace fake_cuda
