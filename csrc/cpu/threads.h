// How work is shared out to threads.
#pragma once

#include <cstdint>
#include <functional>

namespace ampfuse {

// body(piece, pieces) for every piece, on one thread where `cost`, in elements, is small. A thread
// owns neighbouring pieces, the same in every call, and walks them forwards; whoever is done early
// takes over what others have not begun. FloatMode is standard within.
void share_out(int64_t cost, const std::function<void(int64_t piece, int64_t pieces)>& body);

}  // namespace ampfuse
