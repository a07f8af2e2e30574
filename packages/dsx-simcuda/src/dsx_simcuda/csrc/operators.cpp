// Every operator on the device: one boxed fallback runs the CPU kernel later, on the current stream.
#include "device.h"

#include <torch/library.h>

using at::Tensor;

namespace sim {
namespace {

bool takes_host_tensors(const std::string& name) {
    return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
           name.rfind("aten::_unsafe_index", 0) == 0;
}

// Runs the CPU kernel on a stack of arguments (in a worker).
struct Kernel {
    c10::OperatorHandle op;
    std::string name;

    void operator()(torch::jit::Stack& args) const {
        Below b;
        if (name == "aten::native_layer_norm_backward") keep_statistics_in(args, args.size() - 8, 3);
        if (name == "aten::native_group_norm_backward") keep_statistics_in(args, args.size() - 10, 2);
        op.callBoxed(&args);
    }

    // CUDA keeps the statistics of a norm in fp32, the CPU kernel wants them in the input's type.
    static void keep_statistics_in(torch::jit::Stack& args, size_t base, int first) {
        auto want = args[base + 1].toTensor().scalar_type();
        for (int i = first; i < first + 2; i++) args[base + i] = args[base + i].toTensor().to(want);
    }
};

Tensor fresh(const Tensor& like) {
    return at::detail::empty_strided_generic(like.sizes(), like.strides(), device_allocator(), c10::DispatchKeySet(DK),
                                             like.scalar_type());
}

// One call of an operator: its arguments as the worker's kernel and as a meta kernel see them, and its results.
class Call {
  public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
        : op_(op), schema_(op.schema()), stack_(stack), count_(schema_.arguments().size()),
          args_(torch::jit::last(stack, count_)), guard_(first_device().value_or(c10::Device(DT))), dev_(device_now()),
          stream_(current(dev_)), kernel_{op, schema_.name()} {}

    void run() {
        for (size_t i = 0; i < count_; i++) convert(i);
        match_returns();
        if (infer_shapes()) launch();
        else launch_and_wait();
        torch::jit::drop(*stack_, count_);
        for (auto& r : results_) stack_->push_back(std::move(r));
    }

  private:
    c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack* stack_;
    size_t count_;
    c10::ArrayRef<c10::IValue> args_;
    c10::DeviceGuard guard_;
    int dev_;
    Stream* stream_;
    Kernel kernel_;
    std::vector<Span> spans_;                // what the operator reads and writes
    torch::jit::Stack host_, meta_, found_;  // arguments for the kernel, for the meta kernel, and its results
    torch::jit::Stack results_;
    std::vector<int> same_;  // for every result the argument it is, or -1
    bool outs_ = false, all_same_ = true, plain_values_ = false;

    std::optional<c10::Device> first_device() const {
        std::optional<c10::Device> device;
        auto look = [&](const Tensor& t) {
            if (!device && on_device(t)) device = t.device();
        };
        for (auto& v : args_) {
            if (v.isTensor()) {
                look(v.toTensor());
            } else if (v.isTensorList()) {
                for (const Tensor& t : v.toTensorVector()) look(t);
            } else if (v.isOptionalTensorList()) {
                for (const auto& t : v.toOptionalTensorVector())
                    if (t) look(*t);
            } else if (v.isDevice() && v.toDevice().type() == DT && !device) {
                device = v.toDevice();
            }
        }
        return device;
    }

    std::pair<Tensor, Tensor> convert(const Tensor& t, bool write) {
        if (!t.defined()) return {t, t};
        if (on_device(t)) {
            spans_.push_back(span_of(t, write));
            return {seen(t), as_meta(t)};
        }
        if (!t.device().is_cpu()) return {t, t};
        TORCH_CHECK(t.dim() == 0 || takes_host_tensors(schema_.name()), schema_.name(),
                    ": Expected all tensors to be on the same device, but one is on cuda:", dev_, " and one on cpu");
        Below b;
        auto held = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) held.unsafeGetTensorImpl()->set_wrapped_number(true);
        if (t.dim() == 0) return {held, held};  // 0-dim CPU operands may stay in a meta call
        wait_for_current("index tensor from the host", dev_);
        return {held, as_meta(t)};
    }

