// Copies: on a device, between devices, and between host and device, pinned or pageable.
//
// As CUDA has it: a copy from pinned memory reads it when it runs, a copy from pageable memory reads it at the call (it
// is staged), and a copy into pinned memory with non_blocking writes it when it runs. All others make the host wait.
#include <ATen/record_function.h>

#include <cstring>
#include <set>

#include "device.h"

using at::Tensor;

namespace sim {

namespace {

bool same_layout(const Tensor& a, const Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
           a.is_non_overlapping_and_dense();
}

std::function<void()> copy_job(Tensor to, Tensor from, size_t paced_bytes) {
    return [to, from, paced_bytes]() mutable {
        Below below;
        paced(paced_bytes);
        to.copy_(from);
    };
}

void copy_on_device(const Tensor& self, const Tensor& src) {
    int from = src.device().index(), to = self.device().index();
    Stream* s = current(from);
    if (from != to) {  // as torch does: the stream of the source, ordered before and behind the target's
        Event before;
        record(&before, current(to));
        block(&before, s);
    }
    s->push(from == to ? "copy" : "copy between devices", copy_job(seen(self), seen(src), 0),
            {span_of(src, false), span_of(self, true)});
    if (from != to) {
        Event after;
        record(&after, s);
        block(&after, current(to));
    }
}

void upload(const Tensor& self, const Tensor& src, bool non_blocking) {
    int dev = self.device().index();
    Stream* s = current(dev);
    size_t bytes = self.nbytes();
    const bool from_pinned = pinned(src.const_data_ptr());
    if (from_pinned && same_layout(self, src)) {
        uint64_t job = s->push("copy host to device", copy_job(seen(self), seen(src), bytes),
                               {span_of(src, false), span_of(self, true)});
        pinned_use(src.const_data_ptr(), bytes, s, job, false);
    } else {
        Below below;
        auto staged = src.scalar_type() == self.scalar_type() ? src.clone() : src.to(self.scalar_type());
        s->push("copy staged to device", copy_job(seen(self), staged, bytes), {span_of(self, true)});
        non_blocking = non_blocking && !from_pinned;  // torch makes a temporary, and waits for its copy
    }
    if (!non_blocking) wait_for_current("copy host to device", dev);
}

void download(Tensor& self, const Tensor& src, bool non_blocking) {
    int dev = src.device().index();
    if (!same_layout(self, src)) {  // as torch does: a device tensor of the wanted kind first
        const bool dense = self.is_non_overlapping_and_dense();
        Tensor same = at::empty_strided(self.sizes(), dense ? self.strides() : self.contiguous().strides(),
                                        src.options().dtype(self.scalar_type()));
        same.copy_(src);
        if (dense) return download(self, same, non_blocking);
        Tensor host = at::empty_strided(same.sizes(), same.strides(), self.options());
        download(host, same, false);
        Below below;
        self.copy_(host);
        return;
    }
    Stream* s = current(dev);
    size_t bytes = self.nbytes();
    const bool to_pinned = pinned(self.const_data_ptr());
    std::vector<Span> spans{span_of(src, false)};
    if (to_pinned) spans.push_back(span_of(self, true));
    auto target = seen(self);
    const bool late = to_pinned && non_blocking;
    // Who reads too early reads NaN, except where an earlier copy still uses these bytes: it may read them, and is in
    // order.
    if (late && options().poison && !pinned_in_flight(self.const_data_ptr(), bytes)) {
        memset(target.data_ptr(), 0xFF, bytes);
    }
    uint64_t job = s->push("copy device to host", copy_job(target, seen(src), bytes), spans);
    if (late) pinned_use(self.const_data_ptr(), bytes, s, job, true);
    else wait_for_current("copy device to host", dev);
}

// ---------------------------------------------------------------- operators on registered memory
// These do not touch the values of their arguments.
const std::set<std::string> kOnlyLook = {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like",
                                         "aten::new_empty",  "aten::new_zeros",  "aten::is_pinned", "aten::pin_memory",
                                         "aten::copy_",      "aten::_to_copy",   "aten::to",        "aten::cuda"};

std::unique_ptr<at::ObserverContext> check_operator(const at::RecordFunction& f) {
    if (!any_registered_in_flight()) return nullptr;
    auto schema = f.operator_schema();
    if (!schema) return nullptr;
    auto inputs = f.inputs();
    bool with_device = false;
    for (auto& v : inputs) with_device |= v.isTensor() && on_device(v.toTensor());
    // A copy with the device is a use of its own, which the copy itself notes.
    if (with_device || kOnlyLook.count(schema->name())) return nullptr;
    for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
        if (!inputs[i].isTensor()) continue;
        const Tensor& t = inputs[i].toTensor();
        const auto* given = schema->arguments()[i].alias_info();
        if (!t.defined() || !t.device().is_cpu() || !t.has_storage() || (given && !given->isWrite())) continue;
        Span span = span_of(t, given != nullptr);
        check_host_access(span.lo, span.hi, span.write, schema->name(), true);
    }
    return nullptr;
}

}  // namespace

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
    if (self.numel() == 0) return self;
    CallSite site;
    Tensor src = given.expand(self.sizes());
    const bool to_device = on_device(self);
    c10::DeviceGuard guard((to_device && !on_device(src)) ? self.device() : src.device());
    if (to_device && on_device(src)) copy_on_device(self, src);
    else if (to_device) upload(self, src, non_blocking);
    else download(self, src, non_blocking);
    return self;
}

void watch_registered_memory() {
    static bool once = [] {
        at::addGlobalCallback(
            at::RecordFunctionCallback(&check_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
        return true;
    }();
    (void)once;
}

}  // namespace sim
