// Tickets for launches whose last block continues, see last_block.cuh.
//
// Note [tickets]. A launch needs tickets that are zero when it begins, and that no other launch
// counts in while it runs. As each launch leaves its tickets at zero, launches that run one after
// another may share them.
//   - Launches on a stream do, so a stream has its own, zeroed once, for good. Streams are told
//     apart by id: a handle may be used again while the work of the stream before still runs.
//   - A captured launch has its own, which belong to the graph: branches of a graph run at once,
//     and a replay runs beside the stream that it was captured on. Replays of a graph run one after
//     another; where two instances of it would not, they would share everything else that the graph
//     has been given, too.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ampfuse {

// For the next launch on `stream`, of the current device.
unsigned* take_tickets(int64_t count, cudaStream_t stream);

}  // namespace ampfuse
