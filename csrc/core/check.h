// Errors of the core are exceptions whose text describes the problem and the solution.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

// AMPFUSE_CHECK(ok, "what is wrong: ", value, "; do this")
#define AMPFUSE_CHECK(condition, ...)                                            \
  do {                                                                           \
    if (!(condition)) throw std::runtime_error(::ampfuse::message(__VA_ARGS__)); \
  } while (0)

namespace ampfuse {

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace ampfuse