    void convert(size_t i) {
        const auto& declared = schema_.arguments()[i];
        const c10::IValue& v = args_[i];
        bool write = declared.alias_info() && declared.alias_info()->isWrite();
        outs_ |= write && declared.kwarg_only();
        if (v.isTensor()) {
            auto [h, m] = convert(v.toTensor(), write);
            host_.emplace_back(h);
            meta_.emplace_back(m);
        } else if (v.isTensorList()) {
            c10::List<Tensor> hs, ms;
            for (const Tensor& t : v.toTensorVector()) {
                auto [h, m] = convert(t, write);
                hs.push_back(h);
                ms.push_back(m);
            }
            host_.emplace_back(hs);
            meta_.emplace_back(ms);
        } else if (v.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> hs, ms;
            for (const auto& t : v.toOptionalTensorVector()) {
                if (!t) {
                    hs.push_back(std::nullopt);
                    ms.push_back(std::nullopt);
                    continue;
                }
                auto [h, m] = convert(*t, write);
                hs.push_back(h);
                ms.push_back(m);
            }
            host_.emplace_back(hs);
            meta_.emplace_back(ms);
        } else if (declared.name() == "generator" || v.isGenerator()) {
            auto given = v.isNone() ? std::nullopt : std::optional<at::Generator>(v.toGenerator());
            host_.emplace_back(launch_generator(given, dev_));
            meta_.emplace_back(c10::IValue());
        } else if (v.isDevice()) {
            host_.emplace_back(c10::Device(c10::kCPU));
            meta_.emplace_back(c10::Device(c10::kMeta));
        } else {
            host_.push_back(v);
            meta_.push_back(v);
        }
    }

    void match_returns() {
        const auto& returns = schema_.returns();
        same_.assign(returns.size(), -1);
        for (size_t r = 0; r < returns.size(); r++) {
            const auto* alias = returns[r].alias_info();
            for (size_t i = 0; alias && i < count_; i++) {
                const auto* given = schema_.arguments()[i].alias_info();
                if (given && given->beforeSets() == alias->beforeSets()) same_[r] = int(i);
            }
            all_same_ &= same_[r] >= 0;
            auto kind = returns[r].type()->kind();
            plain_values_ |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
        }
    }

    bool depends_on_values() const {
        return plain_values_ || op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
    }

    // Asks the meta kernel for the shapes of what is new; false if it cannot say.
    bool infer_shapes() {
        if (all_same_ && !outs_) return true;
        if (depends_on_values()) return false;
        auto key = key_of_shapes(op_, meta_);
        if (key && find_shapes(*key, found_)) return true;
        found_ = meta_;
        try {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.callBoxed(&found_);
        } catch (const c10::NotImplementedError&) { return false; } catch (const std::exception& e) {
            std::string text = e.what();
            if (text.find("NotImplemented") == std::string::npos && text.find("meta") == std::string::npos) throw;
            return false;
        }
        bool resized = outs_ && resize_outs();
        if (key && !resized) keep_shapes(*key, found_);
        return true;
    }

    bool resize_outs() {
        bool resized = false;
        for (size_t i = 0; i < count_; i++) {
            if (!schema_.arguments()[i].kwarg_only() || !args_[i].isTensor() || !meta_[i].isTensor()) continue;
            const Tensor& t = args_[i].toTensor();
            if (!on_device(t) || t.sizes() == meta_[i].toTensor().sizes()) continue;
            resize_(t, meta_[i].toTensor().sizes(), std::nullopt);
            host_[i] = seen(t);
            spans_.push_back(span_of(t, true));
            resized = true;
        }
        return resized;
    }

