// What a worker needs of the kernel's three ways to do I/O. Made, used and destroyed by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dsx_nvme/engine.h"

namespace dsx_nvme {

struct Completion {
    Chunk* chunk;
    int64_t result;  // bytes, or a negative errno
};

class Backend {
  public:
    virtual ~Backend() = default;
    virtual unsigned depth() const = 0;  // submissions it can hold
    // Queue what is left of a chunk. There is room: at most depth() are with the backend.
    virtual void prepare(Chunk& chunk) = 0;
    // Hand what is queued to the kernel; wait until `least` completions are in `done` (those of earlier calls count)
    // or a wake-up is there. `least` 0 only submits.
    virtual void submit(unsigned least, std::vector<Completion>& done) = 0;
    // After a failure: gives back what was never submitted (-ECANCELED) and waits at most `seconds` for what the
    // kernel holds. Does not throw. Chunks that are not in `done` afterwards are still with the kernel.
    virtual void drain(double seconds, std::vector<Completion>& done) = 0;
    // Returns the errno of a refusal, 0 otherwise. `nbytes` 0 or fd -1 empties the slot.
    virtual int set_buffer(unsigned slot, char* memory, uint64_t nbytes) = 0;
    virtual int set_file(unsigned slot, int fd) = 0;
};

// Each throws std::system_error. `wake` is an eventfd that ends a wait when it becomes readable.
std::unique_ptr<Backend> make_uring(unsigned depth, int wake);
std::unique_ptr<Backend> make_libaio(unsigned depth, int wake);
std::unique_ptr<Backend> make_sync();

}  // namespace dsx_nvme
