// The simulated device as torch's CUDA device: guard, allocator, hooks, generator, kernels.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "core.h"

using at::Tensor;

namespace {

constexpr auto DT = c10::DeviceType::CUDA;
constexpr auto DK = c10::DispatchKey::CUDA;

c10::Stream wrap(sim::Stream* s) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(DT, s->dev), s->id); }

sim::Stream* unwrap(const c10::Stream& s) { return sim::stream(s.device_index(), int(s.id())); }

int index_of(c10::Device d) { return d.has_index() ? d.index() : sim::device_now(); }

void sync_current(const char* why, int dev) {
    sim::host_sync(why);
    try {
        sim::synchronize(sim::current(dev));
    } catch (const std::runtime_error& e) { TORCH_CHECK(false, e.what()); }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DT; }

    c10::Device exchangeDevice(c10::Device d) const override {
        return {DT, c10::DeviceIndex(sim::set_device(index_of(d)))};
    }

    c10::Device getDevice() const override { return {DT, c10::DeviceIndex(sim::device_now())}; }

    void setDevice(c10::Device d) const override {
        if (d.has_index()) sim::set_device(d.index());
    }

    void uncheckedSetDevice(c10::Device d) const noexcept override {
        if (d.has_index()) sim::set_device(d.index());
    }

    c10::Stream getStream(c10::Device d) const override { return wrap(sim::current(index_of(d))); }

    c10::Stream getDefaultStream(c10::Device d) const override { return wrap(sim::stream(index_of(d), 0)); }

    c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
        return wrap(sim::stream(index_of(d), sim::from_pool(high)));
    }

    c10::Stream getNewStream(c10::Device d, int priority) const override {
        return getStreamFromGlobalPool(d, priority < 0);
    }

    c10::Stream exchangeStream(c10::Stream s) const override { return wrap(sim::exchange(unwrap(s))); }

    void* getStreamNativeHandle(const c10::Stream s) const override { return unwrap(s); }

    void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (sim::Event*)e; }

    void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*e) *e = new sim::Event;
        sim::record((sim::Event*)*e, unwrap(s));
    }

    void block(void* e, const c10::Stream& s) const override {
        if (e) sim::block((sim::Event*)e, unwrap(s));
    }

    bool queryEvent(void* e) const override { return !e || sim::query((sim::Event*)e); }

    c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(sim::options().devices); }

    bool queryStream(const c10::Stream& s) const override {
        auto* x = unwrap(s);
        return x->finished(x->submitted);
    }

    void synchronizeStream(const c10::Stream& s) const override {
        sim::host_sync("stream synchronize");
        sim::synchronize(unwrap(s));
    }

    void synchronizeEvent(void* e) const override {
        sim::host_sync("event synchronize");
        if (e) sim::synchronize((sim::Event*)e);
    }

    void synchronizeDevice(const c10::DeviceIndex d) const override {
        sim::host_sync("device synchronize");
        sim::synchronize_device(d < 0 ? sim::device_now() : d);
    }

    void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
        sim::record_use(p.get(), unwrap(s));
    }

    double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
        auto *x = (sim::Event*)a, *y = (sim::Event*)b;
        return (*y->mark->time - *x->mark->time) * 1e3;
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

void free_device(void* p) { sim::release(p); }

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t n) override {
        int dev = sim::device_now();
        if (!n) return {nullptr, nullptr, &free_device, c10::Device(DT, dev)};
        void* p = sim::allocate(n, dev, sim::current(dev));
        if (!p) {
            auto s = sim::stats(dev);
            TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (sim). Tried to allocate ", n >> 10,
                             " KiB. GPU ", dev, ": ", s.allocated >> 10, " KiB allocated, ", s.reserved >> 10,
                             " KiB reserved");
        }
        return {p, p, &free_device, c10::Device(DT, dev)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }

    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data on sim"); }

    bool initialized() override { return true; }

    void emptyCache(c10::MempoolId_t) override { sim::empty_cache(sim::device_now()); }

    void recordStream(const c10::DataPtr& p, c10::Stream s) override { sim::record_use(p.get(), unwrap(s)); }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
        c10::CachingDeviceAllocator::DeviceStats out;
        auto s = sim::stats(d);
        out.allocated_bytes[0].current = int64_t(s.allocated);
        out.allocated_bytes[0].peak = int64_t(s.peak);
        out.reserved_bytes[0].current = int64_t(s.reserved);
        out.reserved_bytes[0].peak = int64_t(s.peak_reserved);
        out.num_alloc_retries = int64_t(s.retries);
        out.num_ooms = int64_t(s.ooms);
        return out;
    }

    void resetAccumulatedStats(c10::DeviceIndex) override {}

    void resetPeakStats(c10::DeviceIndex d) override { sim::reset_peak(d); }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
        auto s = sim::stats(d);
        return {s.total - s.reserved, s.total};
    }
};

