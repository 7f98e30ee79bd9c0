# Decide whether the CUDA backend is built and for which architectures.
#
# uses:    AMPFUSE_CUDA, AMPFUSE_CUDA_ARCHS, AMPFUSE_NVCC, AMPFUSE_CORE
# defines: AMPFUSE_WITH_CUDA        true or false
#          AMPFUSE_CUDA_ARCH_NAMES  "compute_75 sm_75 sm_80", empty without CUDA
#          AMPFUSE_CUDA_CODE        the same, as nvcc's options
#          AMPFUSE_CUDA_NOTE        why it is as it is, for the summary
#          AMPFUSE_CUDART_STATIC    the CUDA runtime as a static library (where it is compiled for
#                                   another processor, buildtools/wheel.py defines it)
set(AMPFUSE_WITH_CUDA OFF)
set(AMPFUSE_CUDA_ARCH_NAMES "")
if(AMPFUSE_CORE)
  set(AMPFUSE_CUDA_NOTE "as in the core, which was compiled before")
  return()
endif()
if("${AMPFUSE_CUDA}" STREQUAL "")
  set(AMPFUSE_CUDA AUTO)
endif()
string(TOUPPER "${AMPFUSE_CUDA}" cuda_mode)
if(cuda_mode MATCHES "^(OFF|0|NO|FALSE)$")
  set(AMPFUSE_CUDA_NOTE "switched off (AMPFUSE_CUDA=${AMPFUSE_CUDA})")
  return()
elseif(NOT cuda_mode MATCHES "^(AUTO|ON|1|YES|TRUE)$")
  message(FATAL_ERROR "AMPFUSE_CUDA must be AUTO, ON or OFF, not '${AMPFUSE_CUDA}'.")
endif()

# An explicit -DCMAKE_CUDA_COMPILER wins over what the probe found.
if(NOT CMAKE_CUDA_COMPILER AND AMPFUSE_NVCC)
  set(CMAKE_CUDA_COMPILER "${AMPFUSE_NVCC}")
endif()
if(CMAKE_CUDA_COMPILER)
  # The compiler check links a program, and PyPI's packages keep cudart in lib/, where their nvcc
  # does not look. (What is called nvcc may be a script elsewhere, so nvcc itself says where it is.)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --dryrun -x cu /dev/null
    OUTPUT_QUIET ERROR_VARIABLE dryrun)
  string(REGEX MATCH "TOP=([^\n]+)" nvcc_root "${dryrun}")
  get_filename_component(nvcc_root "${CMAKE_MATCH_1}" REALPATH)
  if(NOT EXISTS "${nvcc_root}/lib64" AND EXISTS "${nvcc_root}/lib/libcudart_static.a")
    set(ENV{LIBRARY_PATH} "${nvcc_root}/lib:$ENV{LIBRARY_PATH}")
  endif()
  if(CMAKE_CROSSCOMPILING AND AMPFUSE_CUDART_STATIC)
    # nvcc looks for headers and cudart in a folder of the other processor, which a toolkit lacks. The
    # headers are the same for all.
    get_filename_component(cudart_folder "${AMPFUSE_CUDART_STATIC}" DIRECTORY)
    string(APPEND CMAKE_CUDA_FLAGS " -I${nvcc_root}/include -L${cudart_folder}")
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  # Ours go to nvcc below, not by way of CMake, which compiles each from PTX of its own.
  set(requested_archs "${CMAKE_CUDA_ARCHITECTURES}")
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  string(CONCAT AMPFUSE_CUDA_NOTE
    "no working nvcc of CUDA 12 or later found (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda)")
  if(NOT cuda_mode STREQUAL "AUTO")
    message(FATAL_ERROR "AMPFUSE_CUDA=ON, but ${AMPFUSE_CUDA_NOTE}. Install the CUDA toolkit, or set "
      "CUDACXX to its nvcc, or leave AMPFUSE_CUDA unset to build for the CPU.")
  endif()
  return()
endif()
enable_language(CUDA)
set(AMPFUSE_WITH_CUDA ON)
set(AMPFUSE_CUDA_NOTE "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_COMPILER}")

# find_package(CUDAToolkit) would also want the shared cudart, which PyPI's packages name otherwise.
find_library(AMPFUSE_CUDART_STATIC cudart_static REQUIRED NO_CACHE
  HINTS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} "${nvcc_root}/lib64" "${nvcc_root}/lib"
  PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})

