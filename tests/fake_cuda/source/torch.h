// What all parts include.

#pragma once

#include <Python.h>
#include <frameobject.h>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/library.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <unordered_map>

using namespace at;
// Which device of torch's the fake is: CUDA, or, compiled with FAKE_PRIVATE, the one that torch keeps for devices of other
// libraries, which has whatever name Python gives it.
#ifdef FAKE_PRIVATE
#define FAKE_KEY PrivateUse1
#else
#define FAKE_KEY CUDA
#endif

namespace fake_cuda {
static constexpr DeviceType DEVICE = DeviceType::FAKE_KEY;
static constexpr DispatchKey KEY = DispatchKey::FAKE_KEY;
static bool is_ours(const Device& d) { return d.type() == DEVICE; }
static bool is_ours(const Tensor& t) { return is_ours(t.device()); }
}  // namespace fake_cuda
