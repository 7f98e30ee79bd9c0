// What a call that is captured in a CUDA graph needs from the runtime: whether it is, memory that
// lives as long as the graph, and leave to allocate.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace ampfuse {

// Another stream may be capturing in the mode that forbids this thread every call that could wait
// or allocate. Our calls do not affect that capture.
class AllowUnsafeCalls {
 public:
  AllowUnsafeCalls() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowUnsafeCalls() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowUnsafeCalls(const AllowUnsafeCalls&) = delete;
  AllowUnsafeCalls& operator=(const AllowUnsafeCalls&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Capture {
  unsigned long long id = 0;  // unique in the process; 0: the stream does not capture
  cudaGraph_t graph = nullptr;
};

Capture current_capture(cudaStream_t stream);

// A stream for work that a captured call does at once, outside the graph.
class SideStream {
 public:
  SideStream();
  ~SideStream() { (void)cudaStreamDestroy(stream_); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// The owner of the memory is a graph, and a graph's user objects die on a thread that may not call
// CUDA. It is freed by the next free_orphans(), by a thread that may.
std::shared_ptr<void> allocate_for_graph(size_t bytes);
void free_orphans();

// The graph being captured keeps `owned` until it and all its instances are destroyed.
void give_to_graph(const Capture& capture, std::vector<std::shared_ptr<void>> owned);

}  // namespace ampfuse
