// Tensors of the device: memory, views, storages, values read by the host, random state.
#include "device.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

using at::Tensor;

namespace sim {

void storage_resize(const Tensor& t, int64_t bytes) {
    auto* storage = t.storage().unsafeGetStorageImpl();
    c10::DeviceGuard guard(t.device());
    auto fresh = device_allocator()->allocate(size_t(bytes));
    size_t both = std::min<size_t>(storage->nbytes(), size_t(bytes));
    if (both) {
        auto* from = alias(storage->data());
        auto* to = alias(fresh.get());
        auto a = uintptr_t(storage->data()), b = uintptr_t(fresh.get());
        current(device_now())
            ->push("storage resize", [=] { memcpy(to, from, both); }, {{a, a + both, false}, {b, b + both, true}});
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(size_t(bytes));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    int64_t need = (impl->storage_offset() + impl->numel()) * int64_t(self.element_size());
    if (impl->numel() && int64_t(self.storage().nbytes()) < need) storage_resize(self, need);
    return self;
}

namespace {

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(at::Device(DT)));
    return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(DK), c10::dtype_or_default(dtype),
                                     format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device.value_or(at::Device(DT)));
    return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(DK),
                                             c10::dtype_or_default(dtype));
}

void record_stream(Tensor& self, at::Stream s) {
    record_use(self.storage().mutable_data(), stream(s.device_index(), int(s.id())));
}

bool is_set_to(const Tensor& a, const Tensor& b) {
    return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
           a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

at::Scalar item(const Tensor& self) {
    CallSite site;
    auto out = std::make_shared<at::Scalar>();
    auto read = [out, view = seen(self)] {
        Below below;
        *out = at::_local_scalar_dense(view);
    };
    current(self.device().index())->push("item", read, {span_of(self, false)});
    wait_for_current("item", self.device().index());
    return *out;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
    if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
    auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

Tensor native_dropout_backward(const Tensor& g, const Tensor& mask, double scale) { return g.mul(mask).mul_(scale); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty_memory_format);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize_);
    m.impl("copy_", &copy_);
    m.impl("_local_scalar_dense", &item);
    m.impl("record_stream", &record_stream);
    m.impl("is_set_to", &is_set_to);
    m.impl("as_strided", [](const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b, std::optional<int64_t> o) {
        return at::native::as_strided_tensorimpl(t, a, b, o);
    });
    m.impl("view", [](const Tensor& t, c10::IntArrayRef a) { return at::native::view(t, a); });
    m.impl("_reshape_alias",
           [](const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b) { return at::native::_reshape_alias(t, a, b); });
    m.impl("unfold", [](const Tensor& t, int64_t a, int64_t b, int64_t c) { return at::native::unfold(t, a, b, c); });
    m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
    m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
    m.impl("set_.source_Storage", [](Tensor& t, at::Storage s) -> Tensor& { return at::native::set_(t, s); });
    m.impl("set_.source_Storage_storage_offset",
           [](Tensor& t, at::Storage s, int64_t o, c10::IntArrayRef a, c10::IntArrayRef b) -> Tensor& {
               t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
               t.unsafeGetTensorImpl()->set_storage_offset(o);
               if (b.empty() && !a.empty()) t.unsafeGetTensorImpl()->set_sizes_contiguous(a);
               else t.unsafeGetTensorImpl()->set_sizes_and_strides(a, b);
               return t;
           });
    m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& s) -> Tensor& { return at::native::set_tensor_(t, s); });
    m.impl("set_", [](Tensor& t) -> Tensor& {
        t.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(
            c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true));
        t.unsafeGetTensorImpl()->set_storage_offset(0);
        t.unsafeGetTensorImpl()->set_sizes_contiguous({0});
        return t;
    });
    m.impl("native_dropout", &native_dropout);
    m.impl("native_dropout_backward", &native_dropout_backward);
}

TORCH_LIBRARY(simcuda, m) {
    m.def("storage_resize_(Tensor(a!) self, int bytes) -> ()");
    m.def("watch_registered_memory() -> ()", [] { watch_registered_memory(); });
    m.def("rng_get(int device) -> Tensor",
          [](int64_t d) { return at::Tensor(default_generator(int(d)).unsafeGetGeneratorImpl()->get_state()); });
    m.def("rng_set(int device, Tensor state) -> ()", [](int64_t d, const Tensor& s) {
        default_generator(int(d)).unsafeGetGeneratorImpl()->set_state(*s.unsafeGetTensorImpl());
    });
    m.def("rng_seed(int device, int seed) -> ()", [](int64_t d, int64_t s) {
        default_generator(int(d)).unsafeGetGeneratorImpl()->set_current_seed(uint64_t(s));
    });
    m.def("rng_initial_seed(int device) -> int",
          [](int64_t d) { return int64_t(default_generator(int(d)).unsafeGetGeneratorImpl()->current_seed()); });
}

TORCH_LIBRARY_IMPL(simcuda, CUDA, m) {
    m.impl("storage_resize_", [](const Tensor& t, int64_t b) { storage_resize(t, b); });
}

}  // namespace
}  // namespace sim
