// The simulated device as torch's CUDA device: device guard, allocators, generators, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/function.h>

namespace sim {

namespace {

c10::Stream wrap(Stream* s) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(DT, c10::DeviceIndex(s->dev)), s->id);
}

Stream* unwrap(const c10::Stream& s) { return stream(s.device_index(), int(s.id())); }

int index_of(c10::Device d) { return d.has_index() ? d.index() : device_now(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DT; }

    c10::Device exchangeDevice(c10::Device d) const override { return {DT, c10::DeviceIndex(set_device(index_of(d)))}; }

    c10::Device getDevice() const override { return {DT, c10::DeviceIndex(device_now())}; }

    void setDevice(c10::Device d) const override {
        if (d.has_index()) set_device(d.index());
    }

    void uncheckedSetDevice(c10::Device d) const noexcept override {
        if (d.has_index()) set_device(d.index());
    }

    c10::Stream getStream(c10::Device d) const override { return wrap(current(index_of(d))); }

    c10::Stream getDefaultStream(c10::Device d) const override { return wrap(stream(index_of(d), 0)); }

    c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
        return wrap(stream(index_of(d), id_from_pool(high)));
    }

    c10::Stream getNewStream(c10::Device d, int priority) const override {
        return getStreamFromGlobalPool(d, priority < 0);
    }

    c10::Stream exchangeStream(c10::Stream s) const override { return wrap(exchange(unwrap(s))); }

    void* getStreamNativeHandle(const c10::Stream s) const override { return unwrap(s); }

    void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }

    void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*e) *e = new Event;
        sim::record((Event*)*e, unwrap(s));
    }

    void block(void* e, const c10::Stream& s) const override {
        if (e) sim::block((Event*)e, unwrap(s));
    }

    bool queryEvent(void* e) const override { return !e || query((Event*)e); }

    c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(options().devices); }

    bool queryStream(const c10::Stream& s) const override {
        Stream* x = unwrap(s);
        std::lock_guard<std::recursive_mutex> g(order_lock());
        if (!x->finished(x->submitted)) return false;
        host_has_waited_for(x->clock);
        return true;
    }

    void synchronizeStream(const c10::Stream& s) const override {
        CallSite site;
        host_sync("Stream.synchronize");
        synchronize(unwrap(s));
    }

    void synchronizeEvent(void* e) const override {
        CallSite site;
        host_sync("Event.synchronize");
        if (e) synchronize((Event*)e);
    }

    void synchronizeDevice(const c10::DeviceIndex d) const override {
        CallSite site;
        host_sync("synchronize");
        synchronize_device(d < 0 ? device_now() : d);
    }

    void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
        record_use(p.get(), unwrap(s));
    }

    double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
        return elapsed_ms((Event*)a, (Event*)b);
    }

#if TORCH_MINOR >= 12
    bool isStreamCapturing(const c10::Stream&) const override { return false; }
#endif
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---------------------------------------------------------------- allocators
void free_device(void* p) { release(p); }

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t n) override {
        int dev = device_now();
        c10::Device device(DT, c10::DeviceIndex(dev));
        if (!n) return {nullptr, nullptr, &free_device, device};
        void* p = sim::allocate(n, dev, current(dev));
        if (!p) {
            auto s = stats(dev);
            TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (simulated). Tried to allocate ", n >> 10,
                             " KiB. GPU ", dev, " has ", s.total >> 10, " KiB, of which ",
                             s.counts["allocated_bytes"][0].current >> 10, " KiB are allocated and ",
                             s.counts["reserved_bytes"][0].current >> 10, " KiB reserved by PyTorch");
        }
        return {p, p, &free_device, device};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }

    void copy_data(void*, const void*, size_t) const override {
        TORCH_CHECK(false, "simcuda: copy_data of the device allocator is not simulated");
    }

    bool initialized() override { return true; }

    void emptyCache(c10::MempoolId_t) override { empty_cache(device_now()); }

    void recordStream(const c10::DataPtr& p, c10::Stream s) override { record_use(p.get(), unwrap(s)); }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
        c10::CachingDeviceAllocator::DeviceStats out;
        auto s = stats(d);
        auto fill = [&](const char* what, auto& array) {
            for (int i = 0; i < kPools; i++) {
                const Count& c = s.counts[what][i];
                array[size_t(i)].current = c.current;
                array[size_t(i)].peak = c.peak;
                array[size_t(i)].allocated = c.allocated;
                array[size_t(i)].freed = c.freed;
            }
        };
        fill("allocated_bytes", out.allocated_bytes);
        fill("reserved_bytes", out.reserved_bytes);
        fill("active_bytes", out.active_bytes);
        fill("requested_bytes", out.requested_bytes);
        fill("allocation", out.allocation);
        fill("segment", out.segment);
        out.num_alloc_retries = s.retries;
        out.num_ooms = s.ooms;
        return out;
    }

    void resetAccumulatedStats(c10::DeviceIndex d) override { reset_accumulated(d); }

    void resetPeakStats(c10::DeviceIndex d) override { reset_peak(d); }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
        auto s = stats(d);
        return {size_t(s.total - s.counts["reserved_bytes"][0].current), size_t(s.total)};
    }
};

DeviceMemory memory;

