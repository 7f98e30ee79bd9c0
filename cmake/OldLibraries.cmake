# Bind the core and the bindings to the symbols of manylinux_2_28, whatever this machine has, so that
# they run wherever torch does. glibc 2.34 moved functions of libpthread, libdl and librt into libc
# under new versions: stand-ins say the old ones, which every glibc still has. What headers ask of later
# libraries is in old_libraries.cpp. `make wheel` checks the result (auditwheel).
#
# defines: old_libraries, to link before all else
add_library(old_libraries INTERFACE)
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  return()
endif()
# The first glibc of an architecture, whose version most of its functions still have.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(first_glibc GLIBC_2.2.5)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(first_glibc GLIBC_2.17)
else()
  return()
endif()
set(moved_to_libpthread
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join
  pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy
  pthread_mutexattr_init pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once
  pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock pthread_rwlock_timedrdlock
  pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock
  pthread_rwlock_wrlock pthread_rwlockattr_destroy pthread_rwlockattr_init
  pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy pthread_spin_init
  pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post
  sem_timedwait sem_trywait sem_wait)
set(moved_to_libdl dlclose dlerror dlopen dlsym dlvsym)
set(moved_to_librt shm_open shm_unlink)
if(first_glibc STREQUAL "GLIBC_2.17")
  list(APPEND moved_to_libdl dlmopen)
endif()

add_library(old_library_objects OBJECT "${CMAKE_CURRENT_LIST_DIR}/old_libraries.cpp")
target_compile_features(old_library_objects PRIVATE cxx_std_20)
target_compile_definitions(old_library_objects PRIVATE _GLIBCXX_EXTERN_TEMPLATE=0)
target_link_libraries(old_libraries INTERFACE $<TARGET_OBJECTS:old_library_objects>)
foreach(library IN ITEMS pthread:0 dl:2 rt:1)
  string(REPLACE ":" ";" name_and_version ${library})
  list(GET name_and_version 0 name)
  list(GET name_and_version 1 version)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/old_${name}.cpp")
  set(text "")
  set(map "${first_glibc} {")
  foreach(function IN LISTS moved_to_lib${name})
    string(APPEND text "extern \"C\" void ${function}() {}\n")
    string(APPEND map " ${function}\;")
  endforeach()
  string(APPEND map " }\;\n")
  if(name STREQUAL dl AND NOT dlmopen IN_LIST moved_to_libdl)
    string(APPEND text "extern \"C\" void dlmopen() {}\n")
    string(APPEND map "GLIBC_2.3.4 { dlmopen\; } ${first_glibc}\;\n")
  endif()
  file(WRITE "${source}" "${text}")
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/old_${name}.map" "${map}")
  add_library(old_${name} SHARED "${source}")
  target_compile_options(old_${name} PRIVATE -fno-builtin -fvisibility=default)
  target_link_options(old_${name} PRIVATE -nostdlib
    "-Wl,--version-script=${CMAKE_CURRENT_BINARY_DIR}/old_${name}.map")
  set_target_properties(old_${name} PROPERTIES VERSION ${version} SOVERSION ${version}
    OUTPUT_NAME ${name} LIBRARY_OUTPUT_DIRECTORY stand_ins)
  target_link_libraries(old_libraries INTERFACE old_${name})
endforeach()