# The architectures, from the most explicit statement to the widest default. Each route yields
# "7.5;8.0+PTX" or "75;80-real;90-virtual" or "native".
set(archs "${AMPFUSE_CUDA_ARCHS}")
set(source "asked for")
if(NOT archs)
  set(archs "${requested_archs}")
endif()
if(NOT archs AND DEFINED ENV{CUDAARCHS})
  set(archs "$ENV{CUDAARCHS}")
endif()
if(NOT archs AND DEFINED ENV{TORCH_CUDA_ARCH_LIST})
  set(archs "$ENV{TORCH_CUDA_ARCH_LIST}")
  set(source "TORCH_CUDA_ARCH_LIST")
endif()
if(NOT archs OR archs STREQUAL "native")
  # One line per GPU, as 9.0.
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE visible ERROR_QUIET RESULT_VARIABLE smi_result)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" visible "${visible}")
  if(smi_result EQUAL 0 AND visible)
    set(archs "${visible}")
    set(source "the GPUs of this machine")
  elseif(archs STREQUAL "native")
    message(FATAL_ERROR "The architecture 'native' was asked for, but nvidia-smi shows no GPU.")
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND
      CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(archs 90 100 120+PTX)
    set(source "default for ARM: Grace with Hopper or Blackwell")
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(archs 75 80 86 89 90 100 120)
    set(source "default for CUDA 13")
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(archs 60 70 75 80 86 89 90 100 120)
    set(source "default for CUDA 12.8")
  else()
    set(archs 60 70 75 80 86 89 90)
    set(source "default for CUDA 12")
  endif()
endif()

# The PTX of the oldest architecture of a generation serves all of it, is compiled once, and is kept
# for other GPUs and later ones. The generations: Pascal, whose scheduling of threads its PTX keeps
# wherever it runs; Volta and Turing; and what has instructions for BF16. PTX that is asked for (+PTX,
# -virtual) is made besides.
string(REGEX REPLACE "[ ,]+" ";" archs "${archs}")
set(all)
set(real)
set(virtual)
foreach(arch IN LISTS archs)
  string(REGEX MATCH "^([0-9]+)\\.?([0-9]?)[af]?(\\+PTX|-real|-virtual)?$" matched "${arch}")
  if(NOT matched)
    message(FATAL_ERROR "'${arch}' is no GPU architecture; write 75 or 7.5, 80-real, 90-virtual or 9.0+PTX.")
  endif()
  list(APPEND all ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  if(NOT CMAKE_MATCH_3 STREQUAL "-virtual")
    list(APPEND real ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
  if(CMAKE_MATCH_3 STREQUAL "-virtual" OR CMAKE_MATCH_3 STREQUAL "+PTX")
    list(APPEND virtual ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
endforeach()
list(REMOVE_DUPLICATES all)
list(SORT all COMPARE NATURAL)
set(AMPFUSE_CUDA_CODE)
foreach(pattern IN ITEMS "^6" "^7" "^[189]")
  set(generation ${all})
  list(FILTER generation INCLUDE REGEX "${pattern}")
  if(NOT generation)
    continue()
  endif()
  list(GET generation 0 oldest)
  set(code compute_${oldest})
  foreach(arch IN LISTS generation)
    if(arch IN_LIST real)
      string(APPEND code ",sm_${arch}")
    endif()
  endforeach()
  list(APPEND AMPFUSE_CUDA_CODE "--generate-code=arch=compute_${oldest},code=[${code}]")
  string(REPLACE "," " " code "${code}")
  string(APPEND AMPFUSE_CUDA_ARCH_NAMES "${code} ")
  list(REMOVE_ITEM generation ${oldest})
  foreach(arch IN LISTS generation)
    if(arch IN_LIST virtual)
      list(APPEND AMPFUSE_CUDA_CODE "--generate-code=arch=compute_${arch},code=compute_${arch}")
      string(APPEND AMPFUSE_CUDA_ARCH_NAMES "compute_${arch} ")
    endif()
  endforeach()
endforeach()
string(STRIP "${AMPFUSE_CUDA_ARCH_NAMES}" AMPFUSE_CUDA_ARCH_NAMES)
string(APPEND AMPFUSE_CUDA_NOTE " (${source})")