    // Makes the results now and lets the stream fill them later.
    void launch() {
        std::vector<std::pair<int, std::vector<Tensor>>> fill;  // result number, where its tensors go
        auto make = [&](const Tensor& like, std::vector<Tensor>& where) {
            Tensor t = fresh(like);
            spans_.push_back(span_of(t, true));
            where.push_back(seen(t));
            return t;
        };
        for (size_t r = 0; r < same_.size(); r++) {
            if (same_[r] >= 0) {
                results_.push_back(args_[same_[r]]);
                continue;
            }
            const c10::IValue& v = found_[r];
            std::vector<Tensor> where;
            if (v.isTensor()) {
                if (!v.toTensor().defined()) {
                    results_.emplace_back(Tensor());
                    continue;
                }
                results_.emplace_back(make(v.toTensor(), where));
                fill.push_back({int(r), where});
            } else if (v.isTensorList()) {
                c10::List<Tensor> list;
                for (const Tensor& like : v.toTensorVector()) list.push_back(make(like, where));
                fill.push_back({int(r), where});
                results_.emplace_back(list);
            } else {
                results_.push_back(v);
            }
        }
        // An out= kernel may resize its output on the way: give it memory of its own and copy.
        std::vector<std::pair<size_t, Tensor>> given;
        for (size_t i = 0; outs_ && i < count_; i++) {
            const auto& declared = schema_.arguments()[i];
            if (declared.kwarg_only() && declared.alias_info() && host_[i].isTensor() && host_[i].toTensor().defined())
                given.push_back({i, host_[i].toTensor()});
        }
        auto job = [kernel = kernel_, host = std::move(host_), fill = std::move(fill),
                    given = std::move(given)]() mutable {
            std::vector<Tensor> own;
            for (auto& [i, t] : given) {
                own.push_back(at::empty_like(t));
                host[i] = own.back();
            }
            kernel(host);
            Below b;
            for (size_t k = 0; k < given.size(); k++) given[k].second.copy_(own[k].view(given[k].second.sizes()));
            for (auto& [r, where] : fill) {
                if (host[r].isTensor()) {
                    if (host[r].toTensor().defined()) where[0].copy_(host[r].toTensor());
                } else {
                    auto list = host[r].toTensorVector();
                    for (size_t i = 0; i < where.size(); i++) where[i].copy_(list[i]);
                }
            }
        };
        stream_->push(kernel_.name, std::move(job), spans_);
    }

    // The shape depends on values (a host wait on CUDA too), or torch has no meta kernel (no wait on CUDA: not
    // counted).
    void launch_and_wait() {
        auto out = std::make_shared<torch::jit::Stack>(std::move(host_));
        stream_->push(kernel_.name, [kernel = kernel_, out] { kernel(*out); }, spans_);
        if (depends_on_values()) {
            wait_for_current(kernel_.name.c_str(), dev_);
        } else {
            try {
                synchronize(stream_);
            } catch (const std::runtime_error& e) { TORCH_CHECK(false, e.what()); }
        }
        for (size_t r = 0; r < same_.size(); r++) {
            const c10::IValue& v = (*out)[r];
            if (same_[r] >= 0) {
                results_.push_back(args_[same_[r]]);
            } else if (v.isTensor()) {
                results_.emplace_back(from_worker(stream_, kernel_.name, v.toTensor()));
            } else if (v.isTensorList()) {
                c10::List<Tensor> list;
                for (const Tensor& h : v.toTensorVector()) list.push_back(from_worker(stream_, kernel_.name, h));
                results_.emplace_back(list);
            } else {
                results_.push_back(v);
            }
        }
    }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    CallSite site;
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "simcuda: torch has no CPU",
                                " kernel for ", op.schema().name(), ", so that the simulated device cannot run it");
    Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

Tensor from_worker(Stream* s, const std::string& name, const Tensor& h) {
    if (!h.defined()) return h;
    TORCH_CHECK_NOT_IMPLEMENTED(h.layout() == at::kStrided, "simcuda: ", name, " makes a tensor of layout ", h.layout(),
                                ", which the simulated device does not have: use torch.strided or torch.sparse_coo");
    Tensor t = fresh(h);
    auto fill = [to = seen(t), h]() mutable {
        Below b;
        to.copy_(h);
    };
    s->push(name + " result", fill, {span_of(t, true)});
    return t;
}

}  // namespace sim
