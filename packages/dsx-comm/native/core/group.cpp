// A group: what it stands on, what a call says of itself, and the agreement on it.
#include <algorithm>
#include <cstring>

#include "dsx_comm/group.h"

namespace dsx {
namespace {

const char* call_name(int32_t call) {
    static const char* const names[] = {"nothing", "all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                        "reduce",  "gather",     "scatter",    "all_to_all",     "barrier"};
    return call >= 0 && call <= static_cast<int32_t>(Call::barrier) ? names[call] : "?";
}
const char* reduce_name(int32_t r) {
    static const char* const names[] = {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"};
    return r >= 0 && r < 8 ? names[r] : "?";
}

bool alike(const Descriptor& a, const Descriptor& b) {
    return a.call == b.call && a.dtype == b.dtype && a.reduce == b.reduce && a.root == b.root && a.bytes == b.bytes &&
           a.shape == b.shape;
}

std::string say(const Descriptor& d) {
    std::string text = call_name(d.call);
    if (d.call == static_cast<int32_t>(Call::barrier)) return text;
    text += " of " + std::to_string(d.bytes) + " bytes";
    if (d.dtype >= 0) text += std::string(" ") + dtype_name(d.dtype);
    if (d.reduce >= 0) text += std::string(" ") + reduce_name(d.reduce);
    if (d.root >= 0) text += " root " + std::to_string(d.root);
    if (d.shape != 0) text += " (part sizes hash " + std::to_string(d.shape & 0xffff) + ")";
    return text;
}

}  // namespace

const char* dtype_name(int64_t code) {
    static const char* const names[] = {
        "float32", "float64",   "bfloat16",   "float16",           "int8", "uint8", "int16", "int32", "int64",
        "bool",    "complex64", "complex128", "a dtype of its own"};
    return names[std::min<int64_t>(code, sizeof names / sizeof *names - 1)];
}

Group::Group(void* memory, Settings settings)
    : base_(static_cast<char*>(memory)), set_(std::move(settings)), k_(kernels()), stores_(k_, set_.stores) {
    auto* g = group();
    layout_.size = g->size;
    layout_.in_bytes = static_cast<size_t>(g->in_bytes);
    layout_.slice_bytes = static_cast<size_t>(g->slice_bytes);
    layout_.mailbox_bytes = static_cast<size_t>(g->mailbox_bytes);
    set_.one_shot = std::min<int64_t>(set_.one_shot, g->in_bytes);
}

void Group::format(void* memory, const Layout& layout, uint64_t nonce0, uint64_t nonce1) {
    auto* g = static_cast<GroupHeader*>(memory);
    g->size = layout.size;
    g->in_bytes = static_cast<int64_t>(layout.in_bytes);
    g->slice_bytes = static_cast<int64_t>(layout.slice_bytes);
    g->mailbox_bytes = static_cast<int64_t>(layout.mailbox_bytes);
    g->total = static_cast<int64_t>(layout.total());
    g->nonce[0] = nonce0;
    g->nonce[1] = nonce1;
    g->magic = MAGIC;
}

Group::CallContext Group::begin(const char* what, double timeout) {
    check_poison();
    calls_++;
    CallContext context{what,
                        Clock::now() + std::chrono::microseconds(static_cast<int64_t>(std::min(timeout, 1e9) * 1e6)),
                        timeout,
                        {}};
    check_leases(context);
    return context;
}

Descriptor Group::descriptor(Call call, int64_t bytes, int code) const {
    Descriptor d;
    d.call = static_cast<int32_t>(call);
    d.dtype = code;
    d.reduce = -1;
    d.bytes = bytes;
    d.sequence = calls_;
    return d;
}

void Group::describe(const Descriptor& mine) { header(rank())->calls[(step_ + 1) & 1] = mine; }

bool Group::agree(const Descriptor& mine) const {
    bool same_memory = true;
    for (int r = 0; r < size(); r++) {
        if (r == rank()) continue;
        const Descriptor& theirs = header(r)->calls[step_ & 1];
        if (!alike(mine, theirs)) disagree(mine);
        same_memory = same_memory && mine.memory == theirs.memory;
    }
    return same_memory;
}

void Group::disagree(const Descriptor& mine) const {
    std::string text = "ranks call different collectives (call #" + std::to_string(calls_) + " of the group): ";
    for (int r = 0; r < size(); r++)
        text += (r ? "; rank " : "rank ") + name(r) + ": " + say(r == rank() ? mine : header(r)->calls[step_ & 1]);
    throw Mismatch(text + ". No data was exchanged.");
}

bool Group::open(const CallContext& context, const Descriptor& mine) {
    describe(mine);
    post();
    await(context);
    return agree(mine);
}

std::vector<const char*> Group::peers(const Symmetric& where) const {
    std::vector<const char*> found(static_cast<size_t>(size()));
    for (int r = 0; r < size(); r++)
        found[static_cast<size_t>(r)] =
            where.bases[static_cast<size_t>(r)] + (r == rank() ? where.offset : header(r)->calls[step_ & 1].offset);
    return found;
}

void Group::barrier(double timeout) {
    auto context = begin("barrier", timeout);
    open(context, descriptor(Call::barrier, 0));
}

}  // namespace dsx
