// The group: which stream an operation runs on, the order of a communicator, agreement of the ranks, send and recv.
#include "group.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

using at::Tensor;

namespace sim {

static const char* kInnerGroup = "carries nccl's bytes";  // the name of gloo's group, which no program has made

// ---------------------------------------------------------------- work
void GroupWork::synchronize() {
    CallSite site;
    block(end.get(), current(dev_));
    stash.clear();
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
    CallSite site;
    synchronize();
    if (host_blocking || timeout != kNoTimeout) {
        host_sync(host_blocking ? "barrier" : "Work.wait with a timeout");
        sim::synchronize(end.get());
    }
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
    c10::Device device(c10::kCUDA, c10::DeviceIndex(dev_));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{device});
    auto* before = exchange(stream_);
    future->markCompleted(c10::IValue(outputs));  // records an event on the current stream, as ProcessGroupNCCL does
    exchange(before);
    return future;
}

// ---------------------------------------------------------------- the group
static int next_group() {
    static std::atomic<int> made{0};
    return made++;
}

SimNccl::SimNccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, bool high_priority,
                 std::vector<int64_t> ranks)
    : Backend(rank, size), inner_(std::move(inner)), options_(c10::make_intrusive<Options>("nccl")),
      high_(high_priority), ranks_(std::move(ranks)), number_(next_group()) {
    inner_->setGroupUid(kInnerGroup);
    if (!ranks_.empty()) return;
    for (int64_t i = 0; i < size; i++) ranks_.push_back(i);
}

// Makes a gloo backend (store, rank, size); set from Python, which knows how to.
py::object& make_inner() {
    static py::object* factory = new py::object();  // lives longer than Python
    return *factory;
}

c10::intrusive_ptr<c10d::Backend> SimNccl::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks, const c10::intrusive_ptr<Options>&) {
    splits_++;
    auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return nullptr;
    int rank = int(mine - ranks.begin()), size = int(ranks.size());
    py::gil_scoped_acquire lock;
    auto inner = make_inner()(store, rank, size).cast<c10::intrusive_ptr<c10d::Backend>>();
    std::vector<int64_t> global;
    for (int member : ranks) global.push_back(ranks_.at(size_t(member)));
    return c10::make_intrusive<SimNccl>(inner, rank, size, high_, std::move(global));
}

void SimNccl::shutdown() {
    if (own_) sim::synchronize(own_);
    inner_->shutdown();
}

int SimNccl::check(const Tensors& ts) {
    TORCH_CHECK(!ts.empty(), "nccl: no tensors were given");
    for (auto& t : ts) {
        TORCH_CHECK(t.is_cuda(), "nccl takes CUDA tensors only, got one on ", t.device());
        TORCH_CHECK(t.is_non_overlapping_and_dense(), "nccl takes dense tensors only");
        TORCH_CHECK(t.device() == ts[0].device(), "nccl takes tensors of one device, got ", t.device(), " and ",
                    ts[0].device());
    }
    return ts[0].device().index();
}

std::string SimNccl::sign(const char* name, const Tensor& t, int64_t extra) {
    std::string text = std::string(name) + " of " + std::to_string(t.numel()) + " " + c10::toString(t.scalar_type());
    return extra ? text + " (" + std::to_string(extra) + ")" : text;
}

// What every rank's operation of this number has in common; a difference would hang or mix bytes up on a GPU.
void SimNccl::agree(const std::string& name, const Place& place) {
    if (getSize() == 1) return;
    constexpr int64_t kLength = 160;
    auto mine = at::zeros({kLength}, at::kChar), all = at::empty({getSize() * kLength}, at::kChar);
    memcpy(mine.data_ptr(), name.data(), std::min<size_t>(name.size(), kLength - 1));
    inner_->_allgather_base(all, mine)->wait();
    for (int i = 0; i < getSize(); i++) {
        const char* other = (const char*)all.data_ptr() + i * kLength;
        if (!strcmp(other, (const char*)mine.data_ptr())) continue;
        Report r;
        r.kind = "collectives in different order";
        r.text = "rank " + std::to_string(getRank()) + " of the group runs '" + name + "', while rank " +
                 std::to_string(i) + " runs '" + other + "'";
        r.place = place;
        std::string text = r.text;
        report(std::move(r));
        throw std::runtime_error("the ranks run different collectives: " + text);
    }
}

// NCCL's switch, which it reads once: collectives of all communicators of a device begin in the order of their launch.
static bool in_order_of_launch() {
    static const bool on = [] {
        const char* value = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
        return value && atoi(value) != 0;
    }();
    return on;
}

// With the option one_collective a device has room for one operation of all communicators at a time.
struct Room {
    std::mutex m;
    std::condition_variable changed;
    uint64_t launched = 0, over = 0;
    bool taken = false;

    static Room& of(int dev) {
        static std::mutex rooms_m;
        static std::map<int, Room> rooms;
        std::lock_guard<std::mutex> g(rooms_m);
        return rooms[dev];
    }

    uint64_t launch() {
        std::lock_guard<std::mutex> g(m);
        return launched++;
    }

