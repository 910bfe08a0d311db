# libonepass_cpu.so: csrc/cpu compiled once per level. The objects of a level are merged and every
# symbol but the level's table is made local: otherwise the linker would keep one copy of an inline
# function for all levels, and a machine without AVX-512 could get AVX-512 code.
set(levels baseline)
set(flags_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(levels baseline avx2 avx512 avx512_bf16)
  set(flags_baseline -march=x86-64)
  set(flags_avx2 -march=x86-64-v3)
  set(flags_avx512 -march=x86-64-v4 -mprefer-vector-width=512)
  set(flags_avx512_bf16 ${flags_avx512} -mavx512bf16)
endif()
set(ONEPASS_CPU_LEVELS "" CACHE STRING "CPU levels to build, from the least, e.g. baseline;avx2; empty: all")
if(ONEPASS_CPU_LEVELS)
  set(levels ${ONEPASS_CPU_LEVELS})
endif()
set(level_list "")
foreach(level ${levels})
  if(NOT DEFINED flags_${level})
    message(FATAL_ERROR "onepass: ONEPASS_CPU_LEVELS names ${level}, which is no level of this machine.")
  endif()
  string(APPEND level_list "LEVEL(${level}) ")
endforeach()
list(JOIN levels ", " ONEPASS_CPU_LEVELS_TEXT)
set(optimization -O3)
if(ONEPASS_SANITIZE)
  set(optimization -O1)  # compiles in a fraction of the time
endif()

# GNU ld by name: other linkers that a compiler may prefer have no --force-group-allocation.
find_program(ONEPASS_LD NAMES ld.bfd ld REQUIRED)

file(GLOB cpu_sources CONFIGURE_DEPENDS csrc/cpu/*.cpp csrc/cpu/*/*.cpp)
set(level_objects "")
foreach(level ${levels})
  add_library(cpu_${level} OBJECT ${cpu_sources})
  target_include_directories(cpu_${level} PRIVATE csrc)
  target_compile_definitions(cpu_${level} PRIVATE ONEPASS_ISA=${level})
  # Fused multiply-adds stand where the source writes fma(), nowhere else (cpu/vec.h).
  target_compile_options(cpu_${level} PRIVATE ${optimization} -ffp-contract=off -fno-math-errno
    ${flags_${level}})
  set(object ${CMAKE_BINARY_DIR}/cpu_${level}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${ONEPASS_LD} -r --force-group-allocation -o ${object} $<TARGET_OBJECTS:cpu_${level}>
    COMMAND ${CMAKE_OBJCOPY} --keep-global-symbol=onepass_cpu_kernels_${level} ${object}
    DEPENDS cpu_${level} $<TARGET_OBJECTS:cpu_${level}>
    COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  list(APPEND level_objects ${object})
endforeach()

onepass_op_library(onepass_cpu ${ops_sources} ${level_objects})
target_compile_definitions(onepass_cpu PRIVATE ONEPASS_DEFINES_SCHEMAS
  "ONEPASS_CPU_LEVELS=${level_list}")
