// Reports of mistakes and counts of the host's waits, kept until Python asks for them as JSON.
#include <cstdio>
#include <tuple>

#include "core.h"

namespace sim {

namespace {
constexpr size_t kMost = 20000;
std::mutex m;
std::vector<Report> all;
std::map<std::tuple<std::string, int, std::string>, uint64_t> syncs;  // by what waited, the Python stack and the thread
std::atomic<uint64_t> sync_count{0};
std::atomic<size_t> reported{0}, delivered{0};
void (*listener)() = nullptr;

std::string place_json(const Place& p) {
    return "{\"stack\":" + std::to_string(p.stack) + ",\"forward\":" + std::to_string(p.forward) +
           ",\"backward\":" + json_text(p.backward) + "}";
}
}  // namespace

std::string json_text(const std::string& s) {
    std::string out = "\"";
    for (unsigned char c : s) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += char(c);
        } else if (c < 0x20) {
            char code[8];
            snprintf(code, sizeof code, "\\u%04x", c);
            out += code;
        } else out += char(c);
    }
    return out + "\"";
}

std::string launch_json(const LaunchPtr& l) {
    if (!l) return "null";
    static const char* kinds[] = {"work", "record", "wait", "new memory", "free"};
    return "{\"id\":" + std::to_string(l->id) + ",\"stream\":" + std::to_string(l->stream) +
           ",\"tick\":" + std::to_string(l->tick) + ",\"kind\":\"" + kinds[int(l->kind)] +
           "\",\"name\":" + json_text(l->name) + ",\"place\":" + place_json(l->place) +
           ",\"other_stream\":" + std::to_string(l->other_stream) + ",\"other_tick\":" + std::to_string(l->other_tick) +
           "}";
}

void report(Report r) {
    std::lock_guard<std::mutex> g(m);
    if (all.size() < kMost) all.push_back(std::move(r));
    reported++;
}

void report(const char* kind, const std::string& text) {
    Report r;
    r.kind = kind;
    r.text = text;
    r.place = CallSite::here();
    report(std::move(r));
}

void listen(void (*fn)()) { listener = fn; }

void deliver() {
    size_t seen = delivered;
    if (!listener || seen == reported) return;
    if (!delivered.compare_exchange_strong(seen, reported)) return;  // another thread does it
    listener();
}

size_t report_count() { return reported; }

std::string reports_json(size_t from) {
    std::lock_guard<std::mutex> g(m);
    std::string out = "[";
    for (size_t i = from; i < all.size(); i++) {
        const Report& r = all[i];
        out += (i > from ? ",{" : "{");
        out += "\"kind\":" + json_text(r.kind) + ",\"text\":" + json_text(r.text);
        out += ",\"later\":" + launch_json(r.later) + ",\"earlier\":" + launch_json(r.earlier);
        out += ",\"address\":" + std::to_string(r.address) + ",\"block\":" + std::to_string(r.block);
        out += ",\"block_bytes\":" + std::to_string(r.block_bytes) + ",\"device\":" + std::to_string(r.device);
        out += std::string(",\"wrong_device\":") + (r.wrong_device ? "true" : "false");
        out += ",\"place\":" + place_json(r.place) + "}";
    }
    return out + "]";
}

void host_sync(const char* why) {
    sync_count++;
    auto thread = thread_name();  // takes Python's lock, so that this file's must not be held
    std::lock_guard<std::mutex> g(m);
    syncs[{why, CallSite::here().stack, thread}]++;
}

uint64_t host_syncs() { return sync_count; }

std::string host_syncs_json() {
    std::lock_guard<std::mutex> g(m);
    std::string out = "[";
    for (auto& [key, times] : syncs) {
        if (out.size() > 1) out += ",";
        auto& [why, stack, thread] = key;
        out += "[" + json_text(why) + "," + std::to_string(stack) + "," + json_text(thread) + "," +
               std::to_string(times) + "]";
    }
    return out + "]";
}

}  // namespace sim