    void use(uint64_t number, const std::function<void()>& run) {
        {
            std::unique_lock<std::mutex> g(m);
            changed.wait(g, [&] { return !taken && (!in_order_of_launch() || over == number); });
            taken = true;
        }
        struct Leave {
            Room& room;

            ~Leave() {
                std::lock_guard<std::mutex> g(room.m);
                room.taken = false;
                room.over++;
                room.changed.notify_all();
            }
        } leave{*this};
        run();
    }
};

// The operation as it runs on the device: alone, if the option says so.
static std::function<void()> alone(int dev, std::function<void()> run) {
    if (!options().one_collective) return run;
    Room& room = Room::of(dev);
    return [&room, number = room.launch(), run = std::move(run)] { room.use(number, run); };
}

// Runs a collective when it is its turn: those of a communicator run in the order of their launch.
void SimNccl::in_turn(uint64_t ticket, const std::string& name, const Place& place, const std::function<void()>& run) {
    {
        std::unique_lock<std::mutex> g(turn_m_);
        turn_changed_.wait(g, [&] { return turn_ == ticket; });
    }
    std::string failed;
    try {
        run();
    } catch (const std::exception& e) {
        failed = e.what();
        broken_ = true;
    }
    {
        std::lock_guard<std::mutex> g(turn_m_);
        turn_++;
    }
    turn_changed_.notify_all();
    if (failed.empty()) return;
    failed = failed.substr(0, failed.find("\nException raised from"));
    bool lost = false;
    for (const char* sign : {"onnection", "imed out", "roken pipe", "eset by peer"})
        lost |= failed.find(sign) != std::string::npos;
    if (!lost) throw std::runtime_error(failed);
    Report r;
    r.kind = "rank lost";
    r.text = "'" + name + "' on rank " + std::to_string(getRank()) +
             " of the group failed: another rank has ended or died, or does not answer (" + failed.substr(0, 200) + ")";
    r.place = place;
    failed = r.text;
    report(std::move(r));
    throw std::runtime_error(failed);
}

static std::vector<Shape> shapes(const Tensors& ts) {
    std::vector<Shape> found;
    for (auto& t : ts) found.push_back({t.sizes().vec(), c10::toString(t.scalar_type())});
    return found;
}

// The call's name in ProcessGroupNCCL's records.
std::string SimNccl::recorded_name(const Operation& op) const {
    static const std::map<std::string, std::string> nccls = {{"all_gather_into_tensor", "_all_gather_base"},
                                                             {"reduce_scatter_tensor", "_reduce_scatter_base"},
                                                             {"all_reduce_coalesced", "allreduce_coalesced"},
                                                             {"batch", "coalesced"},
                                                             {"barrier", "all_reduce_barrier"}};
    auto name = op.name.substr(0, op.name.find(' '));
    auto known = nccls.find(name);
    if (known != nccls.end()) name = known->second;
    const bool sends = op.type == c10d::OpType::SEND, receives = op.type == c10d::OpType::RECV;
    if (sends || receives)
        name += " " + std::to_string(getRank()) + (sends ? "->" : "<-") + op.name.substr(op.name.rfind(' ') + 1);
    return "nccl:" + name;
}

std::shared_ptr<Flight> SimNccl::recorded(const Operation& op, bool collective) {
    Flight f;
    f.name = recorded_name(op);
    f.group_name = getGroupUid();
    f.group_about = getGroupDesc();
    f.group = number_;
    f.number = collective ? sequence_ : ++messages_;
    f.message = !collective;
    const Place& place = CallSite::here();
    f.stack = place.stack ? place.stack : place.forward;  // where a backward was written stands nowhere
    f.inputs = shapes(op.inputs.empty() ? op.outputs : op.inputs);
    f.outputs = shapes(op.outputs);
    return flight_launched(std::move(f), ranks_);
}

// The work goes to the group's own stream (asynchronous) or to the current one (synchronous: torch >= 2.8).
WorkPtr SimNccl::launch(int dev, bool async, Operation op, Stream* given, bool collective) {
    CallSite site;
    c10::DeviceGuard guard(c10::Device(c10::kCUDA, c10::DeviceIndex(dev)));
    Stream* now = current(dev);
    Stream* s = given ? given : now;
    if (async && !given) {
        if (!own_) {
            own_ = stream(dev, id_from_pool(high_));
            if (own_->name.empty()) own_->name = "nccl " + getGroupUid();
        }
        s = own_;
    }
    if (s != now) {
        Event e;
        record(&e, now);
        block(&e, s);
    }
    auto work = c10::make_intrusive<GroupWork>(op.type, getRank(), dev, s);
    thread_name();  // the first time it asks Python, which must not be with the lock
    std::lock_guard<std::mutex> order(launch_m_);
    sequence_ += collective;
    auto flown = [this, flight = recorded(op, collective), run = std::move(op.run)](auto before) {
        flight_started(*flight);
        before();
        run();
        if (!broken_) flight_completed(*flight);
    };
    if (collective) {
        uint64_t ticket = tickets_++;
        auto agreed = [this, name = op.name, place = CallSite::here(), flown = std::move(flown)] {
            flown([&] { agree(name, place); });
        };
        op.run = [this, ticket, name = op.name, place = CallSite::here(), run = alone(dev, agreed)] {
            in_turn(ticket, name, place, run);
        };
    } else {
        op.run = alone(dev, [flown = std::move(flown)] { flown([] {}); });
    }
    {
        std::lock_guard<std::recursive_mutex> ordered(order_lock());
        s->push(op.name, std::move(op.run), op.spans);
        bool looked_at = options().one_collective && !in_order_of_launch() && collective && getSize() > 1;
        if (looked_at) order_on_device(s, this);
    }
    record(work->end.get(), s);
    if (async) work->stash = std::move(op.keep);
    work->outputs = std::move(op.outputs);
    if (coalescing_) coalesced_.push_back(work);
    return work;
}

