// What Python calls through ctypes. Texts are JSON, and live until the thread's next call.
#include <chrono>

#include "core.h"

namespace {
const char* kept(std::string text) {
    static thread_local std::string last;
    last = std::move(text);
    return last.c_str();
}

std::string stats_json(int dev) {
    auto s = sim::stats(dev);
    std::string out = "{";
    const char* pools[] = {"all", "small_pool", "large_pool"};
    for (auto& [what, three] : s.counts)
        for (int i = 0; i < sim::kPools; i++) {
            std::string key = "\"" + what + "." + pools[i] + ".";
            const sim::Count& c = three[i];
            out += key + "current\":" + std::to_string(c.current) + "," + key + "peak\":" + std::to_string(c.peak) +
                   "," + key + "allocated\":" + std::to_string(c.allocated) + "," + key +
                   "freed\":" + std::to_string(c.freed) + ",";
        }
    out += "\"num_alloc_retries\":" + std::to_string(s.retries) + ",\"num_ooms\":" + std::to_string(s.ooms);
    out += ",\"num_device_alloc\":" + std::to_string(s.segments_made);
    out += ",\"num_device_free\":" + std::to_string(s.segments_freed);
    return out + ",\"total\":" + std::to_string(s.total) + "}";
}
}  // namespace

extern "C" {
int sim_option(const char* name, double value) { return sim::set_option(name, value) ? 0 : 1; }

void sim_listen(void (*fn)()) { sim::listen(fn); }

void sim_deliver() { sim::deliver(); }

void sim_stop_stacks() { sim::stop_stacks(); }

const char* sim_reports(size_t from) { return kept(sim::reports_json(from)); }

size_t sim_report_count() { return sim::report_count(); }

const char* sim_host_syncs() { return kept(sim::host_syncs_json()); }

size_t sim_host_sync_count() { return sim::host_syncs(); }

const char* sim_flights() { return kept(sim::flights_json()); }

size_t sim_launches() { return sim::launches(); }

size_t sim_intervals() { return sim::intervals_kept(); }

const char* sim_unraised_error() { return kept(sim::unraised_error()); }

void sim_report(const char* kind, const char* text) {
    sim::CallSite site;
    sim::report(kind, text);
}

const char* sim_streams() {  // [{number, device, id, name, made_at}, ...]
    std::string out = "[";
    for (auto* s : sim::streams()) {
        if (out.size() > 1) out += ",";
        out += "{\"number\":" + std::to_string(s->number) + ",\"device\":" + std::to_string(s->dev) +
               ",\"id\":" + std::to_string(s->id) + ",\"made_at\":" + std::to_string(s->made_at) +
               ",\"name\":" + sim::json_text(s->name) + "}";
    }
    return kept(out + "]");
}

void sim_name_stream(int dev, int id, const char* name) { sim::stream(dev, id)->name = name; }

const char* sim_history() {
    std::string out = "[";
    for (auto& l : sim::history()) {
        if (out.size() > 1) out += ",";
        out += sim::launch_json(l);
    }
    return kept(out + "]");
}

// ---------------------------------------------------------------- torch.cuda
int sim_devices() { return sim::options().devices; }

int sim_get_device() { return sim::device_now(); }

int sim_set_device(int d) { return sim::set_device(d); }

int sim_current_stream(int dev) { return sim::current(dev)->id; }

const char* sim_synchronize(int dev) {  // the error of a job, or an empty text
    std::string failed;
    {
        sim::CallSite site;  // at its end reports are delivered, for which Python calls this library
        sim::host_sync("torch.cuda.synchronize");
        try {
            sim::synchronize_device(dev);
        } catch (const std::exception& e) { failed = e.what(); }
    }
    return kept(failed);
}

void sim_synchronize_all() {  // at the end of a program or a test; who waits next gets an error
    for (int i = 0; i < sim::options().devices; i++) sim::wait_for_device(i);
}

void sim_empty_cache(int dev) { sim::empty_cache(dev); }

void sim_reset_peak(int dev) { sim::reset_peak(dev); }

void sim_reset_accumulated(int dev) { sim::reset_accumulated(dev); }

void sim_set_limit(int dev, size_t n) { sim::set_limit(dev, n); }

const char* sim_stats(int dev) { return kept(stats_json(dev)); }

const char* sim_elapsed(void* a, void* b, double* milliseconds) {
    try {
        *milliseconds = sim::elapsed_ms((sim::Event*)a, (sim::Event*)b);
    } catch (const std::exception& e) { return kept(e.what()); }
    return kept("");
}

void sim_sleep(double seconds) {
    auto sleep = [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
    sim::current(sim::device_now())->push("sleep", sleep);
}

void sim_pin(void* p, size_t n) { sim::pinned_register(p, n); }

void sim_unpin(void* p) { sim::pinned_unregister(p); }

void sim_host_access(void* p, size_t n, int write, const char* by) {
    auto at = uintptr_t(p);
    sim::check_host_access(at, at + n, write != 0, by, false);
}

void sim_fault_handler() { sim::install_fault_handler(); }
}
