// Distribution of work to threads.
#pragma once

#include <cstdint>
#include <functional>

namespace ampfuse {

// Calls body(piece, pieces) for every piece, on one thread if `cost`, in elements, is small. A
// thread owns neighbouring pieces, the same in every call, and walks them forwards; a thread that
// finishes early takes pieces that others have not begun. FloatMode is standard within.
void share_out(int64_t cost, const std::function<void(int64_t piece, int64_t pieces)>& body);

}  // namespace ampfuse
