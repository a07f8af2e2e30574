// Sparse tensors (COO) on the device: their indices and values are dense tensors of the device, as on CUDA.
//
// What only looks at a tensor, or makes one of indices and values, is torch's own code. Every other operator runs
// torch's kernel for the CPU on the current stream, and its results are put back, since how many values they have is
// known then only.
#include "device.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/permute_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <torch/library.h>

using at::Tensor;
using at::sparse::get_sparse_impl;

namespace sim {
namespace {

bool is_sparse(const Tensor& t) { return t.defined() && t.layout() == at::kSparse; }

Tensor make_sparse(const Tensor& like, const Tensor& indices, const Tensor& values) {
    auto* impl = get_sparse_impl(like);
    auto options = values.options().layout(at::kSparse);
    return at::_sparse_coo_tensor_with_dims_and_tensors(impl->sparse_dim(), impl->dense_dim(), like.sizes(), indices,
                                                        values, options, impl->coalesced());
}

// One call of an operator that has a sparse tensor among its arguments.
class SparseCall {
  public:
    SparseCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
        : op_(op), schema_(op.schema()), stack_(stack), args_(torch::jit::last(stack, schema_.arguments().size())),
          name_(schema_.name()), guard_(device()), stream_(current(device_now())) {}

    void run() {
        auto work = std::make_shared<torch::jit::Stack>();
        for (size_t i = 0; i < args_.size(); i++) work->push_back(convert(i));
        auto kernel = [op = op_, work, written = written_] {
            Below below;
            for (size_t i : written) (*work)[i] = (*work)[i].toTensor().clone();
            op.callBoxed(work.get());
        };
        stream_->push(name_, kernel, spans_);
        wait();
        torch::jit::Stack results;
        for (size_t r = 0; r < schema_.returns().size(); r++) results.push_back(result(r, (*work)[r]));
        torch::jit::drop(*stack_, args_.size());
        for (auto& value : results) stack_->push_back(std::move(value));
    }

  private:
    c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack* stack_;
    c10::ArrayRef<c10::IValue> args_;
    std::string name_;
    c10::DeviceGuard guard_;
    Stream* stream_;
    std::vector<Span> spans_;
    std::vector<size_t> written_;  // sparse arguments that the kernel gives other values, maybe more of them

    c10::Device device() const {
        for (auto& v : args_) {
            if (v.isTensor() && on_device(v.toTensor())) return v.toTensor().device();
            if (!v.isTensorList()) continue;
            for (const Tensor& t : v.toTensorVector())
                if (on_device(t)) return t.device();
        }
        return c10::Device(DT);
    }

    Tensor convert(const Tensor& t, bool write) {
        if (!t.defined()) return t;
        if (!on_device(t)) {
            TORCH_CHECK(t.dim() == 0, name_,
                        ": Expected all tensors to be on the same device, but one is on cuda:", device_now(),
                        " and one on ", t.device());
            return t;
        }
        if (!is_sparse(t)) {
            spans_.push_back(span_of(t, write));
            return seen(t);
        }
        auto* impl = get_sparse_impl(t);
        for (const Tensor& part : {impl->indices(), impl->values()}) spans_.push_back(span_of(part, write));
        Below below;
        return make_sparse(t, seen(impl->indices()), seen(impl->values()));
    }

    c10::IValue convert(size_t i) {
        const auto* alias = schema_.arguments()[i].alias_info();
        const bool write = alias && alias->isWrite();
        const c10::IValue& v = args_[i];
        if (v.isTensor()) {
            if (write && is_sparse(v.toTensor())) written_.push_back(i);
            return convert(v.toTensor(), write);
        }
        if (v.isDevice()) return c10::Device(c10::kCPU);
        if (!v.isTensorList()) return v;
        c10::List<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(convert(t, write));
        return list;
    }

    // On CUDA the host waits where it must know how many values there are; elsewhere only this device does.
    void wait() {
        bool plain = false;
        for (auto& returned : schema_.returns()) plain |= returned.type()->kind() != c10::TypeKind::TensorType;
        if (plain || name_ == "aten::_coalesce") return wait_for_current(name_.c_str(), device_now());
        try {
            synchronize(stream_);
        } catch (const std::runtime_error& e) { TORCH_CHECK(false, e.what()); }
    }

