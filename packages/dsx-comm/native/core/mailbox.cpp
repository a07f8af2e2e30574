#include "dsx_comm/mailbox.h"

#include <algorithm>

#include "dsx_comm/chunks.h"

namespace dsx {

Mailboxes::Mailboxes(Group& group)
    : group_(group), sends_(static_cast<size_t>(group.size())), incoming_(static_cast<size_t>(group.size())) {}

TransferPtr Mailboxes::send(int peer, const void* data, int64_t bytes, int64_t tag, int64_t code, Leases leases) {
    group_.check_poison();
    auto t = std::make_shared<Transfer>();
    *t = {true, peer, tag, static_cast<char*>(const_cast<void*>(data)), bytes, code, std::move(leases)};
    std::lock_guard<std::mutex> hold(lock_);
    sends_[static_cast<size_t>(peer)].push_back(t);
    progress();
    changed_.notify_all();
    return t;
}

TransferPtr Mailboxes::receive(int peer, void* data, int64_t bytes, int64_t tag, int64_t code, Leases leases) {
    group_.check_poison();
    auto t = std::make_shared<Transfer>();
    *t = {false, peer, tag, static_cast<char*>(data), bytes, code, std::move(leases)};
    std::lock_guard<std::mutex> hold(lock_);
    for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
        if (it->tag != tag || (peer >= 0 && it->from != peer)) continue;
        auto& incoming = incoming_[static_cast<size_t>(it->from)];
        const bool arriving = incoming.unexpected == &*it;  // then the rest goes straight to its place
        const auto total = static_cast<int64_t>(it->data.size());
        Incoming whole{true, t, nullptr, total, tag, it->code, arriving ? incoming.got : total};
        t->peer = it->from;
        match(it->from, whole);
        if (!whole.unwanted) put(t->data, it->data.data(), static_cast<size_t>(whole.got));
        unexpected_.erase(it);
        if (arriving) {
            incoming = whole;
            progress();
        } else {
            finish_receive(whole);
        }
        return t;
    }
    receives_.push_back(t);
    progress();
    changed_.notify_all();
    return t;
}

bool Mailboxes::push(int peer) {
    auto& queue = sends_[static_cast<size_t>(peer)];
    Mailbox* b = box(group_.rank(), peer);
    bool moved = false;
    while (!queue.empty()) {
        auto& t = *queue.front();
        if (!usable(t)) {
            queue.pop_front();
            break;
        }
        uint64_t head = b->head.load(std::memory_order_relaxed);
        if (head - b->tail.load(std::memory_order_acquire) >= 2) break;
        const int64_t n = std::min<int64_t>(t.bytes - t.moved, static_cast<int64_t>(group_.layout().mailbox_bytes));
        put(slot(group_.rank(), peer, head), t.data + t.moved, static_cast<size_t>(n));
        b->slots[head & 1] = {t.tag, t.bytes, n, t.code};
        b->head.store(head + 1, std::memory_order_release);
        Group::ring(group_.doorbell(peer));
        moved = true;
        t.moved += n;
        if (t.moved >= t.bytes) {
            t.done = completed_ = true;
            queue.pop_front();
        }
    }
    return moved;
}

bool Mailboxes::start(int peer, Incoming& incoming, const Mailbox::Slot& piece) {
    bool asked = false;
    for (auto it = receives_.begin(); it != receives_.end(); ++it) {
        if ((*it)->peer >= 0 && (*it)->peer != peer) continue;
        asked = true;
        if ((*it)->tag != piece.tag) continue;
        incoming = {true, *it, nullptr, piece.total, piece.tag, piece.code};
        incoming.into->peer = peer;
        match(peer, incoming);
        receives_.erase(it);
        return true;
    }
    if (!asked) return false;
    unexpected_.push_back({peer, piece.tag, piece.code, std::vector<char>(static_cast<size_t>(piece.total)), false});
    incoming = {true, nullptr, &unexpected_.back(), piece.total, piece.tag, piece.code};
    return true;
}

// A message of another size or dtype is an error of the receive, and the caller's memory stays as it was.
void Mailboxes::match(int peer, Incoming& incoming) const {
    Transfer& t = *incoming.into;
    if (incoming.total == t.bytes && incoming.code == t.code) return;
    incoming.unwanted = true;
    const auto say = [](int64_t bytes, int64_t code) {
        return std::to_string(bytes) + " bytes of " + dtype_name(code);
    };
    t.error = "recv: rank " + group_.name(peer) + " sent " + say(incoming.total, incoming.code) + " with tag " +
              std::to_string(incoming.tag) + ", rank " + group_.name(group_.rank()) + " expects " +
              say(t.bytes, t.code);
}

