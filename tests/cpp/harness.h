// A test is a function that throws where something is wrong. Run all, or those whose name holds one
// of the arguments.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/check.h"

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> tests;
  return tests;
}

struct AddTest {
  AddTest(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                     \
  static void test_##name();                           \
  static const AddTest add_##name{#name, test_##name}; \
  static void test_##name()

#define EXPECT(condition, ...) \
  AMPFUSE_CHECK(condition, __FILE__, ":", __LINE__, ": ", #condition, " ", ##__VA_ARGS__)

inline int run_tests(int argc, char** argv) {
  int failed = 0;
  for (const Test& test : tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted |= std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    try {
      test.run();
      std::printf("ok   %s\n", test.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}
