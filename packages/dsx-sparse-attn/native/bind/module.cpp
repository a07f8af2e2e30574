// The only file that knows Python: chooses the instruction set, makes the block lists, divides the work among threads,
// releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "dsx_native/isa.h"
#include "dsx_native/parallel.h"
#include "dsx_sparse_attn/kernels.h"

namespace py = pybind11;

namespace dsx_sparse {
namespace base { extern const Kernels table; }
#ifdef DSX_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

namespace {

// ---- which kernels ----

struct Chosen {
    dsx_native::IsaChoice<Kernels> isa;
    bool own_threads = false;
};
Chosen& chosen() {
#ifdef DSX_X86
    static Chosen c{{&base::table, &avx2::table, &avx512::table}};
#else
    static Chosen c{{&base::table}};
#endif
    return c;
}
const Kernels& kernels() { return chosen().isa.current(); }

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(static_cast<uintptr_t>(address)); }

// ---- block lists ----

struct BlockLists {
    std::vector<int32_t> start, items;  // per layout nb + 1 starts; items over all layouts

    int64_t cost(int64_t layout, int64_t blocks, int64_t line) const {
        const int64_t at = layout * (blocks + 1) + line;
        return start[at + 1] - start[at];
    }
};

// Rows of the layout (or its columns) as lists; what causality forbids is left out.
BlockLists lists_of(const char* layout, int64_t width, int64_t layouts, int64_t blocks, bool causal, bool columns) {
    BlockLists found;
    found.start.reserve(layouts * (blocks + 1));
    std::vector<std::vector<int32_t>> by_column(columns ? blocks : 0);
    for (int64_t h = 0; h < layouts; ++h) {
        for (auto& c : by_column) c.clear();
        const char* head = layout + h * blocks * blocks * width;
        for (int64_t i = 0; i < blocks; ++i) {
            if (!columns) found.start.push_back(static_cast<int32_t>(found.items.size()));
            const int64_t stop = causal ? i + 1 : blocks;
            for (int64_t j = 0; j < stop; ++j) {
                const char* entry = head + (i * blocks + j) * width;
                if (width == 8 ? *reinterpret_cast<const int64_t*>(entry) == 0 : *entry == 0) continue;
                if (columns) by_column[j].push_back(static_cast<int32_t>(i));
                else found.items.push_back(static_cast<int32_t>(j));
            }
        }
        for (auto& c : by_column) {
            found.start.push_back(static_cast<int32_t>(found.items.size()));
            found.items.insert(found.items.end(), c.begin(), c.end());
        }
        found.start.push_back(static_cast<int32_t>(found.items.size()));
    }
    return found;
}

// ---- threads ----

// Scratch of all threads, each 64-byte aligned.
class Scratch {
  public:
    Scratch(int threads, int64_t floats) : each_((floats + 31) / 16 * 16), room_(new float[threads * each_ + 16]) {
        const auto raw = reinterpret_cast<uintptr_t>(room_.get());
        first_ = room_.get() + (64 - raw % 64) % 64 / 4;
    }
    float* of(int part) const { return first_ + part * each_; }

  private:
    int64_t each_;
    std::unique_ptr<float[]> room_;
    float* first_;
};

// body(item, thread) for every item, each taken by whichever thread is free.
template <class Body> void run_on_threads(int64_t items, int threads, const Body& body) {
    std::atomic<int64_t> next{0};
    const int used = static_cast<int>(std::min<int64_t>(threads, items));
    dsx_native::on_threads(used, chosen().own_threads, [&](int part, int) {
        for (int64_t at = next.fetch_add(1); at < items; at = next.fetch_add(1)) body(at, part);
    });
}

// ---- arguments: dictionaries would cost more than a small problem; the order is that of backends/native_cpu.py ----

Tensor4 tensor(const std::vector<int64_t>& numbers, size_t at) {
    return {pointer<const char>(numbers[at]), numbers[at + 1], numbers[at + 2], numbers[at + 3]};
}

struct Call {
    Problem p{};
    const char* layout;
    int64_t layout_width;
    int threads;

