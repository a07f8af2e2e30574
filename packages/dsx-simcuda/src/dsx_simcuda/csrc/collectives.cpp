// The collectives: each makes tensors over the bytes that workers see, and runs them over gloo when its turn comes.
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "group.h"

using at::Tensor;

namespace sim {

namespace {

// `tensors` as workers see them; their bytes are added to the operation's.
Tensors take(Operation& op, const Tensors& tensors, bool write) {
    Tensors found;
    for (auto& t : tensors) {
        found.push_back(seen(t));
        op.spans.push_back(span_of(t, write));
        op.keep.push_back(t);
        if (!write) op.inputs.push_back(t);
    }
    return found;
}

std::string op_name(const c10d::ReduceOp& op) {
    static const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"};
    return names[int(op.op_)];
}

std::string sign_reduce(const char* name, const Tensor& t, const c10d::ReduceOp& op) {
    return std::string(name) + " of " + std::to_string(t.numel()) + " " + c10::toString(t.scalar_type()) + " by " +
           op_name(op);
}

const c10d::NCCLPreMulSumSupplement* premul(const c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::PREMUL_SUM) return nullptr;
    return reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
}

// The factor of a premultiplied sum may be a device tensor, which the collective reads.
void take_factor(Operation& op, const c10d::ReduceOp& reduce) {
    const auto* p = premul(reduce);
    if (!p || !p->tensor_factor.defined()) return;
    take(op, {p->tensor_factor}, false);
    op.inputs.clear();
}

}  // namespace

// ---------------------------------------------------------------- on the workers
// gloo lacks some types and operations: it reduces in a wider type where it must.
void SimNccl::reduce_all(Tensor t, const c10d::ReduceOp& op) {
    Below below;
    auto type = t.scalar_type();
    const bool narrow = type == at::kBFloat16 || type == at::kHalf || type == at::kBool;
    Tensor x = narrow ? t.to(type == at::kBool ? at::kInt : at::kFloat) : t.contiguous();
    c10d::AllreduceOptions plain;
    plain.reduceOp = op;
    if (const auto* p = premul(op)) {
        plain.reduceOp = c10d::ReduceOp::SUM;
        if (p->tensor_factor.defined()) x.mul_(seen(p->tensor_factor).to(x.scalar_type()));
        else x.mul_(p->double_factor);
    }
    if (op == c10d::ReduceOp::AVG) plain.reduceOp = c10d::ReduceOp::SUM;
    Tensors v{x};
    inner_->allreduce(v, plain)->wait();
    if (op == c10d::ReduceOp::AVG) x.div_(getSize());
    if (!x.is_same(t)) t.copy_(x);
}

void SimNccl::gather_all(Tensor out, Tensor in) {
    Below below;
    auto to = out.view({-1}).view(at::kByte), from = in.contiguous().view({-1}).view(at::kByte);
    inner_->_allgather_base(to, from)->wait();
}

void SimNccl::scatter_sum(Tensor out, Tensor in, const c10d::ReduceOp& op) {
    Below below;
    auto all = in.clone().view({-1});
    reduce_all(all, op);
    out.copy_(all.narrow(0, getRank() * out.numel(), out.numel()).view(out.sizes()));
}

