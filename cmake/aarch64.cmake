# A toolchain for Linux on 64-bit ARM, of which Debian's package is g++-aarch64-linux-gnu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
# The interpreter is this machine's, so it runs as it is: CMake would want one for the target.
set(CMAKE_CROSSCOMPILING_EMULATOR env)
