// Pinned host memory, and who touches it too early.
//
// Pinned blocks lie in one memory file that is mapped twice: the host uses the face, copies use the back. While a copy
// uses a block and the host has not waited for it, the pages of the face are protected: wholly if the copy writes them,
// against writing if it reads them. A touch is then a fault, which is reported with the Python line; after that the
// block is opened and the program goes on. Only pages all of whose used bytes belong to copies are protected, so that
// a neighbour on the same page is never stopped.
//
// Memory that a program registers (cudaHostRegister) has one mapping only, and is watched at torch's operators. Native
// code that touches host memory past torch can say so (check_host_access).
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core.h"

namespace sim {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kArena = size_t(1) << 36;  // of addresses; memory is used as it is touched

struct Use {
    uintptr_t lo, hi;
    bool device_writes;
    Stream* stream;
    uint64_t until;    // the stream's job
    LaunchPtr launch;  // with the tick that the host must have waited for
    bool told = false;
};

struct Block {
    size_t bytes = 0, asked = 0;
    bool registered = false, freed = false;
    std::vector<Use> uses;
    std::vector<char> closed;  // per page: 0 open, 1 no writing, 2 no access
};

std::mutex m;
std::map<uintptr_t, Block> blocks;  // by their begin
std::vector<uintptr_t> busy;        // blocks with uses that the host has not waited for
std::atomic<int> registered_uses{0};
char *face = nullptr, *back = nullptr;
size_t arena_used = 0;

void open_arena() {
    if (face) return;
    int fd = memfd_create("simcuda-pinned", 0);
    if (fd < 0 || ftruncate(fd, off_t(kArena))) throw std::runtime_error("simcuda: no memory file for pinned memory");
    auto map = [&] { return (char*)mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0); };
    face = map();
    back = map();
    if (face == MAP_FAILED || back == MAP_FAILED) throw std::runtime_error("simcuda: cannot map pinned memory");
}

std::map<uintptr_t, Block>::iterator block_at(uintptr_t p) {
    auto it = blocks.upper_bound(p);
    if (it == blocks.begin()) return blocks.end();
    --it;
    return p < it->first + it->second.bytes ? it : blocks.end();
}

bool waited_for(const Use& u) { return host_is_behind(u.launch->stream, u.launch->tick); }

// Sets the protection of the block's pages to what its uses ask for.
void protect(uintptr_t base, Block& b) {
    if (b.registered) return;
    std::vector<char> want(b.closed.size(), 0);
    for (auto& u : b.uses) {
        if (u.told) continue;
        size_t first = (u.lo - base + kPage - 1) / kPage, last = (u.hi - base) / kPage;
        if (u.hi - base >= b.asked) last = want.size();  // what is behind the last byte belongs to nobody
        for (size_t i = first; i < last; i++) want[i] = std::max<char>(want[i], u.device_writes ? 2 : 1);
    }
    for (size_t i = 0; i < want.size();) {
        size_t j = i + 1;
        if (want[i] != b.closed[i]) {
            while (j < want.size() && want[j] == want[i] && want[j] != b.closed[j]) j++;
            int rights = want[i] == 0 ? PROT_READ | PROT_WRITE : want[i] == 1 ? PROT_READ : PROT_NONE;
            mprotect((void*)(base + i * kPage), (j - i) * kPage, rights);
        }
        i = j;
    }
    b.closed = std::move(want);
}

void tell(const Use& u, uintptr_t address, const char* text, const Place& place) {
    Report r;
    r.kind = "host access too early";
    r.text = text;
    r.earlier = u.launch;
    r.address = address;
    r.place = place;
    report(std::move(r));
}
}  // namespace

void* pinned_allocate(size_t n) {
    if (!n) return nullptr;
    std::lock_guard<std::recursive_mutex> order(order_lock());
    std::lock_guard<std::mutex> g(m);
    open_arena();
    for (auto& [at, b] : blocks) {
        if (!b.freed || b.bytes < n || b.bytes > 2 * n + kPage) continue;
        bool idle = true;
        for (auto& u : b.uses) idle = idle && u.stream->finished(u.until);
        if (!idle) continue;  // as torch's allocator: a block is free when its events have happened
        b.uses.clear();
        b.asked = n;
        b.freed = false;
        protect(at, b);
        forget_accesses(at, at + b.bytes);
        return (void*)at;
    }
    size_t room = (n + kPage - 1) / kPage * kPage;
    if (arena_used + room > kArena) throw std::runtime_error("simcuda: out of pinned memory");
    char* p = face + arena_used;
    if (options().poison) memset(back + arena_used, 0xFF, room);
    arena_used += room;
    blocks[uintptr_t(p)] = {room, n, false, false, {}, std::vector<char>(room / kPage, 0)};
    return p;
}

void pinned_release(void* p) {
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(uintptr_t(p));
    if (it != blocks.end()) it->second.freed = true;
}

bool pinned(const void* p) {
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(uintptr_t(p));
    return it != blocks.end() && !it->second.freed;
}

void* pinned_alias(const void* p) {
    if (face && (char*)p >= face && (char*)p < face + kArena) return back + ((char*)p - face);
    return const_cast<void*>(p);
}

void pinned_register(void* p, size_t n) {
    std::lock_guard<std::mutex> g(m);
    blocks[uintptr_t(p)] = {n, n, true, false, {}, {}};
}