DeviceMemory memory;

struct PinnedMemory final : at::HostAllocator {
    c10::DataPtr allocate(size_t n) override {
        void* p = sim::pinned_allocate(n);
        return {p, p, &sim::pinned_release, c10::Device(c10::kCPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &sim::pinned_release; }

    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }

    bool record_event(void* p, void*, c10::Stream s) override {
        auto* x = unwrap(s);
        sim::pinned_use(p, x, x->submitted);
        return true;
    }

    void empty_cache() override {}

    at::HostStats get_stats() override { return {}; }

    void reset_accumulated_stats() override {}

    void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

// A generator: a seed and an offset, as CUDA's; every random kernel takes one number from it at the time of its launch.
struct Gen final : c10::GeneratorImpl {
    uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

    explicit Gen(int dev) : GeneratorImpl(c10::Device(DT, dev), c10::DispatchKeySet(DK)) {}

    void set_current_seed(uint64_t s) override {
        seed_ = s;
        offset_ = 0;
    }

    void set_offset(uint64_t o) override { offset_ = o; }

    uint64_t get_offset() const override { return offset_; }

    uint64_t current_seed() const override { return seed_; }

    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom(true));
        return seed_;
    }

    void set_state(const c10::TensorImpl& t) override {
        auto* p = (const int64_t*)t.data();
        seed_ = uint64_t(p[0]);
        offset_ = uint64_t(p[1]);
    }

    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        auto t = at::empty({16}, at::kByte);
        auto* p = (int64_t*)t.data_ptr();
        p[0] = int64_t(seed_);
        p[1] = int64_t(offset_);
        return t.getIntrusivePtr();
    }

    Gen* clone_impl() const override {
        auto* g = new Gen(device().index());
        g->seed_ = seed_;
        g->offset_ = offset_;
        return g;
    }

    static c10::DeviceType device_type() { return DT; }
};

const at::Generator& default_generator(int dev) {
    static std::vector<at::Generator> them = [] {
        std::vector<at::Generator> v;
        for (int i = 0; i < sim::options().devices; i++) v.push_back(at::make_generator<Gen>(i));
        return v;
    }();
    return them.at(dev < 0 ? sim::device_now() : dev);
}

at::Generator launch_generator(const std::optional<at::Generator>& given, int dev) {  // the CPU kernel's own
    auto g = given && given->defined() ? *given : default_generator(dev);
    std::lock_guard<std::mutex> lock(g.mutex());
    if (g.device().type() != DT)
        return at::make_generator<at::CPUGeneratorImpl>(g.get<at::CPUGeneratorImpl>()->random64());
    auto* x = static_cast<Gen*>(g.unsafeGetGeneratorImpl());
    std::seed_seq mix{x->seed_, x->seed_ >> 32, x->offset_, x->offset_ >> 32, uint64_t(7)};
    uint32_t two[2];
    mix.generate(two, two + 2);
    x->offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>((uint64_t(two[0]) << 32) | two[1]);
}

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}

    void init() const override {}

    bool isBuilt() const override { return true; }

    bool isAvailable() const override { return true; }

    bool hasCUDA() const override { return true; }

    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }

    at::Generator getNewGenerator(c10::DeviceIndex d) const override {
        return at::make_generator<Gen>(d < 0 ? sim::device_now() : d);
    }

    c10::Device getDeviceFromPtr(void* p) const override {
        return {DT, c10::DeviceIndex(std::max(0, sim::device_of(p)))};
    }

    bool isPinnedPtr(const void* p) const override { return sim::pinned(p); }

    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }

    at::Allocator* getCUDADeviceAllocator() const override { return &memory; }

    c10::DeviceIndex current_device() const override { return c10::DeviceIndex(sim::device_now()); }

    c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(sim::options().devices); }

    int getNumGPUs() const override { return sim::options().devices; }

    void setCurrentDevice(c10::DeviceIndex d) const override { sim::set_device(d); }

    c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(sim::device_now()); }

    c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
        return c10::DeviceIndex(d < 0 ? sim::device_now() : sim::set_device(d));
    }

    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }

    void deviceSynchronize(c10::DeviceIndex d) const override { sim::synchronize_device(d); }

    std::string showConfig() const override { return "sim"; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

namespace {

// ---------------------------------------------------------------- tensors as workers see them
sim::Span span_of(const Tensor& t, bool write) {
    if (!t.defined() || t.numel() == 0) return {0, 0, write};
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    auto lo = uintptr_t(t.const_data_ptr());
    return {lo, lo + size_t(last + 1) * t.element_size(), write};
}

Tensor seen(const Tensor& t) {  // a CPU tensor over the same bytes; keeps nothing alive
    return at::from_blob(sim::alias(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == DT; }

Tensor as_meta(const Tensor& t) { return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()); }

struct Below {  // what a kernel runs under
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
};

// ---------------------------------------------------------------- memory operations
Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(at::Device(DT)));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(DK), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device.value_or(at::Device(DT)));
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(DK),
                                             c10::dtype_or_default(dtype));
}

