// What the torch side of the simulated device shares: tensors as workers see them, and the device's allocator.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include "core.h"

namespace sim {

constexpr auto DT = c10::DeviceType::CUDA;
constexpr auto DK = c10::DispatchKey::CUDA;

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == DT; }

// A CPU tensor over the same bytes, for workers; it keeps nothing alive.
inline at::Tensor seen(const at::Tensor& t) {
    auto view = at::from_blob(alias(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
    if (t.is_conj()) view._set_conj(true);  // the bytes are those of the conjugate
    if (t.is_neg()) view._set_neg(true);
    return view;
}

inline at::Tensor as_meta(const at::Tensor& t) {
    return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
}

struct Below {  // what a kernel runs under
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
};

Span span_of(const at::Tensor& t, bool write);
void wait_for_current(const char* why, int dev);  // a wait of the host
c10::Allocator* device_allocator();
const at::Generator& default_generator(int dev);
at::Generator launch_generator(const std::optional<at::Generator>& given, int dev);  // the CPU kernel's own
// A device tensor with what a kernel on a worker has made, filled on the stream.
at::Tensor from_worker(Stream* s, const std::string& name, const at::Tensor& h);
void storage_resize(const at::Tensor& t, int64_t bytes);
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>);
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking);
// Shapes that meta kernels gave before: the key of a call (none: it cannot be remembered), and what is known of it.
std::optional<std::string> key_of_shapes(const c10::OperatorHandle& op, const torch::jit::Stack& meta);
bool find_shapes(const std::string& key, torch::jit::Stack& results);
void keep_shapes(const std::string& key, const torch::jit::Stack& results);
void watch_registered_memory();  // torch's operators on memory that the program has registered

}  // namespace sim