    Call(const std::vector<int64_t>& n, double scale, double keep_scale) {
        if (n.size() != 54) throw std::invalid_argument("expected 54 numbers, got " + std::to_string(n.size()));
        p.dtype = static_cast<DType>(n[0]);
        p.batch = n[1], p.heads = n[2], p.kv_heads = n[3], p.seq = n[4], p.dim = n[5], p.block = n[6], p.blocks = n[7];
        layout = pointer<const char>(n[8]);
        layout_width = n[9];
        p.lists.layouts = static_cast<int32_t>(n[10]);
        p.causal = n[11] != 0;
        p.dropout = n[12] != 0;
        p.seed = static_cast<uint32_t>(n[13]);
        p.drop_below = static_cast<uint32_t>(n[14]);
        threads = static_cast<int>(std::max<int64_t>(1, n[15]));
        p.q = tensor(n, 16), p.k = tensor(n, 20), p.v = tensor(n, 24), p.out = tensor(n, 28);
        p.dout = tensor(n, 32), p.dk = tensor(n, 36), p.dv = tensor(n, 40);
        p.lse = pointer<float>(n[44]), p.delta = pointer<float>(n[45]);
        p.bias = pointer<const float>(n[46]);
        for (int i = 0; i < 3; ++i) p.bias_stride[i] = n[47 + i];
        p.key_bias = pointer<const float>(n[50]);
        p.dq = pointer<float>(n[51]), p.dq_part = n[52];
        p.dbias = pointer<float>(n[53]);
        p.scale = static_cast<float>(scale);
        p.keep_scale = static_cast<float>(keep_scale);
        check();
    }
    void check() const {
        const bool blocks =
            p.block > 0 && p.block <= 128 && p.block % PAD == 0 && p.blocks == (p.seq + p.block - 1) / p.block;
        const bool heads =
            p.kv_heads > 0 && p.heads % p.kv_heads == 0 && (p.lists.layouts == 1 || p.lists.layouts == p.heads);
        if (!blocks || !heads || p.dim < 1 || p.dim > 256 || (layout_width != 8 && layout_width != 1))
            throw std::invalid_argument(
                "sizes that the kernels do not know; dsx_sparse_attn checks them before calling");
    }
};

void forward(const std::vector<int64_t>& numbers, double scale, double keep_scale) {
    Call call(numbers, scale, keep_scale);
    Problem& p = call.p;
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    const BlockLists lists = lists_of(call.layout, call.layout_width, p.lists.layouts, p.blocks, p.causal, false);
    p.lists.row_start = lists.start.data();
    p.lists.row_items = lists.items.data();
    // Long rows first (a global block sees every key); the rest in order, where neighbours share keys in the cache.
    const int64_t per_head = p.blocks, total = p.batch * p.heads * per_head;
    std::vector<int64_t> order(total);
    std::iota(order.begin(), order.end(), 0);
    const int64_t much = 2 * (static_cast<int64_t>(lists.items.size()) / (p.lists.layouts * p.blocks) + 1);
    std::stable_partition(order.begin(), order.end(), [&](int64_t item) {
        return lists.cost(p.lists.layouts == 1 ? 0 : item / per_head % p.heads, p.blocks, item % per_head) > much;
    });
    const Scratch scratch(call.threads, k.scratch(p.block, p.dim));
    run_on_threads(total, call.threads, [&](int64_t at, int part) {
        const int64_t item = order[at];
        k.forward(p, item / per_head / p.heads, item / per_head % p.heads, item % per_head, scratch.of(part));
    });
}

// Into how many parts the key blocks of one key head are cut so that `threads` are busy: the fewest that balance, since
// each part beyond the first has its own dQ. The answer is also the number of dQ buffers to give.
int parts_for(int64_t heads, int threads) {
    for (int parts = 1; parts < threads; ++parts) {
        const int64_t items = heads * parts, rounds = (items + threads - 1) / threads;
        if (static_cast<double>(items) / static_cast<double>(rounds * threads) > 0.85) return parts;
    }
    return threads;
}

// Borders of the parts of one key head, even in blocks visited (plus one each for what a key block costs by itself).
std::vector<int64_t> borders(const Problem& p, const BlockLists& lists, int64_t kv_head, int parts) {
    const int64_t group = p.heads / p.kv_heads;
    std::vector<int64_t> sums{0};
    for (int64_t j = 0; j < p.blocks; ++j) {
        int64_t cost = 1;
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
            cost += lists.cost(p.lists.layouts == 1 ? 0 : h, p.blocks, j);
        sums.push_back(sums.back() + cost);
    }
    std::vector<int64_t> found;
    for (int part = 0; part <= parts; ++part)
        found.push_back(std::lower_bound(sums.begin(), sums.end(), sums.back() * part / parts) - sums.begin());
    found.back() = p.blocks;
    return found;
}

void backward(const std::vector<int64_t>& numbers, double scale, double keep_scale, int parts) {
    Call call(numbers, scale, keep_scale);
    Problem& p = call.p;
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    const BlockLists lists = lists_of(call.layout, call.layout_width, p.lists.layouts, p.blocks, p.causal, true);
    p.lists.col_start = lists.start.data();
    p.lists.col_items = lists.items.data();
    const Scratch scratch(call.threads, k.scratch(p.block, p.dim));
    run_on_threads(p.batch * p.heads * p.blocks, call.threads, [&](int64_t item, int) {
        const int64_t head = item / p.blocks, begin = item % p.blocks * p.block;
        k.row_dots(p, head / p.heads, head % p.heads, begin, std::min(p.seq, begin + p.block));
    });
    std::vector<std::vector<int64_t>> cuts;
    for (int64_t h = 0; h < p.kv_heads; ++h) cuts.push_back(borders(p, lists, h, parts));
    // Work that would add to the same elements of dbias is done one phase after another.
    const bool share_batch = p.dbias && p.bias_stride[0] == 0, share_head = p.dbias && p.bias_stride[1] == 0;
    const int64_t batches = share_batch ? 1 : p.batch, heads = share_head ? 1 : p.kv_heads;
    for (int64_t phase = 0; phase < (p.batch / batches) * (p.kv_heads / heads); ++phase) {
        const int64_t b0 = share_batch ? phase % p.batch : 0, h0 = share_head ? phase / (p.batch / batches) : 0;
        run_on_threads(batches * heads * parts, call.threads, [&](int64_t item, int thread) {
            const int64_t b = b0 + item / parts / heads, h = h0 + item / parts % heads, part = item % parts;
            k.backward(p, b, h, cuts[h][part], cuts[h][part + 1], part, scratch.of(thread));
        });
    }
}

double peak(int64_t rounds) {
    float sink[3] = {0.5f, 0.25f, 0.0f};
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    const double operations = k.peak(rounds, sink);
    return operations / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
}  // namespace dsx_sparse

PYBIND11_MODULE(_C, m) {
    using namespace dsx_sparse;
    m.doc() = "CPU kernels of dsx-sparse-attn. Takes addresses; dsx_sparse_attn checks tensors before calling.";
    m.attr("ABI") = 1;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", [] { return chosen().isa.names(); });
    m.def("set_isa", [](const std::string& name) { chosen().isa.use(name); });
    m.def("set_own_threads", [](bool on) { chosen().own_threads = on; });
    m.def("threads_backend", [] {
        const bool pool = dsx_native::Gomp::get().usable() && !chosen().own_threads;
        return std::string(pool ? "torch's OpenMP pool" : "std::thread");
    });
    m.def("sanitizer", [] {
#ifdef __SANITIZE_ADDRESS__
        return std::string("address");
#else
        return std::string();
#endif
    });
    m.def("forward", &forward);
    m.def("backward", &backward);
    m.def("parts_for", &parts_for);
    m.def("peak", &peak, "Floating-point operations per second of fused multiply-adds alone, one thread.");
}
