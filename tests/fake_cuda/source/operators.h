// Operators of its own: allocation, copies between host and device, views of storages; and what operators of the CPU do
// to page-locked memory.

#pragma once

#include "kernels.h"

namespace fake_cuda {

// ---------------------------------------------------------------- ops of their own
static Tensor empty_mf(IntArrayRef size, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device> dev,
                       std::optional<bool> pin, std::optional<MemoryFormat> mf) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dev.value_or(Device(DEVICE)));
  return at::detail::empty_generic(size, &device_allocator(), DispatchKeySet(KEY),
                                   dt.value_or(at::typeMetaToScalarType(at::get_default_dtype())), mf);
}
static Tensor empty_st(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dt, std::optional<Layout>,
                       std::optional<Device> dev, std::optional<bool> pin) {
  c10::DeviceGuard g(dev.value_or(Device(DEVICE)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), DispatchKeySet(KEY),
                                           dt.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}
static Tensor& copy_(Tensor& self, const Tensor& src0, bool non_blocking) {
  if (self.is_same(src0)) return self;
  static int n_h2d = intern("copy H2D"), n_d2h = intern("copy D2H"), n_d2d = intern("copy D2D");
  Tensor src = src0;
  if (self.numel() == 0) return self;
  if (is_ours(self) && is_ours(src)) {
    int st = stack_id();
    Lock l(mutex());
    int e = current_actor(src.device().index());
    flush(e);
    Access a{e, tick(e), n_d2d, st};
    Tensor ex = src.expand_as(self);
    log_tensor(ex, false, a);
    log_tensor(self, true, a);
    launch(e, 2.0 * self.numel() * self.itemsize() / speeds().memory);
    Aliases al;
    Inside in;
    at::AutoDispatchBelowADInplaceOrView g;
    al.tensor(self).copy_(al.tensor(ex));
    return self;
  }
  bool h2d = is_ours(self);
  bool plain = self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.is_contiguous() &&
               src.is_contiguous() && self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg();
  bool same_strided = self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.strides() == src.strides() &&
                      self.is_non_overlapping_and_dense();
  if (!plain && !same_strided) {
    bool conv_on_src = h2d ? !non_blocking : non_blocking;
    Tensor dc, sc;
    if (conv_on_src) {
      dc = self.is_contiguous() ? self : at::empty_like(self, MemoryFormat::Contiguous);
      sc = src.to(self.scalar_type()).expand_as(self).contiguous();
    } else {
      dc = self.is_contiguous() && self.dtype() == src.dtype()
               ? self
               : at::empty_like(self, self.options().dtype(src.dtype()), MemoryFormat::Contiguous);
      sc = src.expand_as(self).contiguous();
    }
    copy_(dc, sc, non_blocking);
    if (!dc.is_same(self)) self.copy_(dc, non_blocking);
    return self;
  }
  int st = stack_id();
  Lock l(mutex());
  const Tensor& d = h2d ? self : src;
  const Tensor& h = h2d ? src : self;
  int e = current_actor(d.device().index());
  size_t nb = self.numel() * self.itemsize();
  void* hp = (char*)const_cast<void*>((const void*)h.storage().data()) + h.storage_offset() * h.itemsize();
  void* dp = host_view((char*)d.storage().data() + d.storage_offset() * d.itemsize());
  void* to = h2d ? dp : hp;
  void* from = h2d ? hp : dp;
  bool pinned = is_locked(hp);
  if (!pinned) host_waits_for(h2d ? "pageable copy H2D" : "pageable copy D2H");
  else if (!non_blocking) host_waits_for(h2d ? "copy H2D" : "copy D2H");
  Access a{e, tick(e), h2d ? n_h2d : n_d2h, st};
  log_tensor(d, h2d, a);
  if (pinned) log_tensor(h, !h2d, a);
  launch_copy(e, h2d, nb);
  if (non_blocking && pinned) {
    void* base = const_cast<void*>((const void*)h.storage().data());
    auto it = host_blocks().find(base);
    if (it != host_blocks().end()) it->second.used[e] = actors()[e]->clock;
    deferred_count++;
    push(e, Entry{[=] { memcpy(to, from, nb); }});
    return self;
  }
  flush(e);
  memcpy(to, from, nb);
  if (!non_blocking || !h2d) {
    host().join(actors()[e]->clock);
    wait_until(time_of(e), st);
  }
  return self;
}
static const Tensor& resize_(const Tensor& self, SymIntArrayRef ssize, std::optional<MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(ssize);
  Lock l(mutex());
  int64_t n = c10::multiply_integers(size);
  auto& s = const_cast<c10::Storage&>(self.storage());
  size_t need = (self.storage_offset() + n) * self.itemsize();
  if (n && s.nbytes() < need) resize_storage(s, need, self.device().index());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
static Tensor& set_off(Tensor& self, c10::Storage s, SymInt off, SymIntArrayRef size, SymIntArrayRef stride) {
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  auto* t = self.unsafeGetTensorImpl();
  t->set_storage_keep_dtype(std::move(s));
  std::vector<int64_t> sd;
  if (stride.size() == sz.size())
    sd = C10_AS_INTARRAYREF_SLOW(stride).vec();
  else {
    sd.resize(sz.size());
    int64_t k = 1;
    for (int64_t i = (int64_t)sz.size() - 1; i >= 0; i--) {
      sd[i] = k;
      k *= std::max<int64_t>(sz[i], 1);
    }
  }
  t->set_sizes_and_strides(sz, sd, off.expect_int());
  return self;
}
static Tensor& set_storage(Tensor& self, c10::Storage s) {
  int64_t n = s.nbytes() / self.itemsize();
  return set_off(self, std::move(s), 0, c10::fromIntArrayRefSlow({n}), {});
}
static Tensor& set_tensor(Tensor& self, const Tensor& src) {
  auto* t = self.unsafeGetTensorImpl();
  t->set_storage_keep_dtype(src.storage());
  t->set_sizes_and_strides(src.sizes(), src.strides(), src.storage_offset());
  return self;
}
static void record_stream(Tensor& self, Stream s) { guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(kBool))};
  Tensor mask = at::empty_like(x, x.options().dtype(kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}
static int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, FAKE_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, FAKE_KEY, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_st);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_off);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  // Before it asks the fallback, torch composes these of other operators, and rounds differently from the CPU's own kernels.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                           "native_channel_shuffle", "_stack", "_stack.out", "addr", "addr.out", "linalg__powsum",
                           "all.dims", "all.dims_out", "any.dims", "any.dims_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