// ---------------------------------------------------------------- point to point
// Alone: on a stream of the pair. Between startCoalescing and endCoalescing: together, on the group's stream.
void SimNccl::startCoalescing() {
    coalescing_ = true;
    batch_.clear();
    batch_keep_.clear();
    batch_spans_.clear();
    coalesced_.clear();
}

WorkPtr SimNccl::endCoalescing() {
    coalescing_ = false;
    if (batch_.empty() && !coalesced_.empty()) {  // they run one behind the other on one stream
        auto last = coalesced_.back();
        for (auto& work : coalesced_) {
            if (work == last) continue;
            last->stash.insert(last->stash.end(), work->stash.begin(), work->stash.end());
            last->outputs.insert(last->outputs.end(), work->outputs.begin(), work->outputs.end());
        }
        coalesced_.clear();
        return last;
    }
    if (batch_.empty())
        return c10::make_intrusive<GroupWork>(c10d::OpType::COALESCED, getRank(), device_now(), current(device_now()));
    auto run = [all = batch_] {
        Below below;
        std::vector<WorkPtr> works;
        for (auto& start : all) works.push_back(start());
        for (auto& w : works) w->wait();
    };
    int dev = batch_keep_[0].device().index();
    return launch(dev, true,
                  {c10d::OpType::COALESCED, "batch of send and recv", run, batch_spans_, batch_keep_, batch_keep_},
                  nullptr, false);
}

WorkPtr SimNccl::point(Tensors& ts, int peer, int tag, bool sends) {
    CallSite site;
    int dev = check(ts);
    auto type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
    auto start = [this, x = seen(ts[0]), peer, tag, sends] {
        Tensors v{x};
        return sends ? inner_->send(v, peer, tag) : inner_->recv(v, peer, tag);
    };
    if (coalescing_) {
        batch_.push_back(start);
        batch_keep_.push_back(ts[0]);
        batch_spans_.push_back(span_of(ts[0], !sends));
        return c10::make_intrusive<GroupWork>(type, getRank(), dev, current(dev));
    }
    auto& s = p2p_[peer];
    if (!s) {
        s = stream(dev, id_from_pool(high_));
        if (s->name.empty()) s->name = "nccl " + getGroupUid() + " with rank " + std::to_string(peer);
    }
    std::string name = (sends ? "send to " : "recv from ") + std::to_string(peer);
    auto run = [start] {
        Below below;
        start()->wait();
    };
    return launch(dev, true, {type, name, run, {span_of(ts[0], !sends)}, {ts[0]}, {ts[0]}}, s, false);
}

WorkPtr SimNccl::barrier(const c10d::BarrierOptions&) {
    auto run = [this] {
        c10d::BarrierOptions plain;
        inner_->barrier(plain)->wait();
    };
    auto work = launch(device_now(), true, {c10d::OpType::BARRIER, "barrier", run, {}, {}, {}});
    static_cast<GroupWork*>(work.get())->host_blocking = true;
    return work;
}

}  // namespace sim

namespace c10d {
struct SimTimer : Timer {  // DDP's reducer asks for one of the device
    explicit SimTimer(c10::Device) {}

    std::optional<int64_t> measureDifference(Event a, Event b) override { return getTimeRef(b) - getTimeRef(a); }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimTimer)
}  // namespace c10d

PYBIND11_MODULE(_dsx_simnccl, m) {
    using sim::SimNccl;
    py::module_::import("torch._C._distributed_c10d");  // the base class is known there
    m.attr("INNER_GROUP") = sim::kInnerGroup;
    m.def("set_factory", [](py::object factory) { sim::make_inner() = std::move(factory); });
    py::class_<SimNccl, c10d::Backend, c10::intrusive_ptr<SimNccl>>(m, "SimNccl")
        .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size, bool high,
                         std::vector<int64_t> ranks) {
            return c10::make_intrusive<SimNccl>(inner, rank, size, high, std::move(ranks));
        }))
        .def_property_readonly("options", &SimNccl::getBackendOptions)
        .def("comm_split_count", &SimNccl::splits)
        .def("_set_default_timeout", &SimNccl::setTimeout)
        .def("perform_nocolor_split", [](SimNccl&, const py::object&) {});
}
