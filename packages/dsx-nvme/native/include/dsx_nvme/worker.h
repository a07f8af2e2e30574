// One thread with one backend: claims blocks from the engine, keeps the backend full, looks at every result.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "dsx_nvme/backend.h"
#include "dsx_nvme/engine.h"

namespace dsx_nvme {

class Worker {
  public:
    explicit Worker(Engine& engine);  // starts the thread; throws what making the backend threw
    ~Worker();                        // joins; the engine has said stop
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    void poke();  // under the engine's lock: ends the wait in the kernel, if there is one

  private:
    void run(std::atomic<int>& started);
    bool gather();
    void issue();
    void complete(const Completion& completion);
    bool needs_resubmit(Chunk& chunk, int64_t result);
    void fall_back_to_buffered(Chunk& chunk);
    void retire(Chunk& chunk);
    bool wind_up(int error);
    void make_bounces();
    void update_tables(const std::vector<Region>& buffers, const std::vector<Region>& files);
    int slot_of(const Chunk& chunk) const;

    Engine& engine_;
    int wake_ = -1;
    unsigned depth_ = 1;
    std::unique_ptr<Backend> backend_;
    std::vector<Chunk> chunks_;
    std::vector<Chunk*> free_, ready_, finished_;
    std::vector<Completion> done_;
    unsigned in_flight_ = 0;
    // Bounce buffers: one mapping, made when the first block needs it.
    char* bounce_ = nullptr;
    size_t bounce_bytes_ = 0;
    int bounce_slot_ = -1;
    unsigned bounce_count_;
    std::vector<int> bounce_free_;
    // What this ring knows of the engine's tables.
    uint64_t version_ = 0;
    std::vector<Region> buffers_, files_;
    bool listening_ = false;  // under the engine's lock
    std::thread thread_;
};

}  // namespace dsx_nvme
