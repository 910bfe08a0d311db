# libonepass_cuda.so, if there is an nvcc. No visible GPU is needed: containers build without one.
set(ONEPASS_CUDA_ARCHS_TEXT "")
set(ONEPASS_CUDA_VERSION "")
if(ONEPASS_CUDA STREQUAL "OFF")
  message(STATUS "onepass: CPU only (ONEPASS_CUDA=OFF)")
  return()
endif()

# No nvcc, one that cannot compile with this host compiler, or one without C++20.
set(obstacle "")
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # a search that failed in this folder before is repeated
endif()
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" text "${text}")
  if(CMAKE_MATCH_1 AND CMAKE_MATCH_1 VERSION_LESS 12.0)
    set(obstacle "${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_MATCH_1}, and C++20 needs 12.0")
  endif()
else()
  find_program(nvcc_on_path nvcc NO_CACHE NO_DEFAULT_PATH PATHS ENV PATH)
  set(candidate "$ENV{CUDACXX}")
  if(nvcc_on_path AND NOT candidate)
    set(candidate ${nvcc_on_path})
  endif()
  if(candidate)
    set(obstacle
      "${candidate} does not work with ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  else()
    set(obstacle "there is no nvcc")
  endif()
endif()
if(obstacle)
  if(ONEPASS_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "ONEPASS_CUDA=ON, but ${obstacle}. Put the nvcc of CUDA 12.0 or newer on PATH, set CUDACXX to "
      "it, or use ONEPASS_CUDA=OFF.")
  endif()
  message(STATUS "onepass: CPU only (${obstacle})")
  return()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/cuda_archs.cmake)
onepass_cuda_archs(archs "${ONEPASS_CUDA_ARCHS}" ${CMAKE_CUDA_COMPILER})
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

# Those that take longest come first: one of them alone at the end would leave cores idle.
file(GLOB norm_sources CONFIGURE_DEPENDS csrc/cuda/norm/*.cu)
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/cuda/*/*.cu)
list(PREPEND cuda_sources ${norm_sources})
list(REMOVE_DUPLICATES cuda_sources)
onepass_op_library(onepass_cuda ${cuda_sources} ${ops_sources})
# These have no kernels, so that nvcc would read them once for each architecture in vain.
set_source_files_properties(csrc/cuda/kernels.cu csrc/cuda/facts.cu csrc/cuda/attention/backend.cu
  PROPERTIES LANGUAGE CXX)
# Kernels of attention use instructions that are there from sm_90 on (cuda/ptx.cuh); with nvcc 13,
# PTX of all others differs from sm_100 on alone.
set_target_properties(onepass_cuda PROPERTIES CUDA_ARCHITECTURES OFF)
foreach(source IN LISTS cuda_sources)
  set(borders 80 100)
  if(source MATCHES "/cuda/attention/")
    set(borders 80 90 100)
  endif()
  onepass_cuda_code(code "${archs}" "${borders}")
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS
    "$<$<COMPILE_LANGUAGE:CUDA>:${code}>")
endforeach()
# std::bit_cast and std::array are constexpr and nothing else says __device__. Multiply-adds are fused
# where the source says so, as on the CPU.
target_compile_options(onepass_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --fmad=false>)
target_compile_definitions(onepass_cuda PRIVATE ONEPASS_CUDA ONEPASS_DISPATCH_KEY=CUDA USE_CUDA)
target_include_directories(onepass_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(onepass_cuda PRIVATE torch_cuda_stub)
set_target_properties(onepass_cuda PROPERTIES CUDA_VISIBILITY_PRESET hidden)