// ---------------------------------------------------------------- reductions
WorkPtr SimNccl::allreduce(Tensors& ts, const c10d::AllreduceOptions& o) {
    int dev = check(ts);
    Operation op{c10d::OpType::ALLREDUCE, sign_reduce("all_reduce", ts[0], o.reduceOp), {}, {}, {}, ts};
    take_factor(op, o.reduceOp);
    op.run = [this, x = take(op, ts, true)[0], r = o.reduceOp] { reduce_all(x, r); };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) {
    int dev = check(ts);
    Operation op{c10d::OpType::COALESCED, sign("all_reduce_coalesced", ts[0], int64_t(ts.size())), {}, {}, {}, ts};
    take_factor(op, o.reduceOp);
    op.run = [this, xs = take(op, ts, true), r = o.reduceOp] {
        for (auto& x : xs) reduce_all(x, r);
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::reduce(Tensors& ts, const c10d::ReduceOptions& o) {
    int dev = check(ts);
    const bool mine = int(o.rootRank) == getRank();
    auto name = sign_reduce("reduce", ts[0], o.reduceOp) + " to rank " + std::to_string(o.rootRank);
    Operation op{c10d::OpType::REDUCE, name, {}, {}, {}, ts};
    take_factor(op, o.reduceOp);
    op.run = [this, x = take(op, ts, mine)[0], r = o.reduceOp, mine] {
        Below below;
        auto y = x.clone();
        reduce_all(y, r);
        if (mine) x.copy_(y);
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::_reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) {
    int dev = check({out, in});
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "reduce_scatter_tensor: the input has ", in.numel(),
                " elements, expected the output's ", out.numel(), " for each of ", getSize(), " ranks");
    Operation op{
        c10d::OpType::_REDUCE_SCATTER_BASE, sign_reduce("reduce_scatter_tensor", in, o.reduceOp), {}, {}, {}, {out}};
    take_factor(op, o.reduceOp);
    auto y = take(op, {in}, false)[0], x = take(op, {out}, true)[0];
    op.run = [this, x, y, r = o.reduceOp] { scatter_sum(x, y, r); };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) {
    int dev = check(outs);
    Operation op{c10d::OpType::REDUCE_SCATTER, sign_reduce("reduce_scatter", outs[0], o.reduceOp), {}, {}, {}, outs};
    take_factor(op, o.reduceOp);
    auto ys = take(op, ins.at(0), false);
    auto x = take(op, outs, true)[0];
    op.run = [this, x, ys, r = o.reduceOp] {
        Below below;
        for (int i = 0; i < getSize(); i++) {
            auto y = ys.at(size_t(i)).clone();
            reduce_all(y, r);
            if (i == getRank()) x.copy_(y.view(x.sizes()));
        }
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) {
    int dev = check(outs);
    auto name = sign("reduce_scatter_tensor_coalesced", ins[0], int64_t(ins.size()));
    Operation op{c10d::OpType::COALESCED, name, {}, {}, {}, outs};
    take_factor(op, o.reduceOp);
    auto ys = take(op, ins, false), xs = take(op, outs, true);
    op.run = [this, xs, ys, r = o.reduceOp] {
        for (size_t i = 0; i < xs.size(); i++) scatter_sum(xs[i], ys[i], r);
    };
    return launch(dev, o.asyncOp, std::move(op));
}

// ---------------------------------------------------------------- broadcasts, gathers, scatters
WorkPtr SimNccl::broadcast(Tensors& ts, const c10d::BroadcastOptions& o) {
    int dev = check(ts);
    auto name = sign("broadcast", ts[0]) + " from rank " + std::to_string(o.rootRank);
    Operation op{c10d::OpType::BROADCAST, name, {}, {}, {}, ts};
    op.run = [this, x = take(op, ts, int(o.rootRank) != getRank())[0], root = o.rootRank] {
        Below below;
        c10d::BroadcastOptions plain;
        plain.rootRank = root;
        Tensors v{x};
        inner_->broadcast(v, plain)->wait();
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::_allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) {
    int dev = check({out, in});
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "all_gather_into_tensor: the output has ", out.numel(),
                " elements, expected the input's ", in.numel(), " for each of ", getSize(), " ranks");
    Operation op{c10d::OpType::_ALLGATHER_BASE, sign("all_gather_into_tensor", in), {}, {}, {}, {out}};
    auto y = take(op, {in}, false)[0], x = take(op, {out}, true)[0];
    op.run = [this, x, y] {
        Below below;
        gather_all(x, y.clone());
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) {
    int dev = check(ins);
    check(outs.at(0));
    // Uneven sizes are allowed (NCCL broadcasts then), so that the name holds no size.
    Operation op{c10d::OpType::ALLGATHER,
                 std::string("all_gather of ") + c10::toString(ins[0].scalar_type()),
                 {},
                 {},
                 {},
                 outs[0]};
    auto y = take(op, ins, false)[0];
    auto xs = take(op, outs[0], true);
    op.run = [this, xs, y] {
        Below below;
        for (size_t i = 0; i < xs.size(); i++) {
            c10d::BroadcastOptions plain;
            plain.rootRank = int64_t(i);
            Tensors v{int(i) == getRank() ? y.clone() : xs[i]};
            inner_->broadcast(v, plain)->wait();
            if (int(i) == getRank()) xs[i].copy_(v[0].view(xs[i].sizes()));
        }
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) {
    int dev = check(ins);
    auto name = sign("all_gather_into_tensor_coalesced", ins[0], int64_t(ins.size()));
    Operation op{c10d::OpType::COALESCED, name, {}, {}, {}, outs};
    auto ys = take(op, ins, false), xs = take(op, outs, true);
    op.run = [this, xs, ys] {
        Below below;
        for (size_t i = 0; i < xs.size(); i++) gather_all(xs[i], ys[i].clone());
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) {
    int dev = check(ins);
    auto name = sign("gather", ins[0]) + " to rank " + std::to_string(o.rootRank);
    Operation op{c10d::OpType::GATHER, name, {}, {}, {}, outs.empty() ? ins : outs[0]};
    auto y = take(op, ins, false)[0];
    auto xs = outs.empty() ? Tensors{} : take(op, outs[0], true);
    op.run = [this, xs, y] {
        Below below;
        auto all = at::empty({getSize(), y.numel()}, y.options());
        gather_all(all, y.clone());
        for (size_t i = 0; i < xs.size(); i++) xs[i].copy_(all[int64_t(i)].view(xs[i].sizes()));
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) {
    int dev = check(outs);
    auto name = sign("scatter", outs[0]) + " from rank " + std::to_string(o.rootRank);
    Operation op{c10d::OpType::SCATTER, name, {}, {}, {}, outs};
    auto ys = ins.empty() ? Tensors{} : take(op, ins[0], false);
    auto x = take(op, outs, true)[0];
    op.run = [this, x, ys, root = o.rootRank] {
        Below below;
        for (int i = 0; i < getSize(); i++) {
            c10d::BroadcastOptions plain;
            plain.rootRank = root;
            Tensors v{ys.empty() ? at::empty(x.sizes(), x.options()) : ys.at(size_t(i)).clone()};
            inner_->broadcast(v, plain)->wait();
            if (i == getRank()) x.copy_(v[0].view(x.sizes()));
        }
    };
    return launch(dev, o.asyncOp, std::move(op));
}

// ---------------------------------------------------------------- all to all
WorkPtr SimNccl::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                               const c10d::AllToAllOptions& o) {
    int dev = check({out, in});
    Operation op{c10d::OpType::ALLTOALL_BASE,
                 std::string("all_to_all of ") + c10::toString(in.scalar_type()),
                 {},
                 {},
                 {},
                 {out}};
    auto y = take(op, {in}, false)[0], x = take(op, {out}, true)[0];
    op.run = [this, x, y, to = out_sizes, from = in_sizes]() mutable {
        Below below;
        auto sent = y.clone(), got = at::empty_like(x);
        c10d::AllToAllOptions plain;
        inner_->alltoall_base(got, sent, to, from, plain)->wait();
        x.copy_(got);
    };
    return launch(dev, o.asyncOp, std::move(op));
}

WorkPtr SimNccl::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) {
    int dev = check(outs);
    check(ins);
    Operation op{
        c10d::OpType::ALLTOALL, std::string("all_to_all of ") + c10::toString(ins[0].scalar_type()), {}, {}, {}, outs};
    auto ys = take(op, ins, false), xs = take(op, outs, true);
    op.run = [this, xs, ys] {
        Below below;
        std::vector<int64_t> to, from;
        Tensors flat;
        int64_t total = 0;
        for (auto& x : xs) {
            to.push_back(x.numel());
            total += x.numel();
        }
        for (auto& y : ys) {
            from.push_back(y.numel());
            flat.push_back(y.contiguous().view({-1}));
        }
        auto got = at::empty({total}, xs[0].options()), sent = at::cat(flat);
        c10d::AllToAllOptions plain;
        auto sizes = to;  // gloo takes its lists away
        inner_->alltoall_base(got, sent, sizes, from, plain)->wait();
        auto parts = got.split_with_sizes(to);
        for (size_t i = 0; i < xs.size(); i++) xs[i].copy_(parts[i].view(xs[i].sizes()));
    };
    return launch(dev, o.asyncOp, std::move(op));
}

}  // namespace sim