bool Mailboxes::usable(Transfer& t) {
    if (t.leases.hold()) return true;
    t.error =
        std::string(t.sending ? "send to" : "recv from") + " rank " + group_.name(t.peer) +
        ": the memory of the tensor was freed or moved (its storage was resized) while the call used it; wait for the "
        "call first";
    t.failure = Failure::aborted;
    t.done = completed_ = true;
    group_.poison(Failure::aborted, "rank " + group_.name(group_.rank()) + ": " + t.error);
    return false;
}

bool Mailboxes::pull(int peer) {
    Mailbox* b = box(peer, group_.rank());
    auto& incoming = incoming_[static_cast<size_t>(peer)];
    bool moved = false;
    for (;;) {
        uint64_t tail = b->tail.load(std::memory_order_relaxed);
        if (tail == b->head.load(std::memory_order_acquire)) break;
        const Mailbox::Slot piece = b->slots[tail & 1];
        if (!incoming.active && !start(peer, incoming, piece)) break;
        if (!incoming.unwanted) {
            if (incoming.into && !usable(*incoming.into)) {
                incoming = {};
                break;
            }
            char* target = incoming.unexpected ? incoming.unexpected->data.data() : incoming.into->data;
            put(target + incoming.got, slot(peer, group_.rank(), tail), static_cast<size_t>(piece.bytes));
        }
        incoming.got += piece.bytes;
        b->tail.store(tail + 1, std::memory_order_release);
        Group::ring(group_.doorbell(peer));
        moved = true;
        if (incoming.got >= incoming.total) finish_receive(incoming);
    }
    return moved;
}

void Mailboxes::finish_receive(Incoming& incoming) {
    if (incoming.unexpected) incoming.unexpected->complete = true;
    else incoming.into->done = completed_ = true;
    incoming = {};
}

bool Mailboxes::progress() {
    bool moved = false;
    completed_ = false;
    for (int p = 0; p < group_.size(); p++) {
        if (p == group_.rank()) continue;
        if (!sends_[static_cast<size_t>(p)].empty()) moved |= push(p);
        if (!receives_.empty() || incoming_[static_cast<size_t>(p)].active) moved |= pull(p);
    }
    if (completed_) Group::ring(group_.doorbell(group_.rank()));  // another thread may wait for it
    return moved;
}

bool Mailboxes::idle() const {
    if (!receives_.empty()) return false;
    for (auto& queue : sends_)
        if (!queue.empty()) return false;
    for (auto& incoming : incoming_)
        if (incoming.active) return false;
    return true;
}

// A transfer whose peer has ended fails, unless what it needs lies in the box already (`progress` ran just before).
void Mailboxes::fail_transfers_of_dead_peers() {
    const auto lost = group_.lost();
    if (lost.empty()) return;
    std::lock_guard<std::mutex> hold(lock_);
    progress();
    auto fail = [&](Transfer& t, const std::string& who) {
        // the peer may have ended because another one did: all who are gone are named
        t.error = std::string(t.sending ? "send to" : "recv from") + " rank " + who +
                  ": its process has ended (ended by now: rank(s) " + group_.names(lost) + ")";
        t.failure = Failure::lost;
        t.done = true;
    };
    for (int p : lost) {
        for (auto& t : sends_[static_cast<size_t>(p)]) fail(*t, group_.name(p));
        sends_[static_cast<size_t>(p)].clear();
        auto& incoming = incoming_[static_cast<size_t>(p)];
        if (incoming.active && incoming.into) fail(*incoming.into, group_.name(p));
        if (incoming.active) incoming = {};
        receives_.remove_if([&](TransferPtr& t) {
            if (t->peer != p) return false;
            fail(*t, group_.name(p));
            return true;
        });
    }
    if (static_cast<int>(lost.size()) == group_.size() - 1)
        receives_.remove_if([&](TransferPtr& t) { return fail(*t, "any"), true; });
    Group::ring(group_.doorbell(group_.rank()));
}

