// Sends and receives between two ranks: a ring of two slots per direction, messages matched by tag in order of issue.
//
// Nothing here blocks another: `progress` moves whatever can be moved, in all directions, so two ranks may send to each
// other first and receive later. A message for which no receive is posted stays in its slots, unless it stands before
// one that is asked for: then it is copied to private memory, as an unexpected message.
#pragma once
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dsx_comm/group.h"

namespace dsx {

struct Transfer {
    bool sending;
    int peer;  // -1: from anyone
    int64_t tag;
    char* data;
    int64_t bytes;
    int64_t code;     // what the bytes are (segment.h)
    Leases leases{};  // of the caller's memory
    int64_t moved = 0;
    bool done = false;
    std::string error{};                  // of a finished transfer
    Failure failure = Failure::mismatch;  // of what kind it is
    std::vector<char> own{};              // takes the place of the caller's memory once no caller waits any more
};
using TransferPtr = std::shared_ptr<Transfer>;

class Mailboxes {
  public:
    explicit Mailboxes(Group& group);
    TransferPtr send(int peer, const void* data, int64_t bytes, int64_t tag, int64_t code, Leases leases);
    TransferPtr receive(int peer, void* data, int64_t bytes, int64_t tag, int64_t code, Leases leases);
    bool finished(const TransferPtr& transfer);  // moves what can be moved; throws what failed
    void wait(const TransferPtr& transfer,
              double timeout);  // a transfer whose wait has failed never touches its data again
    void background();          // body of the thread that serves asynchronous transfers
    bool wants_thread();        // once true when something is under way: start the thread
    void thread_is_missing();   // it could not be started: the next call tries again
    void stop();

  private:
    struct UnexpectedMessage {
        int from;
        int64_t tag;
        int64_t code;
        std::vector<char> data;
        bool complete = false;
    };
    // A message that arrives. `unwanted`: it is not what the receive expects; it is taken out of the box and dropped.
    struct Incoming {
        bool active = false;
        TransferPtr into;
        UnexpectedMessage* unexpected = nullptr;
        int64_t total = 0, tag = 0, code = 0, got = 0;
        bool unwanted = false;
    };

    Mailbox* box(int src, int dst) const {
        return reinterpret_cast<Mailbox*>(group_.at(group_.layout().mailbox(src, dst)));
    }
    char* slot(int src, int dst, uint64_t n) const {
        return reinterpret_cast<char*>(box(src, dst)) + sizeof(Mailbox) + (n & 1) * group_.layout().mailbox_bytes;
    }
    bool progress();  // under lock_; true: something moved
    bool push(int peer);
    bool pull(int peer);
    bool start(int peer, Incoming& incoming, const Mailbox::Slot& piece);
    void finish_receive(Incoming& incoming);
    void match(int peer, Incoming& incoming) const;  // is the message what the receive expects?
    bool usable(Transfer& transfer);                 // false: its memory is gone, it has failed, and the group with it
    bool idle() const;
    void fail_transfers_of_dead_peers();
    void throw_if_failed(const TransferPtr& transfer) const;
    void wait_for(const TransferPtr& transfer, double timeout);
    void abandon(const TransferPtr& transfer);

    Group& group_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::vector<std::deque<TransferPtr>> sends_;
    std::list<TransferPtr> receives_;
    std::vector<Incoming> incoming_;
    std::list<UnexpectedMessage> unexpected_;
    int waiters_ = 0;
    bool thread_ = false, stop_ = false, completed_ = false;
};

}  // namespace dsx
