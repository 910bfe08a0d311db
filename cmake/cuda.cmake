# libonepass_cuda.so, if there is an nvcc. A visible GPU is not needed: containers build without.
set(ONEPASS_CUDA_ARCHS_TEXT "")
set(ONEPASS_CUDA_VERSION "")
if(ONEPASS_CUDA STREQUAL "OFF")
  message(STATUS "onepass: CPU only (ONEPASS_CUDA=OFF)")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(ONEPASS_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "ONEPASS_CUDA=ON, but there is no nvcc. Put it on PATH, set CUDACXX, or use ONEPASS_CUDA=OFF.")
  endif()
  message(STATUS "onepass: CPU only (no nvcc found)")
  return()
endif()

set(archs "${ONEPASS_CUDA_ARCHS}")
if(archs STREQUAL "")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capability OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed OR capability STREQUAL "")
    set(archs 80)
  else()
    string(REGEX REPLACE "\n.*" "" capability "${capability}")
    string(REPLACE "." "" archs "${capability}")
  endif()
elseif(archs STREQUAL "all")
  set(archs 80-real 90-real 100-real 120)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${archs})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 knows no C++20 for nvcc
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
list(JOIN archs ", " ONEPASS_CUDA_ARCHS_TEXT)
set(ONEPASS_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
message(STATUS "onepass: CUDA ${ONEPASS_CUDA_VERSION} for ${ONEPASS_CUDA_ARCHS_TEXT}")

# The library holds the device facts that `doctor` asks for; families join it with their kernels
# (and then csrc/ops with ONEPASS_CUDA, through onepass_op_library).
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/cuda/*/*.cu)
add_library(onepass_cuda SHARED ${cuda_sources})
target_include_directories(onepass_cuda PRIVATE csrc)
set_target_properties(onepass_cuda PROPERTIES SKIP_BUILD_RPATH ON SKIP_INSTALL_RPATH ON
  CUDA_VISIBILITY_PRESET hidden)
install(TARGETS onepass_cuda LIBRARY DESTINATION onepass/_lib)