void storage_resize(const Tensor& t, int64_t bytes) {
    auto* storage = t.storage().unsafeGetStorageImpl();
    c10::DeviceGuard guard(t.device());
    auto fresh = memory.allocate(size_t(bytes));
    size_t both = std::min<size_t>(storage->nbytes(), size_t(bytes));
    if (both) {
        auto* from = sim::alias(storage->data());
        auto* to = sim::alias(fresh.get());
        auto a = uintptr_t(storage->data()), b = uintptr_t(fresh.get());
        sim::current(sim::device_now())
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

void record_stream(Tensor& self, at::Stream s) { sim::record_use(self.storage().mutable_data(), unwrap(s)); }

bool is_set_to(const Tensor& a, const Tensor& b) {
    return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
           a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

at::Scalar item(const Tensor& self) {
    int dev = self.device().index();
    auto view = seen(self);
    at::Scalar out;
    sim::current(dev)->push("item",
                            [&] {
                                Below b;
                                out = at::_local_scalar_dense(view);
                            },
                            {span_of(self, false)});
    sync_current("item", dev);
    return out;
}

// ---------------------------------------------------------------- copies
bool plain(const Tensor& a, const Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
           a.is_non_overlapping_and_dense();
}

Tensor& copy_(Tensor& self, const Tensor& src_, bool non_blocking) {
    if (self.numel() == 0) return self;
    Tensor src = src_.expand(self.sizes());
    if (on_device(self) && on_device(src)) {
        int from = src.device().index(), to = self.device().index();
        auto a = seen(self), b = seen(src);
        auto* s = sim::current(from);
        sim::Event before, after;
        if (from != to) {
            sim::record(&before, sim::current(to));
            sim::block(&before, s);
        }
        s->push(from == to ? "copy" : "copy between devices",
                [a, b]() mutable {
                    Below g;
                    a.copy_(b);
                },
                {span_of(src, false), span_of(self, true)});
        if (from != to) {
            sim::record(&after, s);
            sim::block(&after, sim::current(to));
        }
        return self;
    }
    bool upward = on_device(self);
    const Tensor& there = upward ? self : src;
    int dev = there.device().index();
    c10::DeviceGuard guard(there.device());
    auto* s = sim::current(dev);
    size_t bytes = self.nbytes();
    if (upward) {
        auto a = seen(self);
        bool pinned = sim::pinned(src.const_data_ptr());
        if (pinned && plain(self, src)) {
            auto b = at::from_blob(const_cast<void*>(src.const_data_ptr()), src.sizes(), src.strides(), src.options());
            uint64_t n = s->push("copy host to device",
                                 [a, b, bytes]() mutable {
                                     Below g;
                                     sim::paced(bytes);
                                     a.copy_(b);
                                 },
                                 {span_of(self, true)});
            sim::pinned_use(src.const_data_ptr(), s, n);
        } else {
            Below g;
            auto b = src.scalar_type() == self.scalar_type()
                         ? src.clone()
                         : src.to(self.scalar_type()).clone();  // the driver's staging
            s->push("copy staged to device",
                    [a, b, bytes]() mutable {
                        Below g;
                        sim::paced(bytes);
                        a.copy_(b);
                    },
                    {span_of(self, true)});
            if (pinned) non_blocking = false;
        }
        if (!non_blocking) sync_current("copy host to device", dev);
        return self;
    }
    bool pinned = sim::pinned(self.const_data_ptr());
    if (!plain(self, src)) {  // as torch does: a device tensor of the wanted kind first
        Tensor same = at::empty_strided(
            self.sizes(), self.is_non_overlapping_and_dense() ? self.strides() : self.contiguous().strides(),
            src.options().dtype(self.scalar_type()));
        same.copy_(src);
        if (self.is_non_overlapping_and_dense()) return copy_(self, same, non_blocking);
        Tensor host = at::empty_strided(same.sizes(), same.strides(), self.options());
        copy_(host, same, false);
        Below g;
        self.copy_(host);
        return self;
    }
    auto b = seen(src);
    if (pinned && non_blocking) {
        if (sim::options().poison) memset(self.mutable_data_ptr(), 0xFF, bytes);  // who reads too early reads NaN
        auto a = at::from_blob(self.mutable_data_ptr(), self.sizes(), self.strides(), self.options());
        uint64_t n = s->push("copy device to host",
                             [a, b, bytes]() mutable {
                                 Below g;
                                 sim::paced(bytes);
                                 a.copy_(b);
                             },
                             {span_of(src, false)});
        sim::pinned_use(self.const_data_ptr(), s, n);
        return self;
    }
    auto a = at::from_blob(self.mutable_data_ptr(), self.sizes(), self.strides(), self.options());
    s->push("copy device to host",
            [a, b, bytes]() mutable {
                Below g;
                sim::paced(bytes);
                a.copy_(b);
            },
            {span_of(src, false)});
    sync_current("copy device to host", dev);
    return self;
}

// ---------------------------------------------------------------- every other operator
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

// One call of an operator: its arguments as the worker's kernel and as a meta kernel see them, and its results.
class Call {
  public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
        : op_(op), schema_(op.schema()), stack_(stack), count_(schema_.arguments().size()),
          args_(torch::jit::last(stack, count_)), guard_(first_device().value_or(c10::Device(DT))),
          dev_(sim::device_now()), stream_(sim::current(dev_)), kernel_{op, schema_.name()} {}

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
    sim::Stream* stream_;
    Kernel kernel_;
    std::vector<sim::Span> spans_;           // what the operator reads and writes
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
        sim::host_sync("index tensor from the host");
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
        found_ = meta_;
        try {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.callBoxed(&found_);
        } catch (const c10::NotImplementedError&) { return false; } catch (const std::exception& e) {
            std::string text = e.what();
            if (text.find("NotImplemented") == std::string::npos && text.find("meta") == std::string::npos) throw;
            return false;
        }
        if (outs_) resize_outs();
        return true;
    }

    void resize_outs() {
        for (size_t i = 0; i < count_; i++) {
            if (!schema_.arguments()[i].kwarg_only() || !args_[i].isTensor() || !meta_[i].isTensor()) continue;
            const Tensor& t = args_[i].toTensor();
            if (!on_device(t) || t.sizes() == meta_[i].toTensor().sizes()) continue;
            resize_(t, meta_[i].toTensor().sizes(), std::nullopt);
            host_[i] = seen(t);
            spans_.push_back(span_of(t, true));
        }
    }

    static Tensor fresh(const Tensor& like) {
        return at::detail::empty_strided_generic(like.sizes(), like.strides(), &memory, c10::DispatchKeySet(DK),
                                                 like.scalar_type());
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
            sync_current(kernel_.name.c_str(), dev_);
        } else {
            try {
                sim::synchronize(stream_);
            } catch (const std::runtime_error& e) { TORCH_CHECK(false, e.what()); }
        }
        auto to_device = [&](const Tensor& h) {
            if (!h.defined()) return h;
            Tensor t = fresh(h);
            auto fill = [to = seen(t), h]() mutable {
                Below b;
                to.copy_(h);
            };
            stream_->push(kernel_.name + " result", fill, {span_of(t, true)});
            return t;
        };
        for (size_t r = 0; r < same_.size(); r++) {
            const c10::IValue& v = (*out)[r];
            if (same_[r] >= 0) {
                results_.push_back(args_[same_[r]]);
            } else if (v.isTensor()) {
                results_.emplace_back(to_device(v.toTensor()));
            } else if (v.isTensorList()) {
                c10::List<Tensor> list;
                for (const Tensor& h : v.toTensorVector()) list.push_back(to_device(h));
                results_.emplace_back(list);
            } else {
                results_.push_back(v);
            }
        }
    }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
    if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
    auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

Tensor native_dropout_backward(const Tensor& g, const Tensor& mask, double scale) { return g.mul(mask).mul_(scale); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

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
        t.unsafeGetTensorImpl()->set_storage_keep_dtype(
            c10::Storage(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true));
        t.unsafeGetTensorImpl()->set_storage_offset(0);
        t.unsafeGetTensorImpl()->set_sizes_contiguous({0});
        return t;
    });
    m.impl("native_dropout", &native_dropout);
    m.impl("native_dropout_backward", &native_dropout_backward);
}

TORCH_LIBRARY(sim, m) {
    m.def("storage_resize_(Tensor(a!) self, int bytes) -> ()");
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

TORCH_LIBRARY_IMPL(sim, CUDA, m) {
    m.impl("storage_resize_", [](const Tensor& t, int64_t b) { storage_resize(t, b); });
}

struct Setup {
    Setup() {
        c10::SetAllocator(DT, &memory, 100);
        at::setHostAllocator(DT, &pinned_memory, 100);
    }
} setup;
}  // namespace