struct PinnedMemory final : at::HostAllocator {
    c10::DataPtr allocate(size_t n) override {
        void* p = pinned_allocate(n);
        return {p, p, &pinned_release, c10::Device(c10::kCPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &pinned_release; }

    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }

    bool record_event(void*, void*, c10::Stream) override { return true; }  // copies note their use themselves

    void empty_cache() override {}

    at::HostStats get_stats() override { return {}; }

    void reset_accumulated_stats() override {}

    void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

// ---------------------------------------------------------------- generators
// A seed and an offset, as CUDA's; every random kernel takes one number from it when it is launched.
struct Generator final : c10::GeneratorImpl {
    uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

    explicit Generator(int dev) : GeneratorImpl(c10::Device(DT, c10::DeviceIndex(dev)), c10::DispatchKeySet(DK)) {}

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
        TORCH_CHECK(t.numel() == 16 && t.device_type() == c10::kCPU,
                    "the state of a CUDA generator is a CPU tensor of 16 bytes; got ", t.numel(), " elements");
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

    Generator* clone_impl() const override {
        auto* g = new Generator(device().index());
        g->seed_ = seed_;
        g->offset_ = offset_;
        return g;
    }

    static c10::DeviceType device_type() { return DT; }
};

// ---------------------------------------------------------------- hooks
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}

    void init() const override {}

    bool isBuilt() const override { return true; }

    bool isAvailable() const override { return true; }

    bool hasCUDA() const override { return true; }

    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }

    at::Generator getNewGenerator(c10::DeviceIndex d) const override {
        return at::make_generator<Generator>(d < 0 ? device_now() : d);
    }

    c10::Device getDeviceFromPtr(void* p) const override { return {DT, c10::DeviceIndex(std::max(0, device_of(p)))}; }

    bool isPinnedPtr(const void* p) const override { return pinned(p); }

    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }

    at::Allocator* getCUDADeviceAllocator() const override { return &memory; }

    c10::DeviceIndex current_device() const override { return c10::DeviceIndex(device_now()); }

    c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(options().devices); }

    int getNumGPUs() const override { return options().devices; }

    void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }

    c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(device_now()); }

    c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
        return c10::DeviceIndex(d < 0 ? device_now() : set_device(d));
    }

    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }

    void deviceSynchronize(c10::DeviceIndex d) const override { synchronize_device(d); }

    std::string showConfig() const override { return "simulated CUDA device (dsx-simcuda)"; }
};

// ---------------------------------------------------------------- the forward operation of a backward one
// The place of the forward operation that made a node is remembered by the node's sequence number.
constexpr size_t kRemembered = 1 << 16;
std::mutex forward_m;
std::vector<std::pair<uint64_t, int>> forward_stacks(kRemembered);
thread_local uint64_t nodes_seen = 0;

void find_backward(Place& place) {
    if (auto node = torch::autograd::get_current_node()) {
        place.backward = node->name();
        uint64_t number = node->sequence_nr();
        std::lock_guard<std::mutex> g(forward_m);
        auto& [kept, stack] = forward_stacks[number % kRemembered];
        if (kept == number) place.forward = stack;
        return;
    }
    uint64_t next = at::sequence_number::peek();
    if (next <= nodes_seen) return;
    if (place.stack) {
        std::lock_guard<std::mutex> g(forward_m);
        for (uint64_t n = std::max(nodes_seen, next > 64 ? next - 64 : 0); n < next; n++)
            forward_stacks[n % kRemembered] = {n, place.stack};
    }
    nodes_seen = next;
}

struct Setup {
    Setup() {
        c10::SetAllocator(DT, &memory, 100);
        at::setHostAllocator(DT, &pinned_memory, 100);
        set_backward_probe(&find_backward);
    }
} setup;

}  // namespace

Span span_of(const at::Tensor& t, bool write) {
    if (!t.defined() || t.numel() == 0) return {0, 0, write, nullptr};
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    auto lo = uintptr_t(t.const_data_ptr());
    Span span{lo, lo + size_t(last + 1) * t.element_size(), write, nullptr};
    if (!t.is_non_overlapping_and_dense())
        span.gaps = std::make_shared<Geometry>(Geometry{t.sizes().vec(), t.strides().vec(), size_t(t.element_size())});
    return span;
}

void wait_for_current(const char* why, int dev) {
    host_sync(why);
    TORCH_CHECK(options().sync_debug < 2, "called a synchronizing CUDA operation: ", why);
    if (options().sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation: ", why);
    try {
        synchronize(current(dev));
    } catch (const std::runtime_error& e) { TORCH_CHECK(false, e.what()); }
}

c10::Allocator* device_allocator() { return &memory; }

const at::Generator& default_generator(int dev) {
    static std::vector<at::Generator> all = [] {
        std::vector<at::Generator> v;
        for (int i = 0; i < options().devices; i++) v.push_back(at::make_generator<Generator>(i));
        return v;
    }();
    return all.at(size_t(dev < 0 ? device_now() : dev));
}

at::Generator launch_generator(const std::optional<at::Generator>& given, int dev) {
    auto g = given && given->defined() ? *given : default_generator(dev);
    std::lock_guard<std::mutex> lock(g.mutex());
    TORCH_CHECK(g.device().type() == DT, "Expected a 'cuda' device type for generator but found '", g.device().type(),
                "'");
    auto* x = static_cast<Generator*>(g.unsafeGetGeneratorImpl());
    std::seed_seq mix{x->seed_, x->seed_ >> 32, x->offset_, x->offset_ >> 32, uint64_t(7)};
    uint32_t two[2];
    mix.generate(two, two + 2);
    x->offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>((uint64_t(two[0]) << 32) | two[1]);
}

}  // namespace sim

namespace at {
using CUDAHooks = sim::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