void Mailboxes::throw_if_failed(const TransferPtr& t) const {
    if (t->error.empty()) return;
    if (t->failure == Failure::lost) throw PeerLost(t->error);
    if (t->failure == Failure::aborted) throw Aborted(t->error);
    throw Mismatch(t->error);
}

bool Mailboxes::finished(const TransferPtr& t) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!t->done) progress();
    if (t->done) throw_if_failed(t);
    return t->done;
}

void Mailboxes::wait(const TransferPtr& t, double timeout) {
    try {
        wait_for(t, timeout);
    } catch (...) {
        abandon(t);
        throw;
    }
}

// The caller gets its memory back. What had not begun is called off; a message half under way goes on from, or into,
// memory of its own, so that the two sides stay in step.
void Mailboxes::abandon(const TransferPtr& t) {
    std::lock_guard<std::mutex> hold(lock_);
    if (t->done) return;
    t->error = "given up: an earlier wait for it failed";
    if (!t->sending) {
        const auto before = receives_.size();
        receives_.remove(t);
        t->done = receives_.size() != before;
        if (t->done) return;
        t->own.resize(static_cast<size_t>(t->bytes));
        t->data = t->own.data();
        t->leases = {};
        return;
    }
    auto& queue = sends_[static_cast<size_t>(t->peer)];
    if (t->moved == 0 || !usable(*t)) {
        queue.erase(std::remove(queue.begin(), queue.end(), t), queue.end());
        t->done = true;
        return;
    }
    t->own.assign(t->data, t->data + t->bytes);
    t->data = t->own.data();
    t->leases = {};
}

void Mailboxes::wait_for(const TransferPtr& t, double timeout) {
    Flag& bell = group_.doorbell(group_.rank());
    const auto until =
        Group::Clock::now() + std::chrono::microseconds(static_cast<int64_t>(std::min(timeout, 1e9) * 1e6));
    struct Count {
        Mailboxes& m;
        explicit Count(Mailboxes& m_) : m(m_) {
            std::lock_guard<std::mutex> h(m.lock_);
            m.waiters_++;
        }
        ~Count() {
            {
                std::lock_guard<std::mutex> h(m.lock_);
                m.waiters_--;
            }
            m.changed_.notify_all();
        }
    } count(*this);
    for (;;) {
        const uint64_t rung = bell.value.load(std::memory_order_seq_cst);
        {
            std::lock_guard<std::mutex> hold(lock_);
            progress();
            if (t->done) return throw_if_failed(t);
        }
        if (group_.slice(bell, rung + 1)) continue;
        group_.check_poison();
        group_.look();
        fail_transfers_of_dead_peers();
        if (Group::Clock::now() >= until) {
            std::string who = t->peer < 0 ? "any rank" : "rank " + group_.name(t->peer);
            throw WaitTimeout(std::string(t->sending ? "send to " : "recv from ") + who + " (tag " +
                              std::to_string(t->tag) + ", " + std::to_string(t->bytes) +
                              " bytes): it did not come within " + std::to_string(timeout) + " s");
        }
    }
}

bool Mailboxes::wants_thread() {
    std::lock_guard<std::mutex> hold(lock_);
    if (thread_ || idle()) return false;
    return thread_ = true;
}

void Mailboxes::thread_is_missing() {
    std::lock_guard<std::mutex> hold(lock_);
    thread_ = false;
}

void Mailboxes::background() {
    Flag& bell = group_.doorbell(group_.rank());
    for (;;) {
        uint64_t rung;
        {
            std::unique_lock<std::mutex> hold(lock_);
            auto needed = [&] { return waiters_ == 0 && !idle(); };  // who waits moves things himself
            if (!needed()) {
                changed_.wait(hold, [&] { return stop_ || needed(); });
                // most transfers are waited for right after they were issued
                changed_.wait_for(hold, std::chrono::microseconds(200), [&] { return stop_ || waiters_ > 0; });
            }
            if (stop_ || group_.poisoned()) return;  // what is under way fails when it is waited for
            if (!needed()) continue;
            rung = bell.value.load(std::memory_order_seq_cst);
            if (progress()) continue;
        }
        if (!group_.slice(bell, rung + 1)) fail_transfers_of_dead_peers();
    }
}

void Mailboxes::stop() {
    {
        std::lock_guard<std::mutex> hold(lock_);
        stop_ = true;
    }
    changed_.notify_all();
    Group::ring(group_.doorbell(group_.rank()));
}

}  // namespace dsx