#ifdef FAKE_PRIVATE
}  // namespace fake_cuda

// What torch does for its own devices, and leaves to the library of any other.
namespace at::autocast {
#define FAKE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FAKE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FAKE_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FAKE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER)
  AT_FORALL_FP32(FAKE_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FAKE_FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(FAKE_PROMOTE)
}
}  // namespace at::autocast

namespace fake_cuda {
#endif

// ---------------------------------------------------------------- what CPU ops do to page-locked memory
static std::unique_ptr<ObserverContext> on_op(const RecordFunction& fn) {
  if (t_inside_kernel) return nullptr;
  const auto& in = fn.inputs();
  bool ours = false, hit = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (is_ours(t))
      ours = true;
    else if (!hit && t.is_cpu() && t.has_storage() && t.storage().data() &&
             is_locked((char*)t.storage().data() + t.storage_offset() * t.itemsize()))
      hit = true;
  };
  {
    Lock l(mutex());
    for (auto& v : in) {
      if (v.isTensor())
        look(v.toTensor());
      else if (v.isTensorList())
        for (const Tensor& t : v.toTensorVector()) look(t);
    }
  }
  if (ours || !hit) return nullptr;
  auto name = fn.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  const OpInfo& info = op_info(op->schema());
  if (info.skip || in.size() < info.write.size()) return nullptr;
  int st = stack_id();
  Lock l(mutex());
  Access a{0, tick(0), info.name, st};
  for (size_t i = 0; i < info.write.size(); i++) {
    auto& v = in[i];
    auto one = [&](const Tensor& t) {
      if (t.defined() && t.is_cpu() && t.has_storage() && t.storage().data() &&
          is_locked((char*)t.storage().data() + t.storage_offset() * t.itemsize()))
        log_tensor(t, info.write[i], a);
    };
    if (v.isTensor())
      one(v.toTensor());
    else if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector()) one(t);
  }
  return nullptr;
}

}  // namespace fake_cuda