void pinned_unregister(void* p) {
    CallSite site;
    bool in_use = false;
    {
        std::lock_guard<std::mutex> g(m);
        auto it = block_at(uintptr_t(p));
        if (it == blocks.end()) return;
        for (auto& u : it->second.uses) {
            in_use |= !u.stream->finished(u.until);
            registered_uses--;
        }
        std::erase(busy, it->first);
        blocks.erase(it);
    }
    if (in_use) report("misuse", "host memory is unregistered while a copy uses it");
}

void pinned_use(const void* p, size_t n, Stream* s, uint64_t until, bool device_writes) {
    std::lock_guard<std::recursive_mutex> order(order_lock());
    auto launch = std::make_shared<Launch>();
    launch->stream = s->number;
    launch->tick = s->clock.empty() ? 0 : s->clock[size_t(s->number)];
    launch->name = device_writes ? "copy device to host" : "copy host to device";
    launch->place = CallSite::here();
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(uintptr_t(p));
    if (it == blocks.end()) return;
    Block& b = it->second;
    if (b.registered) registered_uses++;
    b.uses.push_back({uintptr_t(p), uintptr_t(p) + n, device_writes, s, until, launch});
    if (std::find(busy.begin(), busy.end(), it->first) == busy.end()) busy.push_back(it->first);
    protect(it->first, b);
}

bool pinned_in_flight(const void* p, size_t n) {
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(uintptr_t(p));
    if (it == blocks.end()) return false;
    const auto lo = uintptr_t(p), hi = lo + n;
    return std::any_of(it->second.uses.begin(), it->second.uses.end(),
                       [&](const Use& u) { return u.lo < hi && lo < u.hi && !u.stream->finished(u.until); });
}

void pinned_settle() {
    std::lock_guard<std::mutex> g(m);
    std::erase_if(busy, [](uintptr_t base) {
        auto it = blocks.find(base);
        if (it == blocks.end()) return true;
        Block& b = it->second;
        size_t before = b.uses.size();
        std::erase_if(b.uses, waited_for);
        if (b.registered) registered_uses -= int(before - b.uses.size());
        if (before != b.uses.size()) protect(base, b);
        return b.uses.empty();
    });
}

bool pinned_fault(uintptr_t address, bool write) {
    if (!face || (char*)address < face || (char*)address >= face + kArena) return false;
    CallSite site;
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(address);
    if (it == blocks.end()) return false;
    Block& b = it->second;
    for (auto& u : b.uses) {
        if (u.told || address + kPage <= u.lo || address >= u.hi || (!write && !u.device_writes)) continue;
        tell(u, address, write ? "the host writes" : "the host reads", CallSite::here());
        u.told = true;
    }
    for (size_t i = 0; i < b.closed.size(); i++) b.closed[i] = b.closed[i] ? 3 : 0;  // whatever it is: set it anew
    protect(it->first, b);
    size_t page = (address - it->first) / kPage;
    if (b.closed[page] > (write ? 0 : 1)) {  // no use explains it: open the page rather than fault for ever
        mprotect((void*)(it->first + page * kPage), kPage, PROT_READ | PROT_WRITE);
        b.closed[page] = 0;
    }
    return true;
}

bool any_registered_in_flight() { return registered_uses > 0; }

void check_host_access(uintptr_t lo, uintptr_t hi, bool write, const std::string& what, bool only_registered) {
    CallSite site;
    std::lock_guard<std::recursive_mutex> order(order_lock());
    std::lock_guard<std::mutex> g(m);
    auto it = block_at(lo);
    if (it == blocks.end() || (only_registered && !it->second.registered)) return;
    for (auto& u : it->second.uses) {
        if (u.told || u.hi <= lo || u.lo >= hi || (!write && !u.device_writes) || waited_for(u)) continue;
        u.told = true;
        std::string text = "the host's " + what + (write ? " writes" : " reads");
        tell(u, std::max(lo, u.lo), text.c_str(), CallSite::here());
    }
    protect(it->first, it->second);  // what is told may be touched, by a system call too
}

// ---------------------------------------------------------------- faults
static struct sigaction before;

static void on_fault(int signal, siginfo_t* info, void* context) {
    auto address = uintptr_t(info->si_addr);
    bool write = true;
#if defined(__x86_64__)
    write = (((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#endif
    if (pinned_fault(address, write)) return;
    if (int dev = device_of((void*)address); dev >= 0) {
        fprintf(stderr,
                "simcuda: host access to device memory: the host %s memory of cuda:%d; copy it to the host first"
                " (tensor.cpu())\n",
                write ? "writes" : "reads", dev);
        dump_python_stacks();
        sigaction(signal, &before, nullptr);  // the access happens again, and ends the process
        return;
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        sigaction(signal, &before, nullptr);
    }
}

void install_fault_handler() {
    struct sigaction now = {}, there = {};
    sigaction(SIGSEGV, nullptr, &there);
    if ((there.sa_flags & SA_SIGINFO) && there.sa_sigaction == &on_fault) return;
    before = there;
    now.sa_sigaction = &on_fault;
    now.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&now.sa_mask);
    sigaction(SIGSEGV, &now, nullptr);
}

void paced(size_t bytes) {
    double gbps = options().gbps;
    if (gbps > 0) std::this_thread::sleep_for(std::chrono::duration<double>(double(bytes) / (gbps * 1e9)));
}

}  // namespace sim
