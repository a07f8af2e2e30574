// NCCL's semantics for the simulated device, over a gloo backend.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "core.h"

using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace {

Tensor seen(const Tensor& t) {
    return at::from_blob(sim::alias(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}

sim::Span span(const Tensor& t, bool write) {
    auto lo = uintptr_t(t.const_data_ptr());
    return {lo, lo + size_t(t.numel()) * t.element_size(), write};
}

struct SimWork : c10d::Work {
    std::shared_ptr<sim::Event> end = std::make_shared<sim::Event>();
    int dev = 0;
    bool host_blocking = false;
    Tensors stash;  // torch 2.8+ keeps the tensors of an asynchronous collective until wait()
    Tensors outputs;

    explicit SimWork(c10d::OpType op, int rank) : Work(rank, op) {}

    bool isCompleted() override { return sim::query(end.get()); }

    bool isSuccess() const override { return true; }

    std::exception_ptr exception() const override { return nullptr; }

    void synchronize() override {
        sim::block(end.get(), sim::current(dev));
        stash.clear();
    }

    bool wait(std::chrono::milliseconds timeout) override {
        synchronize();
        if (host_blocking || timeout != kNoTimeout) {
            sim::host_sync("Work.wait blocks");
            sim::synchronize(end.get());
        }
        return true;
    }

    void blockCurrentStream() override { synchronize(); }

    Tensors result() override { return outputs; }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        c10::Device device(c10::kCUDA, dev);
        auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                          std::vector<c10::Device>{device});
        auto* before = sim::exchange(stream);
        f->markCompleted(c10::IValue(outputs));  // records an event on the current streams, as ProcessGroupNCCL's
        sim::exchange(before);
        return f;
    }

    sim::Stream* stream = nullptr;
};

struct SimNccl : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> inner;
    sim::Stream* own = nullptr;
    std::map<int, sim::Stream*> p2p;
    std::mutex turn_m;
    std::condition_variable turn_cv;
    uint64_t tickets = 0, turn = 0, seq = 0;
    bool high = false, coalescing = false;

    struct Op {
        std::string name;
        std::function<void()> run;
        std::vector<sim::Span> spans;
        Tensors keep;
    };

    std::vector<std::function<c10::intrusive_ptr<c10d::Work>()>> batch_p2p;
    Tensors batch_keep;
    std::vector<sim::Span> batch_spans;

    static std::mutex& exclusive() {
        static std::mutex m;
        return m;
    }

    SimNccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, bool high)
        : Backend(rank, size), inner(std::move(inner)), high(high) {}

    const std::string getBackendName() const override { return "nccl"; }

    void eagerConnectSingleDevice(at::Device) override {}

    void abort() override { inner->abort(); }

    void shutdown() override {
        if (own) sim::synchronize(own);
        inner->shutdown();
    }

    bool supportsCoalescing() const override { return true; }

    void setTimeout(std::chrono::milliseconds t) override { inner->setTimeout(t); }

    void setSequenceNumberForGroup() override {}

    uint64_t getSequenceNumberForGroup() override { return seq; }

    int check(const Tensors& ts) {
        TORCH_CHECK(!ts.empty(), "no tensors");
        for (auto& t : ts) {
            TORCH_CHECK(t.is_cuda(), "nccl takes CUDA tensors only");
            TORCH_CHECK(t.is_non_overlapping_and_dense(), "nccl takes dense tensors only");
        }
        return ts[0].device().index();
    }

    void agree(const std::string& what) {  // what every rank's n-th collective must have in common
        if (getSize() == 1) return;
        uint64_t h = std::hash<std::string>()(what);
        auto mine = at::tensor({int64_t(h)}, at::kLong);
        auto all = at::empty({getSize()}, at::kLong);
        inner->_allgather_base(all, mine)->wait();
        for (int i = 0; i < getSize(); i++)
            if (all[i].item<int64_t>() != int64_t(h)) {
                sim::report("mismatch", "rank " + std::to_string(getRank()) + " of the group runs '" + what +
                                            "', rank " + std::to_string(i) + " another collective");
                throw std::runtime_error("mismatched collectives: " + what);
            }
    }

    // The work goes to the group's own stream (asynchronous) or to the current one (synchronous: torch 2.8+).
    c10::intrusive_ptr<c10d::Work> launch(c10d::OpType type, int dev, bool async, Op op, Tensors outputs,
                                          sim::Stream* given = nullptr, bool collective = true) {
        c10::DeviceGuard guard(c10::Device(c10::kCUDA, dev));
        sim::Stream* now = sim::current(dev);
        sim::Stream* s = given ? given : now;
        if (async && !given) {
            if (!own) own = sim::stream(dev, sim::from_pool(high));
            s = own;
        }
        if (s != now) {
            sim::Event e;
            sim::record(&e, now);
            sim::block(&e, s);
        }
        auto work = c10::make_intrusive<SimWork>(type, getRank());
        work->dev = dev;
        work->stream = s;
        std::lock_guard<std::mutex> order(launch_m);
        if (collective) {
            uint64_t ticket = tickets++;
            seq++;
            auto run = op.run;
            auto name = op.name;
            bool alone = sim::options().one_collective;
            op.run = [this, ticket, run, name, alone] {
                {
                    std::unique_lock<std::mutex> g(turn_m);
                    turn_cv.wait(g, [&] { return turn == ticket; });
                }
                std::exception_ptr failed;
                try {
                    std::unique_lock<std::mutex> only(exclusive(), std::defer_lock);
                    if (alone) only.lock();
                    agree(name);
                    run();
                } catch (...) { failed = std::current_exception(); }
                {
                    std::lock_guard<std::mutex> g(turn_m);
                    turn++;
                }
                turn_cv.notify_all();
                if (failed) std::rethrow_exception(failed);
            };
        }
        s->push(op.name, std::move(op.run), op.spans);
        sim::record(work->end.get(), s);
        if (async) work->stash = op.keep;
        work->outputs = std::move(outputs);
        return work;
    }

    std::mutex launch_m;

    static std::string sign(const char* name, const Tensor& t, int extra = 0) {
        return std::string(name) + " " + std::to_string(t.numel()) + " " + c10::toString(t.scalar_type()) + " " +
               std::to_string(extra);
    }

    static std::pair<c10d::ReduceOp, double> plainly(const c10d::ReduceOp& op, int size) {
        if (op == c10d::ReduceOp::AVG) return {c10d::ReduceOp::SUM, 1.0 / size};
        if (op == c10d::ReduceOp::PREMUL_SUM) {
            auto* p = reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
            return {c10d::ReduceOp::SUM, p->double_factor};
        }
        return {op, 1.0};
    }

    // gloo lacks some types and operations: reduce in float where it must
    void reduce_all(Tensor t, const c10d::ReduceOp& op) {
        auto [plain, factor] = plainly(op, getSize());
        c10d::AllreduceOptions o;
        o.reduceOp = plain;
        bool small = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBool;
        Tensor x = small ? t.to(t.scalar_type() == at::kBool ? at::kInt : at::kFloat) : t.contiguous();
        Tensors v{x};
        inner->allreduce(v, o)->wait();
        if (factor != 1.0) x.mul_(factor);
        t.copy_(x);
    }

    struct Quiet {
        at::AutoDispatchBelowADInplaceOrView a;
        at::NoGradGuard b;
    };

    c10::intrusive_ptr<c10d::Work> allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
        int dev = check(ts);
        auto t = ts[0];
        auto x = seen(t);
        auto op = o.reduceOp;
        return launch(c10d::OpType::ALLREDUCE, dev, o.asyncOp,
                      {sign("all_reduce", t, int(op.op_)),
                       [this, x, op] {
                           Quiet q;
                           reduce_all(x, op);
                       },
                       {span(t, true)},
                       {t}},
                      {t});
    }

    c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
        int dev = check(ts);
        Op op{sign("all_reduce_coalesced", ts[0], int(ts.size())), {}, {}, ts};
        Tensors xs;
        for (auto& t : ts) {
            xs.push_back(seen(t));
            op.spans.push_back(span(t, true));
        }
        auto r = o.reduceOp;
        op.run = [this, xs, r] {
            Quiet q;
            for (auto& x : xs) reduce_all(x, r);
        };
        return launch(c10d::OpType::COALESCED, dev, o.asyncOp, op, ts);
    }

    c10::intrusive_ptr<c10d::Work> broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
        int dev = check(ts);
        auto t = ts[0];
        auto x = seen(t);
        auto oo = o;
        return launch(c10d::OpType::BROADCAST, dev, o.asyncOp,
                      {sign("broadcast", t, int(o.rootRank)),
                       [this, x, oo] {
                           Quiet q;
                           Tensors v{x};
                           inner->broadcast(v, oo)->wait();
                       },
                       {span(t, int(o.rootRank) != getRank())},
                       {t}},
                      {t});
    }

    c10::intrusive_ptr<c10d::Work> reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
        int dev = check(ts);
        auto t = ts[0];
        auto x = seen(t);
        auto oo = o;
        int me = getRank();
        return launch(c10d::OpType::REDUCE, dev, o.asyncOp,
                      {sign("reduce", t, int(o.rootRank)),
                       [this, x, oo, me] {
                           Quiet q;
                           auto y = x.clone();
                           reduce_all(y, oo.reduceOp);
                           if (me == int(oo.rootRank)) x.copy_(y);
                       },
                       {span(t, int(o.rootRank) == me)},
                       {t}},
                      {t});
    }

    void gather_all(Tensor out, Tensor in) {
        auto a = out.contiguous().view({-1}), b = in.contiguous().view({-1});
        auto ab = a.view(at::kByte), bb = b.view(at::kByte);
        inner->_allgather_base(ab, bb)->wait();
    }

    c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
        int dev = check({out, in});
        TORCH_CHECK(out.numel() == in.numel() * getSize(), "the output must hold the input once for every rank");
        auto x = seen(out), y = seen(in);
        return launch(c10d::OpType::_ALLGATHER_BASE, dev, o.asyncOp,
                      {sign("all_gather_into", in),
                       [this, x, y] {
                           Quiet q;
                           auto z = y.clone();
                           gather_all(x, z);
                       },
                       {span(in, false), span(out, true)},
                       {out, in}},
                      {out});
    }

    c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outs, Tensors& ins,
                                             const c10d::AllgatherOptions& o) override {
        int dev = check(ins);
        Op op{sign("all_gather", ins[0]), {}, {span(ins[0], false)}, ins};
        Tensors xs;
        for (auto& t : outs[0]) {
            check({t});
            xs.push_back(seen(t));
            op.spans.push_back(span(t, true));
            op.keep.push_back(t);
        }
        auto y = seen(ins[0]);
        op.run = [this, xs, y] {
            Quiet q;
            bool even = true;
            for (auto& x : xs) even = even && x.numel() == y.numel();
            if (even) {
                auto all = at::empty({getSize(), y.numel()}, y.options());
                gather_all(all.view({-1}), y.clone());
                for (size_t i = 0; i < xs.size(); i++) xs[i].copy_(all[int64_t(i)].view(xs[i].sizes()));
            } else
                for (size_t i = 0; i < xs.size(); i++) {
                    c10d::BroadcastOptions b;
                    b.rootRank = int64_t(i);
                    Tensors v{int(i) == getRank() ? y.clone() : xs[i]};
                    inner->broadcast(v, b)->wait();
                    if (int(i) == getRank()) xs[i].copy_(v[0]);
                }
        };
        return launch(c10d::OpType::ALLGATHER, dev, o.asyncOp, op, outs[0]);
    }

    c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                   const c10d::AllgatherOptions& o) override {
        int dev = check(ins);
        Op op{sign("all_gather_into_coalesced", ins[0], int(ins.size())), {}, {}, outs};
        Tensors xs, ys;
        for (size_t i = 0; i < ins.size(); i++) {
            xs.push_back(seen(outs[i]));
            ys.push_back(seen(ins[i]));
            op.spans.push_back(span(ins[i], false));
            op.spans.push_back(span(outs[i], true));
            op.keep.push_back(ins[i]);
        }
        op.run = [this, xs, ys] {
            Quiet q;
            for (size_t i = 0; i < xs.size(); i++) gather_all(xs[i], ys[i].clone());
        };
        return launch(c10d::OpType::COALESCED, dev, o.asyncOp, op, outs);
    }

    void scatter_sum(Tensor out, Tensor in, const c10d::ReduceOp& op) {
        auto all = in.clone();
        reduce_all(all, op);
        out.copy_(all.view({-1}).narrow(0, getRank() * out.numel(), out.numel()).view(out.sizes()));
    }

    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                        const c10d::ReduceScatterOptions& o) override {
        int dev = check({out, in});
        TORCH_CHECK(in.numel() == out.numel() * getSize(), "the input must hold the output once for every rank");
        auto x = seen(out), y = seen(in);
        auto op = o.reduceOp;
        return launch(c10d::OpType::_REDUCE_SCATTER_BASE, dev, o.asyncOp,
                      {sign("reduce_scatter_tensor", in, int(op.op_)),
                       [this, x, y, op] {
                           Quiet q;
                           scatter_sum(x, y, op);
                       },
                       {span(in, false), span(out, true)},
                       {out, in}},
                      {out});
    }

    c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                                  const c10d::ReduceScatterOptions& o) override {
        int dev = check(outs);
        Op op{sign("reduce_scatter", outs[0], int(o.reduceOp.op_)), {}, {span(outs[0], true)}, outs};
        auto x = seen(outs[0]);
        Tensors ys;
        for (auto& t : ins[0]) {
            ys.push_back(seen(t));
            op.spans.push_back(span(t, false));
            op.keep.push_back(t);
        }
        auto r = o.reduceOp;
        op.run = [this, x, ys, r] {
            Quiet q;
            for (int i = 0; i < getSize(); i++) {
                auto y = ys[i].clone();
                reduce_all(y, r);
                if (i == getRank()) x.copy_(y.view(x.sizes()));
            }
        };
        return launch(c10d::OpType::REDUCE_SCATTER, dev, o.asyncOp, op, outs);
    }

    c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                   const c10d::ReduceScatterOptions& o) override {
        int dev = check(outs);
        Op op{sign("reduce_scatter_coalesced", ins[0], int(ins.size())), {}, {}, outs};
        Tensors xs, ys;
        for (size_t i = 0; i < ins.size(); i++) {
            xs.push_back(seen(outs[i]));
            ys.push_back(seen(ins[i]));
            op.spans.push_back(span(ins[i], false));
            op.spans.push_back(span(outs[i], true));
            op.keep.push_back(ins[i]);
        }
        auto r = o.reduceOp;
        op.run = [this, xs, ys, r] {
            Quiet q;
            for (size_t i = 0; i < xs.size(); i++) scatter_sum(xs[i], ys[i], r);
        };
        return launch(c10d::OpType::COALESCED, dev, o.asyncOp, op, outs);
    }

    c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os,
                                                 std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
        int dev = check({out, in});
        auto x = seen(out), y = seen(in);
        auto oo = os, ii = is;
        return launch(c10d::OpType::ALLTOALL_BASE, dev, o.asyncOp,
                      {std::string("all_to_all ") + c10::toString(in.scalar_type()),
                       [this, x, y, oo, ii]() mutable {
                           Quiet q;
                           auto z = y.clone(), w = at::empty_like(x);
                           c10d::AllToAllOptions none;
                           inner->alltoall_base(w, z, oo, ii, none)->wait();
                           x.copy_(w);
                       },
                       {span(in, false), span(out, true)},
                       {out, in}},
                      {out});
    }

    c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
        int dev = check(outs);
        Op op{"all_to_all list", {}, {}, outs};
        Tensors xs, ys;
        for (auto& t : outs) {
            xs.push_back(seen(t));
            op.spans.push_back(span(t, true));
        }
        for (auto& t : ins) {
            ys.push_back(seen(t));
            op.spans.push_back(span(t, false));
            op.keep.push_back(t);
        }
        op.run = [this, xs, ys] {
            Quiet q;
            std::vector<int64_t> os, is;
            Tensors flat;
            int64_t n = 0;
            for (auto& x : xs) {
                os.push_back(x.numel());
                n += x.numel();
            }
            for (auto& y : ys) {
                is.push_back(y.numel());
                flat.push_back(y.contiguous().view({-1}));
            }
            auto a = at::empty({n}, xs[0].options()), b = at::cat(flat);
            c10d::AllToAllOptions none;
            inner->alltoall_base(a, b, os, is, none)->wait();
            int64_t at_ = 0;
            for (auto& x : xs) {
                x.copy_(a.narrow(0, at_, x.numel()).view(x.sizes()));
                at_ += x.numel();
            }
        };
        return launch(c10d::OpType::ALLTOALL, dev, o.asyncOp, op, outs);
    }

    c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& outs, Tensors& ins,
                                          const c10d::GatherOptions& o) override {
        int dev = check(ins);
        Op op{sign("gather", ins[0], int(o.rootRank)), {}, {span(ins[0], false)}, ins};
        Tensors xs;
        if (!outs.empty())
            for (auto& t : outs[0]) {
                xs.push_back(seen(t));
                op.spans.push_back(span(t, true));
                op.keep.push_back(t);
            }
        auto y = seen(ins[0]);
        op.run = [this, xs, y] {
            Quiet q;
            auto all = at::empty({getSize(), y.numel()}, y.options());
            gather_all(all.view({-1}), y.clone());
            for (size_t i = 0; i < xs.size(); i++) xs[i].copy_(all[int64_t(i)].view(xs[i].sizes()));
        };
        return launch(c10d::OpType::GATHER, dev, o.asyncOp, op, ins);
    }

    c10::intrusive_ptr<c10d::Work> scatter(Tensors& outs, std::vector<Tensors>& ins,
                                           const c10d::ScatterOptions& o) override {
        int dev = check(outs);
        Op op{sign("scatter", outs[0], int(o.rootRank)), {}, {span(outs[0], true)}, outs};
        Tensors ys;
        if (!ins.empty())
            for (auto& t : ins[0]) {
                ys.push_back(seen(t));
                op.spans.push_back(span(t, false));
                op.keep.push_back(t);
            }
        auto x = seen(outs[0]);
        auto root = o.rootRank;
        op.run = [this, x, ys, root] {
            Quiet q;
            for (int i = 0; i < getSize(); i++) {
                c10d::BroadcastOptions b;
                b.rootRank = root;
                Tensors v{ys.empty() ? at::empty(x.sizes(), x.options()) : ys[i].clone()};
                inner->broadcast(v, b)->wait();
                if (i == getRank()) x.copy_(v[0]);
            }
        };
        return launch(c10d::OpType::SCATTER, dev, o.asyncOp, op, outs);
    }

    // point to point: alone on a stream of the pair, or together (start/endCoalescing) on the group's stream
    void startCoalescing() override {
        coalescing = true;
        batch_p2p.clear();
        batch_keep.clear();
        batch_spans.clear();
    }

    c10::intrusive_ptr<c10d::Work> endCoalescing() override {
        coalescing = false;
        if (batch_p2p.empty()) return c10::make_intrusive<SimWork>(c10d::OpType::COALESCED, getRank());
        auto all = batch_p2p;
        int dev = batch_keep[0].device().index();
        return launch(c10d::OpType::COALESCED, dev, true,
                      {"send and recv batch",
                       [all] {
                           Quiet q;
                           std::vector<c10::intrusive_ptr<c10d::Work>> works;
                           for (auto& start : all) works.push_back(start());
                           for (auto& w : works) w->wait();
                       },
                       batch_spans, batch_keep},
                      batch_keep, nullptr, false);
    }

    c10::intrusive_ptr<c10d::Work> point(Tensors& ts, int peer, int tag, bool sends) {
        int dev = check(ts);
        auto t = ts[0];
        auto x = seen(t);
        auto start = [this, x, peer, tag, sends] {
            Tensors v{x};
            return sends ? inner->send(v, peer, tag) : inner->recv(v, peer, tag);
        };
        if (coalescing) {
            batch_p2p.push_back(start);
            batch_keep.push_back(t);
            batch_spans.push_back(span(t, !sends));
            return c10::make_intrusive<SimWork>(sends ? c10d::OpType::SEND : c10d::OpType::RECV, getRank());
        }
        auto& s = p2p[peer];
        if (!s) s = sim::stream(dev, sim::from_pool(high));
        return launch(sends ? c10d::OpType::SEND : c10d::OpType::RECV, dev, true,
                      {sends ? "send" : "recv",
                       [start] {
                           Quiet q;
                           start()->wait();
                       },
                       {span(t, !sends)},
                       {t}},
                      {t}, s, false);
    }

    c10::intrusive_ptr<c10d::Work> send(Tensors& ts, int dst, int tag) override { return point(ts, dst, tag, true); }

    c10::intrusive_ptr<c10d::Work> recv(Tensors& ts, int src, int tag) override { return point(ts, src, tag, false); }

    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
        int dev = sim::device_now();
        auto work = launch(c10d::OpType::BARRIER, dev, true,
                           {"barrier",
                            [this] {
                                c10d::BarrierOptions b;
                                inner->barrier(b)->wait();
                            },
                            {},
                            {}},
                           {});
        static_cast<SimWork*>(work.get())->host_blocking = true;
        return work;
    }
};
}  // namespace

namespace c10d {
struct SimTimer : Timer {
    explicit SimTimer(c10::Device) {}

    std::optional<int64_t> measureDifference(Event a, Event b) override { return getTimeRef(b) - getTimeRef(a); }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimTimer)
}  // namespace c10d

PYBIND11_MODULE(_dsx_simnccl, m) {
    m.def("create",
          [](const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size, bool high)
              -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<SimNccl>(inner, rank, size, high); });
}