    Tensor on_the_device(const Tensor& h) {
        if (!h.defined()) return h;
        if (!is_sparse(h)) return from_worker(stream_, name_, h);
        auto* impl = get_sparse_impl(h);
        return make_sparse(h, from_worker(stream_, name_, impl->indices()),
                           from_worker(stream_, name_, impl->values()));
    }

    // What the kernel has written into one of the arguments.
    void put_back(const Tensor& into, const Tensor& h) {
        if (is_sparse(into)) {
            auto *impl = get_sparse_impl(into), *from = get_sparse_impl(h);
            impl->raw_resize_(from->sparse_dim(), from->dense_dim(), h.sizes());
            impl->set_indices_and_values_unsafe(from_worker(stream_, name_, from->indices()),
                                                from_worker(stream_, name_, from->values()));
            impl->set_coalesced(from->coalesced());
        } else if (h.data_ptr() != alias(into.data_ptr()) || h.sizes() != into.sizes()) {
            resize_(into, h.sizes(), std::nullopt);
            into.copy_(from_worker(stream_, name_, h));
        }
    }

    c10::IValue result(size_t r, const c10::IValue& v) {
        const auto* alias = schema_.returns()[r].alias_info();
        for (size_t i = 0; alias && v.isTensor() && i < args_.size(); i++) {
            const auto* argument = schema_.arguments()[i].alias_info();
            if (!argument || argument->beforeSets() != alias->beforeSets()) continue;
            put_back(args_[i].toTensor(), v.toTensor());
            return args_[i];
        }
        if (v.isTensor()) return on_the_device(v.toTensor());
        if (!v.isTensorList()) return v;
        c10::List<Tensor> list;
        for (const Tensor& h : v.toTensorVector()) list.push_back(on_the_device(h));
        return list;
    }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    CallSite site;
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::SparseCPU), "simcuda: torch has",
                                " no CPU kernel of ", op.schema().name(), " for sparse tensors, so that the simulated",
                                " device cannot run it");
    SparseCall(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, SparseCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
    namespace own = at::native;
    m.impl("empty.memory_format", TORCH_FN(own::empty_sparse_symint));
    m.impl("empty_like", TORCH_FN(own::empty_like_sparse_coo));
    m.impl("_sparse_coo_tensor_with_dims", TORCH_FN(own::new_with_dims_sparse));
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(own::new_with_dims_and_tensor_sparse_symint));
    m.impl("sparse_dim", TORCH_FN(own::sparse_dim_sparse));
    m.impl("_dimI", TORCH_FN(own::sparse_dim_sparse));
    m.impl("dense_dim", TORCH_FN(own::dense_dim_sparse));
    m.impl("_dimV", TORCH_FN(own::dense_dim_sparse));
    m.impl("_nnz", TORCH_FN(own::_nnz_sparse));
    m.impl("is_coalesced", TORCH_FN(own::is_coalesced_sparse));
    m.impl("_coalesced_", TORCH_FN(own::_coalesced_sparse_));
    m.impl("_indices", TORCH_FN(own::_indices_sparse));
    m.impl("_values", TORCH_FN(own::_values_sparse));
    m.impl("indices", TORCH_FN(own::indices_sparse));
    m.impl("values", TORCH_FN(own::values_sparse));
    m.impl("sparse_resize_", TORCH_FN(own::sparse_resize_));
    m.impl("sparse_resize_and_clear_", TORCH_FN(own::sparse_resize_and_clear_));
    m.impl("clone", TORCH_FN(own::clone_sparse));
    m.impl("copy_", TORCH_FN(own::copy_sparse_wrapper_));
    m.impl("copy_sparse_to_sparse_", TORCH_FN(own::copy_sparse_));
    m.impl("zero_", TORCH_FN(own::zero_sparse_));
    m.impl("unsqueeze", TORCH_FN(own::unsqueeze_sparse));
    m.impl("permute", TORCH_FN(own::permute_sparse_coo));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("_to_sparse",
           [](const Tensor& t, std::optional<at::Layout> layout, at::OptionalIntArrayRef block,
              std::optional<int64_t> dense) { return at::native::dense_to_sparse(t, layout, block, dense); });
    m.impl("_to_sparse.sparse_dim", [](const Tensor& t, int64_t dim) { return at::native::dense_to_sparse(t, dim); });
}

}  // namespace
}  // namespace sim
