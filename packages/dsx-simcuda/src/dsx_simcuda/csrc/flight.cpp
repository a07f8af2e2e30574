// The flight recorder: the last collectives and messages of every group, with what torch's own recorder keeps of them.
//
// torch compiles its recorder for NCCL into CUDA builds only. This one is read by flight.py, which gives it torch's
// form. A call that failed (the ranks differ, a rank is gone) has not completed: on a GPU it would wait for ever.
#include <chrono>
#include <cstdlib>

#include "core.h"

namespace sim {

namespace {
struct Status {
    int64_t launched = -1, started = -1, completed = -1;
};

struct Members {
    std::string about;
    std::vector<int64_t> ranks;
};

std::mutex m;
std::deque<std::shared_ptr<Flight>> calls;
std::map<int, Status> status;
std::map<std::string, Members> groups;
uint64_t recorded = 0;

size_t most() {  // torch's variable; 0 records nothing
    static const size_t found = [] {
        const char* text = getenv("TORCH_FR_BUFFER_SIZE");
        return text ? size_t(std::max(0, atoi(text))) : size_t(2000);
    }();
    return found;
}

int64_t nanoseconds() {
    auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

std::string list(const std::vector<int64_t>& numbers) {
    std::string out = "[";
    for (auto number : numbers) out += (out.size() > 1 ? "," : "") + std::to_string(number);
    return out + "]";
}

std::string shapes_json(const std::vector<Shape>& shapes) {
    std::string sizes = "[", types = "[";
    for (auto& shape : shapes) {
        sizes += (sizes.size() > 1 ? "," : "") + list(shape.sizes);
        types += (types.size() > 1 ? "," : "") + json_text(shape.type);
    }
    return "{\"sizes\":" + sizes + "],\"types\":" + types + "]}";
}

std::string flight_json(const Flight& f) {
    auto number = [](const char* key, int64_t value) {
        return std::string(",\"") + key + "\":" + std::to_string(value);
    };
    return "{\"name\":" + json_text(f.name) + ",\"group_name\":" + json_text(f.group_name) +
           ",\"group_about\":" + json_text(f.group_about) + ",\"thread\":" + json_text(f.thread) +
           ",\"inputs\":" + shapes_json(f.inputs) + ",\"outputs\":" + shapes_json(f.outputs) + number("id", f.id) +
           number("group", f.group) + number("number", f.number) + number("message", f.message) +
           number("stack", f.stack) + number("launched", f.launched) + number("started", f.started) +
           number("completed", f.completed) + "}";
}
}  // namespace

std::shared_ptr<Flight> flight_launched(Flight f, const std::vector<int64_t>& ranks) {
    f.launched = nanoseconds();
    f.thread = thread_name();
    auto kept = std::make_shared<Flight>(std::move(f));
    if (!most()) return kept;
    std::lock_guard<std::mutex> g(m);
    kept->id = recorded++;
    groups[kept->group_name] = {kept->group_about, ranks};
    if (!kept->message) status[kept->group].launched = int64_t(kept->number);
    calls.push_back(kept);
    if (calls.size() > most()) calls.pop_front();
    return kept;
}

void flight_started(Flight& f) {
    std::lock_guard<std::mutex> g(m);
    f.started = nanoseconds();
    if (!f.message && most()) status[f.group].started = int64_t(f.number);
}

void flight_completed(Flight& f) {
    std::lock_guard<std::mutex> g(m);
    f.completed = nanoseconds();
    if (!f.message && most()) status[f.group].completed = int64_t(f.number);
}

std::string flights_json() {
    std::lock_guard<std::mutex> g(m);
    std::string entries, states, members;
    for (auto& call : calls) entries += (entries.empty() ? "" : ",") + flight_json(*call);
    for (auto& [group, s] : status)
        states += (states.empty() ? "\"" : ",\"") + std::to_string(group) +
                  "\":" + list({s.launched, s.started, s.completed});
    for (auto& [name, of] : groups)
        members += (members.empty() ? "" : ",") + json_text(name) + ":{\"about\":" + json_text(of.about) +
                   ",\"ranks\":" + list(of.ranks) + "}";
    return "{\"calls\":[" + entries + "],\"status\":{" + states + "},\"groups\":{" + members + "}}";
}

}  // namespace sim
