# Ask the interpreter where torch is and whether there is an nvcc.
#
# find_package(Torch) is not used: with a CUDA torch it insists on a toolkit of the same version,
# fails when there is none, and writes its own architecture flags.
#
# defines: torch::torch           what a binding compiles and links against
#          AMPFUSE_TORCH_VERSION  "2.14.1+cu130"
#          AMPFUSE_TORCH_CUDA     "13.0", or empty for a CPU build
#          AMPFUSE_TORCH_OLDEST, AMPFUSE_TORCH_NEWEST  "2.11", "2.15": the releases tested
#          AMPFUSE_NVCC           path, or empty
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/buildtools/probe.py"
  OUTPUT_VARIABLE probe ERROR_VARIABLE probe_error RESULT_VARIABLE probe_result
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT probe_result EQUAL 0)
  message(FATAL_ERROR "${probe_error}")
elseif(probe_error)
  message(NOTICE "${probe_error}")
endif()

string(JSON AMPFUSE_TORCH_VERSION GET "${probe}" torch version)
string(JSON AMPFUSE_TORCH_CUDA ERROR_VARIABLE ignored GET "${probe}" torch cuda)
string(JSON AMPFUSE_TORCH_OLDEST GET "${probe}" tested 0)
string(JSON AMPFUSE_TORCH_NEWEST GET "${probe}" tested 1)
string(JSON torch_lib_dir GET "${probe}" torch lib_dir)
string(JSON torch_cxx11_abi GET "${probe}" torch cxx11_abi)
set(torch_include_dirs)
string(JSON count LENGTH "${probe}" torch include_dirs)
math(EXPR last "${count} - 1")
foreach(index RANGE ${last})
  string(JSON directory GET "${probe}" torch include_dirs ${index})
  list(APPEND torch_include_dirs "${directory}")
endforeach()
string(JSON AMPFUSE_NVCC ERROR_VARIABLE no_nvcc GET "${probe}" nvcc path)
if(no_nvcc)
  set(AMPFUSE_NVCC "")
endif()

# torch's headers bundle the pybind11 that torch itself was built with: use no other. torch_cuda is
# left out on purpose, so that the module loads with a CPU build of the same torch version too.
add_library(torch::torch INTERFACE IMPORTED)
target_include_directories(torch::torch SYSTEM INTERFACE ${torch_include_dirs})
target_compile_definitions(torch::torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=$<BOOL:${torch_cxx11_abi}> TORCH_API_INCLUDE_EXTENSION_H)
foreach(library c10 torch_cpu torch torch_python)
  target_link_libraries(torch::torch INTERFACE
    "${torch_lib_dir}/${CMAKE_SHARED_LIBRARY_PREFIX}${library}${CMAKE_SHARED_LIBRARY_SUFFIX}")
endforeach()
target_link_libraries(torch::torch INTERFACE Python::Module)
