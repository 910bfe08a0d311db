# torch's headers, and stubs to link against. Nothing of torch's own libraries is needed to build:
# an empty library of the same name puts the name into DT_NEEDED, and by the time ours is loaded
# `import torch` has loaded the real one.
find_path(ONEPASS_TORCH_INCLUDE torch/csrc/stable/library.h
  HINTS $ENV{ONEPASS_TORCH_INCLUDE}
  PATH_SUFFIXES torch/include)
if(NOT ONEPASS_TORCH_INCLUDE)
  find_package(Python QUIET COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(ONEPASS_TORCH_INCLUDE torch/csrc/stable/library.h HINTS ${torch_package}/include)
endif()
if(NOT ONEPASS_TORCH_INCLUDE)
  message(FATAL_ERROR
    "onepass needs the headers of torch 2.10 or newer and found none. Install torch first, or pass "
    "-DONEPASS_TORCH_INCLUDE=<site-packages>/torch/include.")
endif()

set(ONEPASS_TORCH_HEADERS unknown)
if(EXISTS ${ONEPASS_TORCH_INCLUDE}/../version.py)
  file(STRINGS ${ONEPASS_TORCH_INCLUDE}/../version.py line REGEX "^__version__")
  string(REGEX REPLACE ".*['\"](.+)['\"].*" "\\1" ONEPASS_TORCH_HEADERS "${line}")
endif()
message(STATUS "onepass: torch ${ONEPASS_TORCH_HEADERS} headers, stable ABI of torch 2.10")

file(WRITE ${CMAKE_BINARY_DIR}/empty.cpp "")
foreach(name torch_cpu torch_cuda)
  add_library(${name}_stub SHARED EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/empty.cpp)
  set_target_properties(${name}_stub PROPERTIES OUTPUT_NAME ${name}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/stubs)
endforeach()

# An op library: the contract layer ${ops_sources}, one back end, the stable ABI, no Python.
file(GLOB ops_sources CONFIGURE_DEPENDS csrc/ops/*.cpp)
function(onepass_op_library target)
  add_library(${target} SHARED ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_include_directories(${target} SYSTEM PRIVATE ${ONEPASS_TORCH_INCLUDE})
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
  target_link_libraries(${target} PRIVATE torch_cpu_stub)
  target_link_options(${target} PRIVATE -Wl,--no-as-needed)
  set_target_properties(${target} PROPERTIES SKIP_BUILD_RPATH ON SKIP_INSTALL_RPATH ON)
  install(TARGETS ${target} LIBRARY DESTINATION onepass/_lib)
endfunction()
