# Choose the instruction sets that the CPU kernels are compiled for.
#
# uses:    AMPFUSE_CPU_ISAS
# defines: cpu_isas  some of scalar, avx2 and avx512; on ARM, some of scalar and neon
set(all_isas scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  list(APPEND all_isas avx2 avx512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(APPEND all_isas neon)
endif()
if(AMPFUSE_CPU_ISAS STREQUAL "scalar")
  set(cpu_isas scalar)
elseif(AMPFUSE_CPU_ISAS STREQUAL "all")
  set(cpu_isas ${all_isas})
elseif(AMPFUSE_CPU_ISAS STREQUAL "native" AND NOT avx512 IN_LIST all_isas)
  list(GET all_isas -1 cpu_isas)  # every machine has it
elseif(AMPFUSE_CPU_ISAS STREQUAL "native")
  # The compiler's macros for this machine.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
    OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
  set(cpu_isas avx512)
  foreach(part IN ITEMS AVX512F AVX512BW AVX512DQ AVX512VL)
    if(NOT macros MATCHES "__${part}__")
      set(cpu_isas avx2)
    endif()
  endforeach()
  foreach(part IN ITEMS AVX2 FMA F16C)
    if(NOT macros MATCHES "__${part}__")
      set(cpu_isas scalar)
    endif()
  endforeach()
else()
  message(FATAL_ERROR "AMPFUSE_CPU_ISAS must be all, native or scalar, not '${AMPFUSE_CPU_ISAS}'.")
endif()
