// What this compiler's headers ask of later libraries than those of manylinux_2_28 (glibc 2.28,
// libstdc++ of GCC 8), for the core and the bindings themselves. See OldLibraries.cmake.
//
// Compiled without libstdc++'s promise that the library has the common instances of its templates.
#include <new>
#include <sstream>

template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// glibc 2.32: without threads libstdc++ would count references faster.
HIDDEN char __libc_single_threaded = 0;

HIDDEN void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// std::exception_ptr's counting, by its copy constructor and its destructor, which are older.
void copy_exception(void* copy,
                    const void* of) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
HIDDEN void add_reference(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
HIDDEN void release(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(void* self) {
  void* copy = nullptr;
  copy_exception(&copy, self);
}

void release(void* self) {
  destroy_exception(self);
  *static_cast<void**>(self) = nullptr;
}
}
