# Ask the interpreter where torch is and whether there is an nvcc.
#
# find_package(Torch) is not used: with a CUDA torch it insists on a toolkit of the same version,
# fails when there is none, and writes its own architecture flags.
#
# defines: AMPFUSE_TORCHES        2_14;2_15: releases to bind
#          torch::2_15 ...        what such a binding compiles and links against
#          AMPFUSE_TORCH_VERSIONS, as "2.15.0+cu130"
#          AMPFUSE_TORCH_CUDA     "13.0", or empty for a CPU build, or where only headers are
#          AMPFUSE_TORCH_OLDEST, AMPFUSE_TORCH_NEWEST  "2.11", "2.15": the releases tested
#          AMPFUSE_NVCC           path, or empty
#          AMPFUSE_CORE           path, if one can be taken and none was named
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/buildtools/probe.py"
          ${AMPFUSE_TORCH_INCLUDES}
  OUTPUT_VARIABLE probe ERROR_VARIABLE probe_error RESULT_VARIABLE probe_result
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT probe_result EQUAL 0)
  message(FATAL_ERROR "${probe_error}")
elseif(probe_error)
  message(NOTICE "${probe_error}")
endif()

string(JSON AMPFUSE_TORCH_CUDA ERROR_VARIABLE ignored GET "${probe}" torches 0 cuda)
string(JSON AMPFUSE_TORCH_OLDEST GET "${probe}" tested 0)
string(JSON AMPFUSE_TORCH_NEWEST GET "${probe}" tested 1)
string(JSON AMPFUSE_NVCC ERROR_VARIABLE no_nvcc GET "${probe}" nvcc path)
if(no_nvcc)
  set(AMPFUSE_NVCC "")
endif()
if(NOT AMPFUSE_CORE)
  string(JSON AMPFUSE_CORE ERROR_VARIABLE no_core GET "${probe}" core)
  if(no_core)
    set(AMPFUSE_CORE "")
  endif()
endif()

# A binding names torch's libraries, so that it finds their symbols in the process; that is all that
# linking takes from them. So empty ones do, and one serves CPU and CUDA builds of a release:
# torch_cuda is left out on purpose.
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/empty.cpp" "")
add_library(torch_libraries INTERFACE)
target_link_options(torch_libraries INTERFACE -Wl,--no-as-needed)
foreach(library c10 torch_cpu torch torch_python)
  add_library(stand_in_${library} SHARED "${CMAKE_CURRENT_BINARY_DIR}/empty.cpp")
  set_target_properties(stand_in_${library} PROPERTIES
    OUTPUT_NAME ${library} LIBRARY_OUTPUT_DIRECTORY stand_ins)
  target_link_libraries(torch_libraries INTERFACE stand_in_${library})
endforeach()

# torch's headers bundle the pybind11 that torch itself was built with: use no other.
set(AMPFUSE_TORCHES)
set(AMPFUSE_TORCH_VERSIONS)
string(JSON torch_count LENGTH "${probe}" torches)
math(EXPR last_torch "${torch_count} - 1")
foreach(index RANGE ${last_torch})
  string(JSON version GET "${probe}" torches ${index} version)
  string(JSON include GET "${probe}" torches ${index} include_dir)
  string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" matched "${version}")
  set(torch ${CMAKE_MATCH_1}_${CMAKE_MATCH_2})
  list(APPEND AMPFUSE_TORCHES ${torch})
  list(APPEND AMPFUSE_TORCH_VERSIONS ${version})
  add_library(torch::${torch} INTERFACE IMPORTED)
  target_include_directories(torch::${torch} SYSTEM INTERFACE
    "${include}" "${include}/torch/csrc/api/include")
  target_compile_definitions(torch::${torch} INTERFACE TORCH_API_INCLUDE_EXTENSION_H)
  target_link_libraries(torch::${torch} INTERFACE torch_libraries Python::Module)
endforeach()
