// NCCL's semantics for the simulated device, over a gloo backend that carries the bytes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class GroupWork final : public c10d::Work {
  public:
    GroupWork(c10d::OpType op, int rank, int dev, Stream* s) : Work(rank, op), dev_(dev), stream_(s) {}

    bool isCompleted() override { return query(end.get()); }
    bool isSuccess() const override { return true; }
    std::exception_ptr exception() const override { return nullptr; }
    void synchronize() override;
    bool wait(std::chrono::milliseconds timeout) override;
    void blockCurrentStream() override { synchronize(); }
    Tensors result() override { return outputs; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

    std::shared_ptr<Event> end = std::make_shared<Event>();
    bool host_blocking = false;  // a barrier's wait holds the host too
    Tensors stash;               // the tensors of an asynchronous collective are kept until wait()
    Tensors outputs;

  private:
    int dev_;
    Stream* stream_;
};

struct Operation {  // a collective as it is put on a stream
    c10d::OpType type;
    std::string name;  // what every rank's operation of the same number must be called
    std::function<void()> run;
    std::vector<Span> spans;
    Tensors keep;
    Tensors outputs;
    Tensors inputs;  // where they are not the outputs
};

class SimNccl final : public c10d::Backend {
  public:
    SimNccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, bool high_priority,
            std::vector<int64_t> ranks);

    const std::string getBackendName() const override { return "nccl"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    bool supportsCoalescing() const override { return true; }
    bool supportsSplitting() const override { return true; }
    c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                      const c10::intrusive_ptr<Options>& options) override;
    void eagerConnectSingleDevice(at::Device) override {}
    void abort() override { inner_->abort(); }
    void shutdown() override;
    void setTimeout(std::chrono::milliseconds t) override { inner_->setTimeout(t); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void startCoalescing() override;
    WorkPtr endCoalescing() override;
    int64_t splits() const { return splits_; }

    WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override;
    WorkPtr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override;
    WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override;
    WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& o) override;
    WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override;
    WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override;
    WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override;
    WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override;
    WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                          std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override;
    WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override;
    WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override;
    WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override;
    WorkPtr send(Tensors& ts, int to, int tag) override { return point(ts, to, tag, true); }
    WorkPtr recv(Tensors& ts, int from, int tag) override { return point(ts, from, tag, false); }
    WorkPtr barrier(const c10d::BarrierOptions& o) override;

  private:
    c10::intrusive_ptr<c10d::Backend> inner_;
    c10::intrusive_ptr<Options> options_;
    bool high_;
    std::vector<int64_t> ranks_;  // of the group, in the job
    const int number_;            // of the group, in this process
    Stream* own_ = nullptr;
    std::map<int, Stream*> p2p_;
    int64_t splits_ = 0;

    std::mutex launch_m_;
    uint64_t tickets_ = 0, sequence_ = 0, messages_ = 0;
    std::atomic<bool> broken_{false};  // a collective has failed: none behind it counts as completed
    std::mutex turn_m_;
    std::condition_variable turn_changed_;
    uint64_t turn_ = 0;

    bool coalescing_ = false;
    std::vector<std::function<WorkPtr()>> batch_;
    Tensors batch_keep_;
    std::vector<Span> batch_spans_;
    std::vector<c10::intrusive_ptr<GroupWork>> coalesced_;  // collectives since startCoalescing

    static int check(const Tensors& ts);
    static std::string sign(const char* name, const at::Tensor& t, int64_t extra = 0);
    std::string recorded_name(const Operation& op) const;
    std::shared_ptr<Flight> recorded(const Operation& op, bool collective);
    WorkPtr launch(int dev, bool async, Operation op, Stream* given = nullptr, bool collective = true);
    void in_turn(uint64_t ticket, const std::string& name, const Place& place, const std::function<void()>& run);
    void agree(const std::string& name, const Place& place);
    WorkPtr point(Tensors& ts, int peer, int tag, bool sends);

    void reduce_all(at::Tensor t, const c10d::ReduceOp& op);
    void gather_all(at::Tensor out, at::Tensor in);
    void scatter_sum(at::Tensor out, at::Tensor in, const c10d::ReduceOp& op);
};

}  // namespace sim
